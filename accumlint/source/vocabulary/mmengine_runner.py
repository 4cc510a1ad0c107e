"""mmengine's Runner: what it calls for every batch, a model's `train_step` and the hooks around it, with its optimizer wrapper."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.access import bind
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.values import NONE, TRUE, Class, Function, Instance, Items, Known, Mapping, Opaque, Thing, Value, make_actor
from accumlint.source.vocabulary.base import as_actor, receiver_of
from accumlint.source.vocabulary.bookkeeping import MOVING, OPTIMIZER_STATE
from accumlint.source.vocabulary.engines import accumulation
from accumlint.source.vocabulary.mmengine_wrapper import SETTING, OptimWrapper, total_of
from accumlint.source.vocabulary.played import entered, guarded, period, turn
from accumlint.trace import Actor, Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

KEY = "mmengine runner"
SCALING = frozenset({"AmpOptimWrapper", "ApexOptimWrapper"})
COUNTERS = ("iter", "_iter", "_inner_iter")  # of the batches before this one


@dataclass(eq=False)
class Runner:
    """A Runner that trains with accumulation, as far as its updates depend on it."""

    thing: Thing
    model: Value
    wrapper: Value
    own: OptimWrapper
    hooks: list[Value]  # objects of the source, and what is written for those of mmengine


def runner(state: Machine, call: Call) -> Value | None:
    """`Runner(model=…, optim_wrapper=dict(…, accumulative_counts=K), custom_hooks=[…])`."""
    given = call.keywords
    if not call.path.startswith("mmengine") or "optim_wrapper" not in given:
        return None
    made = Thing(make_actor(Role.ENGINE, "runner"))
    model = _built(state, given.get("model", call.args[0] if call.args else NONE))
    wrapper, own = _wrapper(state, call, model)
    if own is None or own.k is None or own.k.value == 1:
        return made
    hooks = [_built(state, one) for one in _parts(state, given.get("custom_hooks")) + _parts(state, given.get("default_hooks"))]
    made.attributes |= {"model": model, "optim_wrapper": wrapper}
    state.memory[(KEY, made.actor.uid)] = Runner(made, model, wrapper, own, hooks)
    return made


def _parts(state: Machine, value: Value | None) -> list[Value]:
    value = state.force(value) if value is not None else NONE
    if isinstance(value, Items):
        return list(value.items)
    return list(value.items.values()) if isinstance(value, Mapping) else []


def _built(state: Machine, value: Value) -> Value:
    """An object of the source; one that its registry makes from `dict(type="Name", …)` as well."""
    value = state.force(value)
    if not isinstance(value, Mapping) or "type" not in value.items:
        return value
    wanted = state.force(value.items["type"])
    named = isinstance(wanted, Known) and isinstance(wanted.value, str)
    cls = state.globals.find(type_of(state, value)) if named else wanted
    if not isinstance(cls, Class):
        return value
    given = {str(name): each for name, each in value.items.items() if name != "type"}
    node = ast.copy_location(ast.Call(ast.Name(cls.node.name, ast.Load()), [], []), cls.node)
    return state.begun(cls, node, given)


def type_of(state: Machine, value: Value) -> str:
    """The name of the class that a registry would make from a dict."""
    if not isinstance(value, Mapping):
        return ""
    wanted = state.force(value.items.get("type", NONE))
    if isinstance(wanted, Known):
        return str(wanted.value).rpartition(".")[2]
    return wanted.path.rpartition(".")[2] or wanted.name if isinstance(wanted, Opaque) else ""


def _wrapper(state: Machine, call: Call, model: Value) -> tuple[Value, OptimWrapper | None]:
    """The optimizer wrapper: an object, or what a dict says of one."""
    value = state.force(call.keywords["optim_wrapper"])
    if isinstance(value, Thing):
        return value, state.memory.get(("mmengine", value.actor.uid))
    if not isinstance(value, Mapping) or SETTING not in value.items:
        return value, None
    actor = as_actor(state, model, Role.MODEL) if isinstance(model, (Instance, Thing)) else None
    optimizer = Actor(state.uid(), "optimizer", Role.OPTIMIZER, base=actor.uid if actor is not None else None, known=True)
    k = accumulation(state, value.items[SETTING], _written(call), SETTING)
    scales = type_of(state, value) in SCALING
    made = Thing(make_actor(Role.ENGINE, "optim_wrapper"))
    scaler = Actor(state.uid(), "loss_scaler", Role.SCALER, known=True) if scales else None
    own = state.memory[("mmengine", made.actor.uid)] = OptimWrapper(optimizer, k, scaler, "clip_grad" in value.items)
    return made, own


def _written(call: Call) -> ast.expr | None:
    """K as it stands in the call's own `dict(…)`."""
    given = next((word.value for word in call.node.keywords if word.arg == "optim_wrapper"), None)
    return _entry(given, SETTING)


def _entry(given: ast.expr | None, name: str) -> ast.expr | None:
    if isinstance(given, ast.Call):
        return next((word.value for word in given.keywords if word.arg == name), None)
    if isinstance(given, ast.Dict):
        pairs = zip(given.keys, given.values, strict=True)
        return next((value for key, value in pairs if isinstance(key, ast.Constant) and key.value == name), None)
    return None


def train(state: Machine, call: Call) -> Value | None:
    """`runner.train()`."""
    owner = state.force(receiver_of(call) or NONE)
    known = state.memory.get((KEY, owner.actor.uid)) if isinstance(owner, Thing) else None
    if not isinstance(known, Runner):
        return None
    state.covered.add(id(call.node))
    _Run(state, call, known).play()
    return known.model


def every(state: Machine, call: Call) -> Value | None:
    """`self.every_n_train_iters(runner, n)` in a hook: at every n-th batch."""
    given = state.force(call.argument(0, "runner") or NONE)
    at = given.attributes.get("iter") if isinstance(given, Thing) else None
    if not isinstance(at, Known) or call.argument(1, "n") is None:
        return None
    number = period(state, state.force(call.argument(1, "n") or NONE), state.world.period)
    assert isinstance(number.value, int)
    roots = frozenset({number.root}) if number.root is not None else frozenset()
    return Known((at.value + 1) % number.value == 0, roots, None, roots, call.node)


class _Run:
    """Two windows of a Runner's loop; what is left at the end of the run, the wrapper divides by its size and steps on."""

    def __init__(self, state: Machine, call: Call, known: Runner) -> None:
        self.state = state
        self.call = replace(call, args=[], keywords={})
        self.node = call.node
        self.known = known

    def play(self) -> None:
        state, size = self.state, self.known.own.window(self.state).value
        assert isinstance(size, int)
        entry = entered(state, self.node.lineno)
        for at in range(2 * size):
            with turn(state, OpenTurn(self.node.lineno, at, entry, endless=True)):
                state.recorder.new_data()
                self.known.thing.attributes |= dict.fromkeys(COUNTERS, Known(at))
                batch = state.datum(self.node, "data_batch")
                self._fire("before_train_iter", at, batch, NONE)
                self._fire("after_train_iter", at, batch, self._train_step(batch))

    def _train_step(self, batch: Value) -> Value:
        model = self.known.model
        own = model.cls.find("train_step") if isinstance(model, Instance) else None
        if isinstance(own, Function):
            return self.state.call_function(bind(own, model), [batch, self.known.wrapper], {}, None)
        mode: dict[str, Value] = {"mode": Known("loss")}
        losses = self.state.force(self.state.forward_of(replace(self.call, args=[batch], keywords=mode), model))
        self.known.own.update(self.state, self.call, total_of(self.state, losses, self.node))
        return NONE

    def _fire(self, event: str, at: int, batch: Value, outputs: Value) -> None:
        for one in self.known.hooks:
            if isinstance(one, Instance):
                own = one.cls.find(event)
                if isinstance(own, Function):
                    self._call(bind(own, one), [self.known.thing, Known(at), batch, outputs])
            elif event == "after_train_iter":
                self._of_library(one, at)

    def _call(self, method: Function, given: list[Value]) -> None:
        takes = len(method.node.args.args) - 1
        self.state.call_function(method, given if method.node.args.vararg is not None else given[:takes], {}, None)

    def _of_library(self, hook: Value, at: int) -> None:
        """The hooks of mmengine that act on iterations: a checkpoint every so many, an average of the weights."""
        kind = type_of(self.state, hook)
        assert isinstance(hook, Mapping) or not kind
        if kind == "CheckpointHook" and isinstance(hook, Mapping):
            self._save(hook, at)
        elif kind == "EMAHook" and isinstance(hook, Mapping) and "interval" not in hook.items:
            self.state.recorder.emit(Kind.AVERAGE, _place(self.state, self.node, "EMAHook"), options=frozenset({MOVING}))

    def _save(self, hook: Mapping, at: int) -> None:
        state, given = self.state, hook.items
        said = [state.force(given.get(name, TRUE)) for name in ("by_epoch", "save_optimizer")]
        if [one.value if isinstance(one, Known) else None for one in said] != [False, True] or "interval" not in given:
            return
        interval = state.force(given["interval"])
        if self._holds_whole_windows(interval):
            return
        number = state.world.period  # a long interval that stands in place falls into a window just as well
        if (at + 1) % number == 0:
            place = _place(state, self.node, "CheckpointHook")
            with guarded(state, place):
                state.recorder.emit(Kind.SAVE, place, options=frozenset({OPTIMIZER_STATE}))

    def _holds_whole_windows(self, interval: Value) -> bool:
        """Whether both numbers stand in the source, and the one is a multiple of the other."""
        size, number = _in_source(self.known.own.k), _in_source(interval)
        return size is not None and number is not None and number % size == 0


def _in_source(value: Value | None) -> int | None:
    """The number that the source gives, whatever stands for it in this rehearsal."""
    if not isinstance(value, Known):
        return None
    number = value.root.default if value.root is not None else value.value
    return number if isinstance(number, int) and number >= 1 else None


def _place(state: Machine, node: ast.AST, name: str) -> ast.AST:
    """Where the source asks for a hook: `dict(type="EMAHook", …)`."""
    found = [part for part in walk(state.index.tree) if isinstance(part, (ast.Call, ast.Dict)) and _is_named(_entry(part, "type"), name)]
    return found[0] if len(found) == 1 else node


def _is_named(given: ast.expr | None, name: str) -> bool:
    text = given.value if isinstance(given, ast.Constant) else terminal(given) if given is not None else ""
    return isinstance(text, str) and text.rpartition(".")[2] == name
