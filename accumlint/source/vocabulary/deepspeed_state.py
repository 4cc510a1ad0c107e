"""DeepSpeed: what an engine remembers during a rehearsal, and what its configuration says of K and of the stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accumlint.source.reading.index import Index
from accumlint.source.rehearsal.values import Known, Mapping, Opaque, Root, Thing, Value, actor_of, make_actor
from accumlint.source.vocabulary.base import as_actor, last_name, role_of
from accumlint.source.vocabulary.engines import ONE, accumulation
from accumlint.trace import Actor, Place, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine

KEY = "deepspeed"
STEPS = "gradient_accumulation_steps"
NAME = re.compile(
    r"(^|_)(model|engine|net|network|ds|deepspeed|module|actor|critic|student|policy|unet|gen\w*|disc\w*)[A-Z\d]?(_|$)", re.IGNORECASE
)
OTHERS = re.compile(r"optim|scaler|accelerat|fabric|booster|trainer|strategy|plugin|precision|runner|manager|loss|^self$", re.IGNORECASE)


@dataclass
class Engine:
    """One DeepSpeed engine."""

    optimizer: Actor
    root: Root  # what stands for its K where the configuration lies elsewhere
    given: Known | None = None  # its K, where the code says it
    stage: int | None = None  # of ZeRO; None where the configuration lies elsewhere
    managed: bool = True  # it counts the micro-batches itself
    micro_steps: int = 0
    boundary: bool | None = None  # as `set_gradient_accumulation_boundary` said last
    since: set[int] = field(default_factory=set)  # micro-batches that went backward since `step` was called last
    around: frozenset[Place] = frozenset()  # the tests that stood around the last backward
    divided: str = ""  # how the code spells the K that it divides the loss by itself
    singles: int = 0  # calls of `step` in a row that followed one such micro-batch each

    def k(self, state: Machine) -> Known | None:
        """K, where the code says it or shows that it counts on one."""
        if self.given is not None:
            return self.given
        learnt = state.world.knowledge.proven.get(self.root.key)
        return None if learnt is None else Known(state.world.k, frozenset({learnt}), learnt)

    def ends_window(self, state: Machine) -> bool:
        """Whether the micro-batch at hand is the last of the engine's window."""
        if self.boundary is not None:
            return self.boundary
        k = self.k(state)
        return not self.managed or k is None or (self.micro_steps + 1) % int(k.value) == 0

    def holds_back(self, state: Machine) -> bool:
        """Whether the engine ignores its own `step` inside a window that is longer than one micro-batch, or may be."""
        k = self.k(state)
        return self.managed and self.boundary is None and (k is None or k.value != 1)


def remember(state: Machine, actor: Actor, engine: Engine) -> None:
    state.memory[(KEY, actor.uid)] = engine


def engines(state: Machine) -> Iterator[Engine]:
    return (found for found in state.memory.values() if isinstance(found, Engine))


def engine_of(state: Machine, owner: Value | None, spelled: str = "") -> Engine | None:
    """The engine that an object is: one seen being made, or one with a backward and a step that has a name of one, also in its use."""
    actor = actor_of(owner)
    if actor is not None:
        known: Engine | None = state.memory.get((KEY, actor.uid))
        if known is not None or actor.known:
            return known
    if not isinstance(owner, Opaque) or owner.path or owner.forwards or owner.born:
        return None
    named = any(is_engine_name(state.index, name) for name in (last_name(owner), spelled))
    if not named or role_of(state, owner) not in {None, Role.MODEL} or _is_of_other_make(owner):
        return None
    return _by_name(state, owner)


def _is_of_other_make(owner: Opaque) -> bool:
    """Whether an object is of a class that comes from elsewhere: `Engine(model, k)` that is none of DeepSpeed's."""
    made = owner.key[1] if owner.key[0] == "call" and len(owner.key) > 1 else None
    path = str(made[1]) if isinstance(made, tuple) and made[0] == "import" and len(made) > 1 else ""
    return path.rsplit(".", 1)[-1][:1].isupper() and "deepspeed" not in path.lower()


def is_engine_name(index: Index, name: str) -> bool:
    return bool(NAME.search(name)) and not OTHERS.search(name) and {"backward", "step"} <= index.usage.get(name, set())


def _by_name(state: Machine, owner: Opaque) -> Engine:
    actor = as_actor(state, owner, Role.MODEL)
    assert actor is not None
    owner.actor = replace(actor, wrapper=Wrapper.ZERO)
    optimizer = make_actor(Role.OPTIMIZER, f"{actor.name}.optimizer", base=actor.uid, known=False)
    engine = Engine(optimizer, Root((KEY, actor.name), STEPS))
    remember(state, owner.actor, engine)
    return engine


def engine_behind(state: Machine, optimizer: Actor | None) -> Engine | None:
    """The engine that an optimizer belongs to."""
    return next((one for one in engines(state) if optimizer is not None and one.optimizer.uid == optimizer.uid), None)


def learn(state: Machine, engine: Engine, text: str) -> None:
    """What the code does by hand shows that the engine accumulates, and how it spells K."""
    if engine.given is None:
        state.world.knowledge.learn_engine(replace(engine.root, text=text))


# The configuration.
def steps_in(state: Machine, config: Value | None) -> Known | None:
    """K as a configuration gives it; None where it lies in a file, is left to another program, or follows from a batch size."""
    value = _entry(state, config, STEPS)
    if value is not None:
        return _number(state, config, value)
    total = _entry(state, config, "train_batch_size")
    if total is not None:
        return _from_total(state, total)
    return ONE if isinstance(config, Mapping) and not config.text and config.items else None


def _number(state: Machine, config: Value | None, value: Value) -> Known | None:
    value = state.force(value)
    if isinstance(value, Known):
        root = value.root
        in_place = root is not None and root.kind == "constant" and root.key[1] == STEPS
        if type(value.value) is not int:
            return None  # "auto"
        if (root is None and value.value == 1) or (in_place and root is not None and root.default == 1):
            if isinstance(config, Mapping):
                config.items[STEPS] = ONE
            return ONE
    if isinstance(value, Opaque) and (value.born or value.forwards):
        return None
    return accumulation(state, value, None, STEPS)


def _from_total(state: Machine, total: Value) -> Known | None:
    """`train_batch_size = micro_batch * world_size * K`: the setting of K that is a part of it."""
    total = state.force(total)
    found: list[Root] = []
    known = state.world.knowledge.accumulations
    if isinstance(total, Known):
        found = [root for root in total.roots if root.key in known]
    elif isinstance(total, Opaque):
        parts = set(_parts(total.key))
        found = [root for key, root in known.items() if key in parts]
    if len(found) != 1:
        return None
    state.world.knowledge.learn_accumulation(found[0])
    return Known(state.world.k, frozenset(found), found[0])


def _parts(key: Any) -> Iterator[Any]:
    """A key and the keys that it was made of."""
    pending = [key]
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            yield part
            pending.extend(part)


def stage_in(state: Machine, config: Value | None) -> int | None:
    """The stage of ZeRO; None where the configuration lies elsewhere."""
    zero = _entry(state, config, "zero_optimization")
    if zero is None:
        return 0 if isinstance(config, Mapping) and not config.text and config.items else None
    stage = _entry(state, zero, "stage")
    if stage is None:
        return 0 if isinstance(zero, Mapping) else None
    stage = state.force(stage)
    return int(stage.value) if isinstance(stage, Known) and type(stage.value) is int else None


def is_managed(state: Machine, config: Value | None) -> bool:
    value = _entry(state, config, "managed_gradient_accumulation")
    return value is None or state.truth(value, flips=False)


def _entry(state: Machine, config: Value | None, name: str) -> Value | None:
    config = state.force(config) if config is not None else None
    if isinstance(config, Mapping):
        return config.items.get(name)
    return config.attributes.get(f"[{name!r}]") if isinstance(config, (Opaque, Thing)) else None
