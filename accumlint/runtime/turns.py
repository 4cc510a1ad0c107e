"""In which turn of which loops the user's code is: read from the loops' own variables.

Python shows no iterator of a running loop, but the variables that it sets: a counter or an epoch that has changed is a
new turn, a counter that has started anew a new pass. Where a loop sets nothing that can be read, its turns are not told apart.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

PLAIN = (int, str, bool)
MAX_SIZE = 2_000_000  # bytes of a file that is read for its loops


@dataclass(frozen=True, slots=True)
class Loop:
    """A `for` or `while` statement, and the variables that its head sets."""

    line: int
    end_line: int
    names: tuple[str, ...]
    counter: str = ""  # the variable that counts from the start: of `range` or `enumerate`


@dataclass(slots=True)
class _State:
    """Where a loop was last seen."""

    parent: tuple[tuple[int, int], ...]
    frame: int
    values: tuple[object, ...]
    index: int = 0
    entry: int = 0


class Turns:
    """The loops that have been seen running."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], _State] = {}

    def of(self, frames: list[FrameType]) -> list[list[int]]:
        """For each loop around the innermost frame, outermost first: its line, the turn's index, how often it was entered before, 1
        where its head takes more than plain values (a batch), and the value of its counter, -1 without one."""
        found: list[list[int]] = []
        parent: tuple[tuple[int, int], ...] = ()
        for frame in reversed(frames):
            loops = enclosing(frame)
            if not loops:
                continue
            values = _values(frame, loops)
            for depth, loop in enumerate(loops):
                # What an inner loop sets as well says nothing of this one.
                taken = {name for inner in loops[depth + 1 :] for name in inner.names}
                seen = tuple(values.get(name) for name in loop.names if name not in taken)
                count = values.get(loop.counter) if loop.counter not in taken else None
                state = self._seen((frame.f_code.co_filename, loop.line), parent, id(frame), (count, *seen))
                found.append(
                    [
                        loop.line,
                        state.index,
                        state.entry,
                        int(any(isinstance(value, tuple) for value in seen)),
                        count if type(count) is int else -1,
                    ]
                )
                parent = (*parent, (state.index, state.entry))
        return found

    def _seen(self, key: tuple[str, int], parent: tuple[tuple[int, int], ...], frame: int, values: tuple[object, ...]) -> _State:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State(parent, frame, values)
        elif state.parent != parent or state.frame != frame or _starts_anew(state.values, values):
            state.parent, state.frame, state.values = parent, frame, values
            state.index, state.entry = 0, state.entry + 1
        elif state.values != values:
            state.values = values
            state.index += 1
        return state


def takes_snapshots(code: CodeType) -> bool:
    """Whether a function may take its variables as a dict: before Python 3.13 it holds the very one that reading them changes.

    pytest puts such a call into the functions whose assertions it rewrites.
    """
    names = set(code.co_names)
    return bool(names & {"locals", "vars"}) and "@py_builtins" not in names


def _starts_anew(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Whether the counter, which comes first, has gone back."""
    one, other = before[:1], now[:1]
    return bool(one and other) and type(one[0]) is int and type(other[0]) is int and other[0] < one[0]


def _values(frame: FrameType, loops: tuple[Loop, ...]) -> dict[str, object]:
    """The plain values of the loops' variables, and of others which object it is; nothing of the frame is kept."""
    names = {name for loop in loops for name in loop.names}
    if not names or takes_snapshots(frame.f_code):
        return {}
    variables = frame.f_locals
    found: dict[str, object] = {}
    for name in names:
        value = variables.get(name)
        if value is not None:
            found[name] = value if isinstance(value, PLAIN) else ("object", id(value))
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict:
        # Before Python 3.13 this is a copy that the frame would keep, and with it every tensor in it.
        variables.clear()
    return found


def enclosing(frame: FrameType) -> tuple[Loop, ...]:
    """The loops of the frame's function around its current line, outermost first."""
    line = frame.f_lineno
    return tuple(loop for loop in _loops(frame.f_code) if loop.line < line <= loop.end_line)


@lru_cache(maxsize=1024)
def _loops(code: CodeType) -> tuple[Loop, ...]:
    body = _functions(code.co_filename).get((code.co_name, code.co_firstlineno), ())
    return tuple(sorted(body, key=lambda loop: (loop.line, -loop.end_line)))


@lru_cache(maxsize=256)
def _functions(path: str) -> dict[tuple[str, int], tuple[Loop, ...]]:
    """The loops of every function of a file, and of its top level."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(MAX_SIZE))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[tuple[str, int], tuple[Loop, ...]] = {("<module>", line): tuple(_own(tree)) for line in (0, 1)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name, first] = tuple(_own(node))
    return found


def _counted(loop: ast.For | ast.AsyncFor) -> str:
    """The variable of `for i in range(…)` or `for i, … in enumerate(…)`, also inside another call such as a progress bar."""
    calls = {each.func.id for each in ast.walk(loop.iter) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)}
    if not calls & {"range", "trange", "enumerate"}:
        return ""
    names = [each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)]
    return names[0] if names else ""


def _own(scope: ast.AST) -> list[Loop]:
    found: list[Loop] = []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.For, ast.AsyncFor)):
            names = tuple(each.id for each in ast.walk(node.target) if isinstance(each, ast.Name))
            found.append(Loop(node.lineno, node.end_lineno or node.lineno, names, _counted(node)))
        elif isinstance(node, ast.While):
            found.append(Loop(node.lineno, node.end_lineno or node.lineno, ()))
        waiting += ast.iter_child_nodes(node)
    return found
