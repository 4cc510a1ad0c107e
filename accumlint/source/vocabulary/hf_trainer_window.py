"""The window that a Transformers Trainer collects before it trains on it: its batches, and the count of their targets.

`get_batch_samples` fetches the batches of a window and gives them back with the number of their labels. A subclass may override it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.access import bind
from accumlint.source.rehearsal.arithmetic import TOLD_THE_COUNT, factors_of
from accumlint.source.rehearsal.values import NONE, Function, Instance, Items, Known, Opaque, Thing, Value
from accumlint.source.vocabulary import distributed
from accumlint.source.vocabulary import hf_trainer_facts as facts
from accumlint.source.vocabulary.base import receiver_of
from accumlint.source.vocabulary.played import parameters_of
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

KEY = "transformers"


@dataclass
class Training:
    """One rehearsal of a Trainer's loop."""

    function: FunctionNode | ast.Return  # where the events of the Trainer itself are put
    model: Thing
    engine: Thing
    k: Known
    normalised: bool | None  # whether the Trainer takes the loss as normalised; None: it depends on what is not seen
    divides_in_backward: bool  # the Accelerator's own K is the Trainer's
    averages_tokens: bool
    since: str  # the releases that do so
    optimizer: Thing
    count: Value = NONE
    batches: list[Value] = field(default_factory=list)  # of the window, where an override has fetched them


def training_of(state: Machine, call: Call) -> Training | None:
    """The training that is being rehearsed, where a method of the trainer's own is called."""
    training = state.memory.get(KEY)
    owner = state.force(receiver_of(call) or NONE)
    own = isinstance(owner, Instance) or (isinstance(owner, Opaque) and owner.name == "super")
    return training if isinstance(training, Training) and own else None


def count_of(machine: Machine, training: Training) -> Opaque:
    """`num_items_in_batch`: the labels of the window, over all ranks or of this one."""
    quantity = Quantity.GLOBAL_UNITS if training.averages_tokens else Quantity.WINDOW_UNITS
    made = machine.opaque(
        (KEY, "count"), facts.COUNT, quantity=quantity, reduced=True, name=facts.COUNT, causes=frozenset({TOLD_THE_COUNT})
    )
    made.weight = Weight((Factor(quantity, 1, None, facts.COUNT, None, root=facts.COUNT, guarded=True),))
    return made


def collect(machine: Machine, training: Training, trainer: Instance | None) -> None:
    """Before a window: what the override of `get_batch_samples` gives, or the count that the Trainer takes."""
    own = trainer.cls.find(facts.COLLECTS) if trainer is not None else None
    training.batches = []
    if not isinstance(own, Function) or not facts.is_told_how_many(own.node) or trainer is None:
        training.count = count_of(machine, training)
        return
    fetched = machine.opaque((KEY, "batches"), "epoch_iterator", name="epoch_iterator")
    given = [fetched, training.k, machine.opaque((KEY, "device"), "device", name="device")][: len(parameters_of(own))]
    made = machine.force(machine.call_function(bind(own, trainer), given, {}, None))
    parts = [machine.force(part) for part in made.items] if isinstance(made, Items) else []
    if len(parts) != 2:
        training.count = machine.opaque((KEY, "unclear"), facts.COUNT)
        return
    training.batches = list(parts[0].items) if isinstance(parts[0], Items) else []
    training.count = parts[1]


def counts_nothing(function: FunctionNode) -> ast.Return | None:
    """`return batches, None` in an override that returns nothing else."""
    returned = [part for part in walk(function) if isinstance(part, ast.Return)]
    last = returned[0].value if len(returned) == 1 else None
    pair = last.elts if isinstance(last, ast.Tuple) else []
    return returned[0] if len(pair) == 2 and isinstance(pair[1], ast.Constant) and pair[1].value is None else None


def own_batches(state: Machine, call: Call) -> Value | None:
    """`super().get_batch_samples(epoch_iterator, num_batches, …)`."""
    training = training_of(state, call)
    if training is None or not isinstance(training.k.value, int):
        return None
    samples: list[Value] = [state.datum(call.node, "inputs") for _ in range(training.k.value)]
    return Items([Items(samples), count_of(state, training)], "tuple")


def own_count(state: Machine, call: Call) -> Value | None:
    """`self._get_num_items_in_batch(batch_samples, device)`."""
    training = training_of(state, call)
    return count_of(state, training) if training is not None else None


def gathered(state: Machine, call: Call) -> Value | None:
    """`self.accelerator.gather(count)`: a count over all ranks, once it is summed."""
    training = state.memory.get(KEY)
    if not isinstance(training, Training) or state.force(receiver_of(call) or NONE) is not training.engine or not call.args:
        return None
    value = state.force(call.args[0])
    if not isinstance(value, Opaque):
        return value
    made = value.copied()
    made.agreed, made.forwards, made.attached = True, frozenset(), False
    if made.quantity in {Quantity.UNITS, Quantity.WINDOW_UNITS}:
        distributed.all_reduce(state, replace(call, args=[made]))
    return made


def by_count(state: Machine, training: Training, count: Opaque, node: ast.AST) -> Weight:
    """What a sum weighs that the Trainer divides by a count of the user's: unguarded as its own, and of one rank where it gathers none."""
    factors = (replace(each, guarded=True) for each in factors_of(state, count, -1, node))
    inherent = frozenset() if training.averages_tokens else frozenset({Quantity.WINDOW_UNITS})
    return Weight(tuple(replace(each, implicit=each.implicit or each.quantity in inherent) for each in factors))
