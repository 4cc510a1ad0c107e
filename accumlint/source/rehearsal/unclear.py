"""Whether synchronisation or the update hangs on what nobody can follow and what may differ between the micro-batches of a window.

A condition that stays open has one answer for a whole rehearsal only as long as it is the same: `is_last(i)` is asked anew in every turn,
and whatever is answered, a window made of such answers is none that the code runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode
from accumlint.source.reading.nodes import every
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.branches import seen, ways_out
from accumlint.source.rehearsal.hints import speaks_of_loss
from accumlint.source.rehearsal.holding import is_harmless_context, is_said
from accumlint.source.rehearsal.packages import is_of_harmless_package
from accumlint.source.rehearsal.state import PERSONAL, Call, State
from accumlint.source.rehearsal.values import Builtin, Instance, Key, Known, Opaque, Phi, Stream, Value, actor_of, key_of
from accumlint.trace import PERHAPS, Actor, Event, Guard, Kind, Place, Role
from accumlint.weight import Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.unfollowed import Unfollowed

HANGING = frozenset({Kind.ZERO, Kind.CLIP, Kind.SCHEDULE, Kind.SAVE, Kind.AVERAGE, Kind.UNSCALE, Kind.SCALER_UPDATE})
asks_for_boundary = found_in(re.compile(r"boundary|(^|[._])(is_)?(last|final)|should_|accum|window", re.IGNORECASE))
is_boundary = found_in(re.compile(r"boundary|(^|_)is_(last|final)|(^|_)should_(step|update)", re.IGNORECASE))
DEEPEST = 6  # how far a condition is followed to the objects that it is about
advances = found_in(re.compile(r"(^|_)(next|pop|fetch|advance|tick|pull|poll)(_|$)", re.IGNORECASE))
tells = found_in(re.compile(r"(^|_)(log|print|write|report|info|debug|warn|warning|save|display|record)(_|$)", re.IGNORECASE))
tells_of_windows = found_in(re.compile(r"accum|micro|window|split|chunk|repeat|(^|[^a-z])every", re.IGNORECASE))
reduces = found_in(re.compile(r"reduce|gather|sync|(^|_)sum(_|$)|total|agree|_$", re.IGNORECASE))
measures = found_in(re.compile(r"metric|(^|[^a-z])best|score|accuracy|perplexity|bleu|rouge", re.IGNORECASE))  # no answer about a boundary
COUNTS = frozenset({Quantity.UNITS, Quantity.WINDOW_UNITS})


def ask_for_sync(state: State, value: Value) -> None:
    """Remembers the open conditions behind a value that switches synchronisation, and the numbers that counters are compared with."""
    for leaf in _leaves(value):
        state.elsewhere.sync_asked.setdefault(leaf.text, set()).update(_asked(state, leaf))
    known = state.world.knowledge.accumulations
    if not isinstance(value, Known) or (value.origin is not None and state.index.has_modulo(value.origin)):
        return
    for root in value.gates:
        if root.kind == "setting" and root.key not in known:
            state.elsewhere.sync_asked.setdefault(root.text, set()).update((root.key, ("counter", *root.key)))


def ask_of_sides(state: State, node: ast.If, test: Value) -> None:
    """The same for an if statement that switches synchronisation or holds the update; not where a loss or this rank decides."""
    if isinstance(test, Known) and not test.gates:
        return
    branch = seen(state.index, node)
    either = branch.kinds ^ branch.other or _after_leaving(state, node)
    if Kind.SYNC_OFF in either:
        ask_for_sync(state, test)
    if not isinstance(test, Opaque) or test.causes & PERSONAL - {"data"} or not (branch.books or either & {Kind.STEP, *HANGING}):
        return
    asked = state.elsewhere.asked_at.setdefault(state.recorder.place(node.test), {})
    for leaf in _leaves(test):
        if not measures(leaf.text):
            asked.setdefault(leaf.text, set()).update(_asked(state, leaf))


def _after_leaving(state: State, node: ast.If) -> frozenset[Kind]:
    """`if not due(i): continue`: what waits for the answer stands behind it; where it leaves out a backward it is no boundary."""
    rest = (
        state.index.kinds(state.index.following(node)) if any(isinstance(part, ast.Continue) for part in node.body) else frozenset[Kind]()
    )
    return frozenset() if Kind.BACKWARD in rest else rest


def _asked(state: State, leaf: Opaque) -> Iterator[Key]:
    """What a condition is about: one thing, or a new one each time, where an object moved on or is asked where it is."""
    yield leaf.key
    if _is_of(leaf.key, state.elsewhere.moved) or _asks(leaf):
        yield ("moved", *leaf.key)


def _is_of(key: object, moved: set[Key], depth: int = 0) -> bool:
    """Whether a value is read from one of these objects: `state.count`, `state.count >= k`."""
    if not isinstance(key, tuple) or not key or depth > DEEPEST:
        return False
    if key in moved or (key[0] in {".", "[]"} and len(key) > 1 and key[1] in moved):
        return True
    return key[0] in {".", "[]", "compare", "not"} and any(_is_of(part, moved, depth + 1) for part in key[1:])


def is_flag(test: Value) -> bool:
    """Whether a condition is a mark that comes with the data, `for batch, last in windows`, or an answer about the boundary."""
    leaves = list(_leaves(test))
    return bool(leaves) and all(_marks(leaf) for leaf in leaves)


def _marks(leaf: Opaque) -> bool:
    if leaf.forwards or leaf.causes & PERSONAL - {"data"} or "data" not in leaf.causes:
        return False
    return leaf.key[0] in {".", "[]", "part", "data"} or _asks(leaf)


def _asks(leaf: Opaque) -> bool:
    """Whether a condition is the answer of a call or a property that asks for the boundary, whatever it was named then."""
    if leaf.key[0] == "." and len(leaf.key) > 2:
        return is_boundary(str(leaf.key[2]))
    called = leaf.key[1] if leaf.key[0] == "call" and len(leaf.key) > 1 else ()
    name = called[-1] if isinstance(called, tuple) and called else ""
    return leaf.key[0] == "call" and (asks_for_boundary(leaf.text) or (isinstance(name, str) and asks_for_boundary(name)))


def hang_on(state: State, nodes: Iterable[ast.AST], asked: Value, text: str) -> None:
    """Remembers that one of several ways is taken by a value that nobody can follow: `match phase(i):`, `actions[phase(i)]()`."""
    if not isinstance(asked, Opaque) or asked.causes & PERSONAL - {"data"}:
        return
    keys = set(_asked(state, asked))
    for node in nodes:
        kinds = state.index.kinds(node)
        if Kind.SYNC_OFF in kinds:
            state.elsewhere.sync_asked.setdefault(text, set()).update(keys)
        if kinds & {Kind.STEP, *HANGING}:
            at = node.subject if isinstance(node, ast.Match) else node
            state.elsewhere.asked_at.setdefault(state.recorder.place(at), {}).setdefault(text, set()).update(keys)


def hang_on_turns(state: State, node: ast.For | ast.AsyncFor | ast.While, asked: Value) -> None:
    """`while pending(i): step()`, `for _ in counted: step()`: how often an update in it happens hangs on what nobody can follow."""
    kinds = state.index.kinds(node.body)
    if not state.recorder.turns or Kind.STEP not in kinds or kinds & {Kind.BACKWARD, Kind.FORWARD} or not isinstance(asked, Opaque):
        return
    if isinstance(node, ast.While):
        place, text = state.recorder.place(node.test), state.recorder.text(node.test)
    else:
        named = {part.id for part in every(node.target, ast.Name) if isinstance(part, ast.Name)}
        if any(isinstance(part, ast.Name) and part.id in named for each in node.body for part in every(each, ast.Name)):
            return  # it goes over optimizers or the like
        place, text = state.recorder.place(node.iter), state.recorder.text(node.iter)
    if asked.key[0] != "parameter" or isinstance(node, ast.For):
        asked_here = state.elsewhere.asked_at.setdefault(replace(place, line=node.lineno, end_line=node.end_lineno or node.lineno), {})
        asked_here.setdefault(text, set()).update({("turned", 0), ("turned", 1)})


def hang_on_exception(state: State, node: ast.Try) -> None:
    """`try: wait(i) except NotYet: continue`: what follows waits for something that nobody can follow."""
    if not any(ways_out(handler.body) & {"continue", "return"} for handler in node.handlers) or not state.recorder.turns:
        return
    own, rest = state.index.kinds(node.body), state.index.following(node) + node.orelse
    if own & {Kind.FORWARD, Kind.BACKWARD, Kind.STEP} or Kind.BACKWARD in (kinds := state.index.kinds(rest)):
        return
    if kinds & {Kind.STEP, *HANGING} and any(not state.index.callees(call) for call in every_call(node.body)):
        for each in rest:
            place, text = state.recorder.place(each), state.recorder.text(node.body[0])
            state.elsewhere.asked_at.setdefault(place, {}).setdefault(text, set()).update({("raised", 0), ("raised", 1)})


def every_call(statements: Iterable[ast.stmt]) -> Iterator[ast.Call]:
    for each in statements:
        yield from (part for part in every(each, ast.Call) if isinstance(part, ast.Call))


def may_switch(state: State, call: Call, given: Iterable[Actor]) -> None:
    """`set_sync(model, last)`: who is told of the model and of the turn, or speaks of synchronisation, may switch it."""
    if tells(call.name) or is_harmless_context(call.name) or is_only_shown(call.name):
        return
    if not is_said(state, call):
        return
    of_k = any(is_accumulation(state, value) for value in call.values)
    state.elsewhere.told.update(actor.uid for actor in given if of_k and actor.role is Role.OPTIMIZER)
    if any(actor.role is Role.OPTIMIZER for actor in given) and (owner := actor_of(call.receiver)) is not None:
        state.elsewhere.told.add(owner.uid)
    if not any(actor.role is Role.MODEL for actor in given) or not (state.recorder.turns or of_k):
        return
    waits = any(guard.cause == "gate" for guard in state.recorder.guards)
    told = any(
        isinstance(value, Known) and not isinstance(value.value, str) and value.value is not None for value in map(state.force, call.values)
    )
    if switches(call.name) or of_k or (told and not waits):
        state.elsewhere.sync_asked.setdefault(state.recorder.text(call.node), set()).update({("told", 0), ("told", 1)})


def hang_on_calls(state: State, node: ast.expr, asked: Value) -> None:
    """`due(i) and update()`, `update() if due(i) else wait()`: what the functions do that are called in it hangs on the answer."""
    if state.recorder.turns and state.index.kinds(node) & {Kind.STEP, *HANGING}:
        calls = (part for part in every(node, ast.Call) if isinstance(part, ast.Call))
        hang_on(state, [function for call in calls for function in state.index.callees(call)], asked, state.recorder.text(node))


def runs_decorated(state: State, function: FunctionNode) -> None:
    """`@accumulate(k)`: a decorator that nobody can follow and that is told of windows may call what it decorates more or less often."""
    for decorator in state.index.once("reshaping", function, _reshaping):
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if state.index.kinds(function) & {Kind.BACKWARD, Kind.STEP} and isinstance(state.force(state.eval(name)), Opaque):
            text = state.recorder.text(decorator)
            for asked in (state.elsewhere.sync_asked, state.elsewhere.asked_at.setdefault(state.recorder.place(function), {})):
                asked.setdefault(text, set()).update({("decorated", 0), ("decorated", 1)})


def _reshaping(function: ast.AST) -> list[ast.expr]:
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    return [one for one in function.decorator_list if tells_of_windows(ast.unparse(one))]


def enters(state: State, context: Value) -> None:
    """A context manager that nobody can follow may switch the synchronisation of the model that it was made with."""
    if isinstance(context, Opaque) and (context.key[0] == "data" or _is_lent(context.key, state.elsewhere.lent)):
        state.elsewhere.sync_asked.setdefault(context.text, set()).update((context.key, ("moved", *context.key)))


def goes_over(state: State, source: Value) -> None:
    """`for batch in synced(model, loader, k):` of a make that nobody knows may switch the synchronisation; and it moves on."""
    if isinstance(source, Stream) and source.kind in {"enumerate", "zip", "iterator"} and source.parts:
        source = state.force(source.parts[0])
    if isinstance(source, Opaque):
        state.elsewhere.moved.add(source.key)
    if isinstance(source, Opaque) and _is_lent(source.key, state.elsewhere.lent) and (is_told(state, source.key) or switches(source.text)):
        state.elsewhere.sync_asked.setdefault(source.text, set()).update({("gone over", 0), ("gone over", 1)})


@contextmanager
def counting(state: State, context: Value, item: ast.withitem, body: Sequence[ast.stmt]) -> Iterator[None]:
    """`with Accumulator(optimizer, k):` of a make that nobody knows may hold back the updates in its block."""
    if not isinstance(context, Opaque) or Kind.STEP not in state.index.kinds(body) or not tells_of_windows(str(context.key)):
        yield
        return
    place, text = state.recorder.place(item.context_expr), state.recorder.text(item.context_expr)
    state.elsewhere.asked_at.setdefault(place, {}).setdefault(text, set()).update({("entered", 0), ("entered", 1)})
    state.recorder.guards.append(Guard(place, text, "setting"))
    try:
        yield
    finally:
        state.recorder.guards.pop()


switches = found_in(re.compile(r"sync|reduc|(^|_)accum|micro|boundary|window|(^|_)grad", re.IGNORECASE))
is_only_shown = found_in(
    re.compile(
        r"test|infer|sample|generat|visuali|plot|render|checkpoint|ckpt|load|export|push|upload|callback|hook|schedul|train$", re.IGNORECASE
    )
)


def _is_lent(key: object, lent: set[Key], depth: int = 0) -> bool:
    """Whether a value is one of these or comes out of one."""
    if not isinstance(key, tuple) or not key or depth > DEEPEST:
        return False
    return key in lent or any(_is_lent(part, lent, depth + 1) for part in key[1:])


def may_divide(state: Unfollowed, call: Call) -> None:
    """`divide_gradients(model, k)`, `parameter.register_hook(divider(k))`: who is told of K and of gradients may divide them by it."""
    values = [state.force(value) for value in call.values]
    hooks = call.name.startswith("register_")
    if any(is_accumulation(state, value) or (hooks and isinstance(value, Opaque) and is_told(state, value.key)) for value in values) and (
        hooks or any(state.holds_gradients(value) for value in values)
    ):
        state.recorder.fact("may-divide", call.node)


def is_told(state: State, key: Key) -> bool:
    """Whether a value was made by a call that is given K: a loader that may well give whole windows only."""
    if key[0] in {"part", "[]"}:
        return isinstance(key[1], tuple) and is_told(state, key[1])
    return key[0] in {"call", "method"} and any(_is_of_k(state, part) for part in key[2:] if isinstance(part, tuple))


def _is_of_k(state: State, key: Key) -> bool:
    """Whether a value is K, as far as it was found out or by its name."""
    knowledge = state.world.knowledge
    name = key[-1] if key and key[0] in {"parameter", ".", "[]"} else None
    return key in knowledge.accumulations or (isinstance(name, str) and knowledge.is_accumulation_name(name.strip("'")))


def is_accumulation(state: State, value: Value) -> bool:
    """Whether a value is K, or made of K alone: `1 / k`."""
    value = state.force(value)
    known = state.world.knowledge.accumulations
    if isinstance(value, Known):
        return bool(value.roots) and all(root.key in known for root in value.roots)
    return isinstance(value, Opaque) and (_is_of_k(state, value.key) or _is_share(state, value.key))


def _is_share(state: State, key: Key) -> bool:
    """`1 / k`, where K is what a function is given."""
    return key[0] == "Div" and len(key) > 2 and key[1][0] == "known" and _is_of_k(state, key[2])


def moves_on(state: State, call: Call) -> None:
    """`state.advance()`: an object that nobody knows may be another one afterwards."""
    owner = state.force(call.receiver) if call.receiver is not None else None
    if not isinstance(owner, (Opaque, Instance)) or owner.actor is not None or tells(call.name):
        return
    if advances(call.name) or (state.recorder.turns and is_said(state, call)):
        state.elsewhere.moved.add(key_of(owner))


def may_agree(state: State, call: Call) -> None:
    """`sum_over_ranks_(count)`: a function that nobody knows and that is called for what it does to a count may reduce it in place."""
    if tells(call.name) or not (call.receiver is None or reduces(call.name)):
        return
    for value in map(state.force, call.values):
        counted = isinstance(value, Opaque) and value.quantity in COUNTS and not value.forwards
        if counted and isinstance(value, Opaque) and is_said(state, call):
            value.agreed, value.quantity, value.weight = True, None, None


def may_answer_for_all(state: State, call: Call, made: Opaque) -> None:
    """`is_bad_everywhere(loss)`: a function that nobody knows and that is given data or a loss may ask the other ranks."""
    if made.causes & PERSONAL and _is_foreign(state, call) and not speaks_of_loss(call.name):
        state.elsewhere.answers.add(made.key)


def may_be_agreed(state: State, test: Value) -> bool:
    """Whether a condition is what such functions answered."""
    leaves = list(_leaves(test))
    return bool(leaves) and all(_is_answer(state, leaf.key) for leaf in leaves)


def _is_answer(state: State, key: Key) -> bool:
    answers = state.elsewhere.answers
    return key in answers or (key[0] == "compare" and any(isinstance(part, tuple) and part in answers for part in key[1:]))


def may_be_another(state: State, call: Call, made: Opaque) -> None:
    """`augment(batch)`: what a function that nobody knows makes of a batch may be another thing in each turn."""
    if made.born and state.recorder.turns and _is_foreign(state, call) and not only_moves(call.name):
        made.causes |= {remade(state)}


def remade(state: State) -> str:
    """The cause of what was made of a batch in this turn."""
    turn = state.recorder.turns[-1]
    return f"remade:{turn.line}:{turn.entry}:{turn.index}"


def how_made(state: State, values: Iterable[Value]) -> frozenset[str]:
    """Whether data was made in this turn in a way that nobody followed, so that it may be other data each time."""
    cause = remade(state) if state.recorder.turns else ""
    fresh = any(isinstance(value, Opaque) and cause in value.causes for value in map(state.force, values))
    return frozenset({"remade"}) if fresh else frozenset()


only_moves = found_in(
    re.compile(
        r"device|cuda|gpu|(^|_)(to|move|put|transfer|unpack|prepare|preprocess|process|collate|convert|cast|parse|get|extract|format|squeeze|reshape"
        r"|normali[sz]e|stack|cat|dict|map|detach|pin|select|pick|flatten|pad|len|type|tensor|float|half|int|long)(_|$)",
        re.IGNORECASE,
    )
)


def _is_foreign(state: State, call: Call) -> bool:
    """Whether a call is of something from elsewhere, and not of torch, of a tensor or of a library that is known to be harmless."""
    if isinstance(call.function, Builtin) or call.path.partition(".")[0] == "torch" or is_of_harmless_package(call.path):
        return False
    receiver = state.force(call.receiver) if call.receiver is not None else None
    return not (isinstance(receiver, Opaque) and (receiver.born or receiver.forwards or receiver.causes & PERSONAL))


def _leaves(value: Value) -> Iterator[Opaque]:
    if isinstance(value, Phi):
        yield from _leaves(value.condition)
    elif isinstance(value, Opaque) and value.negated is not None:
        yield from _leaves(value.negated)
    elif isinstance(value, Opaque) and value.conjunction:
        for part in value.conjunction[1:]:
            yield from _leaves(part)
    elif isinstance(value, Opaque):
        yield value


def unclear(asked: Mapping[str, set[Key]]) -> frozenset[str]:
    """The questions that were asked about different things."""
    return frozenset(text for text, keys in asked.items() if len(keys) > 1)


def questions(state: State) -> frozenset[str]:
    """All of them on which an event hung: none has an answer that holds for a rehearsal."""
    return frozenset[str]().union(*map(unclear, state.elsewhere.asked_at.values()))


def awaited(state: State, events: Iterable[Event]) -> str:
    """The question whose answer an update waits for; "" where none does."""
    texts = {place: min(found) for place, asked in state.elsewhere.asked_at.items() if (found := unclear(asked))}
    for event in events if texts else ():
        if event.kind is Kind.STEP or event.kind is Kind.BACKWARD:
            for place, text in texts.items():
                if _lies_in(event, place) or (event.kind is Kind.STEP and _waits_at(event, place)):
                    return text
    return ""


def _waits_at(event: Event, place: Place) -> bool:
    return any(guard.place == place for guard in event.guards)


def _lies_in(event: Event, place: Place) -> bool:
    """Whether an event happens in a stretch of the source, such as a function that is called by who knows whom."""
    return event.place.path == place.path and place.line <= event.place.line <= (place.end_line or place.line)


def perhaps(state: State, events: Iterable[Event]) -> list[Event]:
    """The events, of which those that hang on such a question are said to happen perhaps."""
    places = {place for place, asked in state.elsewhere.asked_at.items() if unclear(asked)}
    if not places:
        return list(events)
    hang = (event.kind in HANGING and any(_waits_at(event, one) or _lies_in(event, one) for one in places) for event in events)
    return [replace(event, options=event.options | {PERHAPS}) if one else event for event, one in zip(events, hang, strict=True)]


def without_sync(events: Iterable[Event]) -> list[Event]:
    """The events, of which none says whether synchronisation was on."""
    return [replace(event, sync=None) if event.sync is not None else event for event in events]
