"""Accelerate: what an `Accelerator` remembers during a rehearsal, and which objects it has prepared."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.source.rehearsal.values import Items, Known, Mapping, Opaque, Root, Stream, Thing, Value, actor_of, make_actor
from accumlint.source.vocabulary.base import last_name
from accumlint.source.vocabulary.engines import ONE, accumulation, literal_of
from accumlint.trace import Actor, Kind, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.record import OpenTurn
    from accumlint.source.rehearsal.state import Call

NAME = re.compile(r"^_?(\w+_)?(accelerator|accel)$", re.IGNORECASE)
USES = frozenset({"prepare", "accumulate", "unwrap_model", "sync_gradients", "gather_for_metrics", "is_main_process", "wait_for_everyone"})
KEY = "accelerate"
PREPARING = re.compile(r"^_?prepare(_|$)")


@dataclass
class Gradients:
    """What all Accelerators of a process share: whether this micro-batch ends the window, and what was prepared."""

    sync: bool = True
    engine: Engine | None = None  # the one that was used last
    owners: dict[int, Engine] = field(default_factory=dict)  # whose a prepared object is, by uid
    names: set[str] = field(default_factory=set)  # of what `prepare` gave back
    made: set[int] = field(default_factory=set)  # uids of what `prepare` gave back
    raw: set[int] = field(default_factory=set)  # uids of what it was given, where something else came back


@dataclass
class Engine:
    """One Accelerator."""

    actor: Actor
    k: Known  # 1 where it was given none
    shared: Gradients
    known: bool = True  # its making was followed, so that its K is known
    made_here: bool = True  # its arguments stand in the code
    scaler: Actor | None = None  # fp16 stands in the code
    may_scale: Actor | None = None  # fp16 may be chosen at launch or by a setting
    wrapper: Wrapper = Wrapper.DDP
    with_loader: bool = True  # the last batch of a loader ends a window
    each_batch: bool = False  # gradients are synchronised in every backward, on purpose
    steps_scheduler: bool = True  # prepared schedulers move with the optimizer's steps only
    count: int = 0
    entered: bool = False  # accumulate was entered
    optimizers: list[Actor] = field(default_factory=list)

    @property
    def text(self) -> str:
        """How its K is spelled."""
        return self.k.root.text if self.k.root is not None else "gradient_accumulation_steps"

    @property
    def accumulates(self) -> bool:
        return bool(self.k.value != 1)

    @property
    def is_followed(self) -> bool:
        """Whether it is known when its window ends: not where it was handed over to what its caller runs inside `accumulate`."""
        return self.entered or self.actor.known or not self.accumulates


def gradients(state: Machine) -> Gradients:
    found: Gradients = state.memory.setdefault((KEY, "gradients"), Gradients())
    return found


def make(state: Machine, call: Call) -> Thing:
    """`Accelerator(…)`."""
    engine = Engine(make_actor(Role.ENGINE, "accelerator"), _given_k(state, call), gradients(state))
    plugin = state.force(call.keywords["gradient_accumulation_plugin"]) if "gradient_accumulation_plugin" in call.keywords else None
    engine.known = not call.spread or engine.accumulates
    engine.made_here = not call.spread and (plugin is None or isinstance(plugin, Thing))
    precision = state.force(call.keywords["mixed_precision"]) if "mixed_precision" in call.keywords else None
    chosen = isinstance(precision, Known) and precision.value is not None
    if chosen and isinstance(precision, Known) and precision.value == "fp16":
        engine.scaler = Actor(state.uid(), "accelerator.scaler", Role.SCALER, known=True)
    elif not chosen:
        engine.may_scale = Actor(state.uid(), "accelerator.scaler", Role.SCALER, known=True)
    if {"fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"} & call.keywords.keys() or state.index.identifiers & OTHER_WRAPPERS:
        engine.wrapper = Wrapper.UNKNOWN
    if isinstance(plugin, Thing):
        engine.with_loader = _flag(state, plugin.attributes.get("sync_with_dataloader"), True)
        engine.each_batch = _flag(state, plugin.attributes.get("sync_each_batch"), False)
    engine.steps_scheduler = _flag(state, call.keywords.get("step_scheduler_with_optimizer"), True)
    state.memory[(KEY, engine.actor.uid)] = engine
    return Thing(engine.actor)


OTHER_WRAPPERS = frozenset({"FullyShardedDataParallelPlugin", "MegatronLMPlugin", "DeepSpeedPlugin"})


def _given_k(state: Machine, call: Call) -> Known:
    name = "gradient_accumulation_steps"
    plugin = call.keywords.get("gradient_accumulation_plugin")
    if plugin is not None:
        inner = state.force(plugin)
        found = inner.attributes.get("num_steps") if isinstance(inner, Thing) else None
        return found if isinstance(found, Known) else ONE
    return accumulation(state, call.keywords.get(name), literal_of(call, name), name)


def make_plugin(state: Machine, call: Call) -> Thing:
    """`GradientAccumulationPlugin(num_steps=K, …)`."""
    made = Thing(make_actor(Role.OTHER, "plugin"))
    made.attributes.update({name: value for name, value in call.keywords.items() if name != "num_steps"})
    made.attributes["num_steps"] = accumulation(state, call.argument(0, "num_steps"), literal_of(call, "num_steps", 0), "num_steps")
    return made


def _flag(state: Machine, value: Value | None, default: bool) -> bool:
    return default if value is None else state.truth(value, default, flips=False)


def engine_of(state: Machine, owner: Value | None) -> Engine | None:
    """The Accelerator that an object is: one seen being made, or one known by its name and what it is asked for."""
    actor = actor_of(owner)
    if actor is not None:
        found: Engine | None = state.memory.get((KEY, actor.uid))
        return found
    if not isinstance(owner, Opaque) or owner.path or owner.forwards or owner.born:
        return None
    name = last_name(owner)
    used: set[str] = state.index.usage.get(name, set())
    if not NAME.match(name) or not (used & USES or "accelerate" in state.index.packages):
        return None
    return _by_name(state, owner, name, "accumulate" in used)


def _by_name(state: Machine, owner: Opaque, name: str, accumulates: bool) -> Engine:
    """An Accelerator that is handed over: one that is asked to accumulate has a K, of another nothing is known."""
    known: Engine | None = state.memory.get((KEY, "named", name))
    if known is None:
        root = Root((KEY, name), f"{name}.gradient_accumulation_steps")
        if accumulates:
            state.world.knowledge.learn_accumulation(root)
        k = Known(state.world.k, frozenset({root}), root) if accumulates else ONE
        known = Engine(make_actor(Role.ENGINE, name, known=False), k, gradients(state), known=accumulates, made_here=False)
        state.memory[(KEY, "named", name)] = state.memory[(KEY, known.actor.uid)] = known
    owner.actor = known.actor
    return known


def engine_behind(state: Machine, value: Value) -> Engine | None:
    """The Accelerator that holds a prepared object back: its own, else the one that was used last."""
    shared = gradients(state)
    actor = actor_of(value)
    return (shared.owners.get(actor.uid) if actor is not None else None) or shared.engine


# What was prepared.
def remember(engine: Engine, made: Actor, raw: Actor | None) -> None:
    shared = engine.shared
    shared.made.add(made.uid)
    shared.names.add(made.name)
    shared.owners[made.uid] = engine
    if raw is not None:
        shared.raw.add(raw.uid)


def is_prepared(state: Machine, value: Value | None) -> bool:
    """Whether an optimizer, scheduler or loader is one that `prepare` gave back.

    Where its way could not be followed, it is when a call that prepares names it, or when no such call stands in the file.
    """
    shared = gradients(state)
    actor = actor_of(value)
    if actor is not None and actor.uid in shared.made:
        return True
    if actor is not None and actor.uid in shared.raw:
        return False
    names = state.index.once("prepared names", state.index.tree, lambda _: _prepared_names(state.index))
    if actor is not None and actor.known and actor.name in shared.names:
        return False  # another object of that name was
    if names is None:
        return not (isinstance(value, Thing) and value.actor.known)
    return ANYTHING in names or bool(_words(value) & names)


def is_given_back(state: Machine, value: Value | None) -> bool:
    """Whether an object was surely prepared, or at least not seen being made."""
    actor = actor_of(value)
    return actor is None or not actor.known or actor.uid in gradients(state).made


def is_table(state: Machine, value: Value | None) -> bool:
    """Whether a name stands for several objects, `model[key]`: what prepare is given so comes back as it was."""
    names = state.index.once("tables", state.index.tree, lambda _: _subscripted(state.index))
    return isinstance(value, Opaque) and last_name(value) in names


def _subscripted(index: Index) -> frozenset[str]:
    nodes = (node for node in every(index.tree, ast.Subscript) if isinstance(node, ast.Subscript))
    return frozenset(terminal(node.value) for node in nodes if not isinstance(node.slice, (ast.Slice, ast.Tuple)))


ANYTHING = "*"


def _prepared_names(index: Index) -> frozenset[str] | None:
    """Every identifier in the arguments of calls that prepare; None where there is no such call."""
    calls = [node for node in every(index.tree, ast.Call) if isinstance(node, ast.Call) and PREPARING.match(terminal(node.func))]
    calls = [call for call in calls if isinstance(call.func, ast.Attribute) and (call.args or call.keywords)]
    if not calls:
        return None
    found: set[str] = set()
    for call in calls:
        for given in (*call.args, *(keyword.value for keyword in call.keywords)):
            if isinstance(given, ast.Starred):
                found.add(ANYTHING)
            found |= {part.id for part in walk(given) if isinstance(part, ast.Name)}
            found |= {part.attr for part in walk(given) if isinstance(part, ast.Attribute)}
    return frozenset(found - {"self"})


def _words(value: Value | None) -> set[str]:
    text = value.text if isinstance(value, Opaque) else value.actor.name if isinstance(value, Thing) else ""
    return set(re.findall(r"\w+", text)) | {last_name(value)}


# Where a loader ends.
def ends_loader(state: Machine) -> bool:
    """Whether the innermost prepared loader that is gone over is at its last batch."""
    turn = _turn_of_loader(state)
    return turn is not None and turn.last and not turn.endless


def takes_parts(state: Machine, engine: Engine, node: ast.AST) -> bool:
    """Whether this `accumulate` is entered again for one batch of a prepared loader whose last batch ends a window."""
    turn = _turn_of_loader(state)
    if turn is None or turn is state.recorder.turns[-1] or not (engine.with_loader and engine.made_here):
        return False
    if state.index.identifiers & {"sync_with_dataloader", "end_of_dataloader", "IterableDataset"}:  # or there is no last batch
        return False
    key, now, events = (KEY, "entered", id(node)), (turn.line, turn.index, turn.entry), state.recorder.events
    before, count = state.memory.get(key, (None, 0))
    state.memory[key] = now, len(events)
    return bool(before == now) and any(event.kind is Kind.BACKWARD for event in events[count:])


def _turn_of_loader(state: Machine) -> OpenTurn | None:
    for turn in reversed(state.recorder.turns):
        loader = _loader_of(state, turn.source)
        if loader is not None and is_prepared(state, loader):
            return turn
    return None


def _loader_of(state: Machine, value: Value | None) -> Value | None:
    """The loader that a loop goes over, also through `enumerate` and the like."""
    for _ in range(4):
        value = state.force(value) if value is not None else None
        if not isinstance(value, Stream):
            break
        if value.kind not in {"enumerate", "zip", "iterator", "islice", "map"} or not value.parts:
            return None
        value = value.parts[1 if value.kind == "map" and len(value.parts) > 1 else 0]
    if isinstance(value, Thing):
        return value if value.actor.role is Role.LOADER else None
    return value if isinstance(value, Opaque) and not value.forwards else None


def prepared_object(state: Machine, engine: Engine, value: Value, role: Role) -> Thing:
    """What `prepare` makes of an optimizer, a scheduler or a loader."""
    raw = actor_of(value)
    if isinstance(value, Thing) and raw is not None and raw.uid in gradients(state).made:
        return value
    base = raw.base if raw is not None else None
    options = (raw.options if raw is not None else frozenset()) | ({"prepared"} if role is not Role.SCHEDULER else set())
    name = raw.name if raw is not None else last_name(value) or role.value
    actor = Actor(state.uid(), name, role, base=base, known=raw is not None and raw.known, options=frozenset(options))
    made = Thing(actor, inner=value)
    if isinstance(value, Thing):
        made.inner, made.length, made.parts = value.inner, value.length, value.parts
    remember(engine, actor, raw)
    return made


def is_unfit(value: Value) -> bool:
    """Whether an argument of accumulate or no_sync is no model at all: a list, a tuple, a generator, a tensor."""
    if isinstance(value, (Items, Mapping, Stream, Known)):
        return True
    return isinstance(value, Opaque) and bool(value.forwards or value.born)
