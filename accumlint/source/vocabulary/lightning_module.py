"""What a LightningModule has while its Trainer runs it: optimizers and schedulers, the precision's scaler, the place in the loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.access import bind
from accumlint.source.rehearsal.values import Function, Instance, Items, Known, Mapping, Opaque, Thing, Value, actor_of
from accumlint.source.vocabulary.base import role_of
from accumlint.source.vocabulary.engines import HALF, ONE, precision_scaler
from accumlint.trace import Actor, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine

CURRENT = "lightning"  # where the memory of a rehearsal keeps the module that runs
K_NAME = "accumulate_grad_batches"
TRAINER_WORDS = frozenset({K_NAME, "max_epochs", "max_steps", "precision", "devices", "accelerator", "strategy", "gpus", "callbacks"})
SCALING_PLUGINS = frozenset({"MixedPrecision", "MixedPrecisionPlugin"})


@dataclass
class Module:
    """A LightningModule in one rehearsal."""

    instance: Instance
    optimizers: Value  # one, a list, or what nobody knows
    schedulers: Value
    scaler: Actor | None = None
    k: Known = ONE  # of the Trainer; a module that steps by itself has none
    epoch: int = 0
    batches: int = 0  # of an epoch
    last: bool = False
    steps: int = 0  # events, not updates, are counted where the code asks for `global_step`

    @property
    def known_optimizers(self) -> tuple[Actor, ...]:
        values = self.optimizers.items if isinstance(self.optimizers, Items) else [self.optimizers]
        actors = (actor_of(value) for value in values)
        return tuple(actor for actor in actors if actor is not None and actor.role is Role.OPTIMIZER)


def current(state: Machine) -> Module | None:
    """The module whose training step runs now."""
    found = state.memory.get(CURRENT)
    return found if isinstance(found, Module) else None


def begin(state: Machine, instance: Instance) -> Module:
    """The module as its Trainer sets it up."""
    optimizers, schedulers = _configured(state, instance)
    module = Module(instance, optimizers, schedulers, scaler_of(state))
    state.memory[CURRENT] = module
    return module


def _configured(state: Machine, instance: Instance) -> tuple[Value, Value]:
    """What `configure_optimizers` gives: as `self.optimizers()` and `self.lr_schedulers()` give it back."""
    method = instance.cls.find("configure_optimizers")
    optimizers: list[Value] = []
    schedulers: list[Value] = []
    if isinstance(method, Function):
        result = state.call_function(bind(method, instance), [], {}, None)
        if not _sort(state, result, optimizers, schedulers):
            optimizers, schedulers = [], []
    return (
        _given_back(state, optimizers, instance, "optimizers", Role.OPTIMIZER),
        _given_back(state, schedulers, instance, "lr_schedulers", Role.SCHEDULER),
    )


def _given_back(state: Machine, found: list[Value], instance: Instance, name: str, role: Role) -> Value:
    if len(found) == 1:
        return found[0]
    if found:
        return Items(found)
    made = state.opaque((CURRENT, name, instance.uid), f"self.{name}()", name=name)
    made.actor = Actor(state.uid(), f"self.{name}()", role)
    return made


def _sort(state: Machine, value: Value, optimizers: list[Value], schedulers: list[Value]) -> bool:
    """Sorts what is configured into optimizers and schedulers; False where something is neither."""
    value = state.force(value)
    if isinstance(value, Items):
        return all(_sort(state, item, optimizers, schedulers) for item in value.items)
    if isinstance(value, Mapping):
        parts = [value.items[name] for name in ("optimizer", "scheduler", "lr_scheduler") if name in value.items]
        return bool(parts) and all(_sort(state, part, optimizers, schedulers) for part in parts)
    if isinstance(value, Known):
        return value.value is None
    role = role_of(state, value)
    if isinstance(value, Opaque) and value.actor is None and role in {Role.OPTIMIZER, Role.SCHEDULER}:
        value.actor = Actor(state.uid(), value.text, role)
    if not isinstance(value, (Opaque, Thing, Instance)) or role not in {Role.OPTIMIZER, Role.SCHEDULER}:
        return False
    (optimizers if role is Role.OPTIMIZER else schedulers).append(value)
    return True


# The Trainer, as the source makes it.
def trainers(index: Index) -> tuple[ast.Call, ...]:
    """The calls that make a Lightning Trainer."""
    return index.once("lightning trainers", index.tree, lambda _: tuple(_find_trainers(index)))


def _find_trainers(index: Index) -> Iterator[ast.Call]:
    for node in walk(index.tree):
        if isinstance(node, ast.Call) and terminal(node.func) == "Trainer" and any(word.arg in TRAINER_WORDS for word in node.keywords):
            yield node


def argument_of(index: Index, name: str) -> ast.expr | None:
    """The expression that the source's only Trainer is given for an argument."""
    made = trainers(index)
    return next((word.value for word in made[0].keywords if word.arg == name), None) if len(made) == 1 else None


def scaler_of(state: Machine) -> Actor | None:
    """The scaler of 16-bit mixed precision, where the source shows that the Trainer has one."""
    index = state.index
    given = argument_of(index, "precision")
    half = given is not None and default_of(index, given) in HALF
    for name in ("plugins", "callbacks"):
        plugins = argument_of(index, name)
        half = half or (plugins is not None and _has_scaling_plugin(index, plugins))
    return precision_scaler(state) if half else None


def _has_scaling_plugin(index: Index, given: ast.expr) -> bool:
    names = {part.id for part in walk(given) if isinstance(part, ast.Name)}
    made = [part for part in walk(given) if isinstance(part, ast.Call)]
    made += [
        node.value
        for node in walk(index.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and any(terminal(target) in names for target in node.targets)
    ]
    return any(terminal(call.func) in SCALING_PLUGINS and _is_half(call) for call in made)


def _is_half(call: ast.Call) -> bool:
    values = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "precision")]
    return any(isinstance(value, ast.Constant) and value.value in HALF for value in values)


def default_of(index: Index, node: ast.expr) -> object:
    """The constant that an expression is unless somebody chooses otherwise: in place, a parameter's default, an option's."""
    if isinstance(node, ast.Constant):
        return node.value
    name = terminal(node)
    found = [value.value for value in _defaults(index, name) if isinstance(value, ast.Constant)] if name else []
    return found[0] if len(set(map(repr, found))) == 1 else None


def _defaults(index: Index, name: str) -> Iterator[ast.expr]:
    for node in walk(index.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _defaults_of(node, name)
        elif isinstance(node, ast.Assign):
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                yield node.value
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None and terminal(node.target) == name:
                yield node.value
        elif isinstance(node, ast.Call) and terminal(node.func) == "add_argument" and _is_option(node, name):
            yield from (word.value for word in node.keywords if word.arg == "default")


def _defaults_of(function: FunctionNode, name: str) -> Iterator[ast.expr]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    positional = arguments[len(arguments) - len(function.args.defaults) :]
    given = [*zip(positional, function.args.defaults, strict=True), *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)]
    yield from (value for one, value in given if one.arg == name and value is not None)


def _is_option(call: ast.Call, name: str) -> bool:
    texts = (arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
    return any(text.lstrip("-").replace("-", "_") == name for text in texts)
