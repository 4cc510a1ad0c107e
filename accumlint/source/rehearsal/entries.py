"""Where a rehearsal starts: the outermost pieces of a module that reach a backward."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accumlint.source.reading.facts import BACKWARD_NAMES, FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.lineage import completed, lineage
from accumlint.source.reading.nodes import every, walk
from accumlint.source.reading.sieve import TEST_CLASS, TEST_NAME
from accumlint.trace import FILE_LINES, Kind

IS_TEST = re.compile(TEST_NAME)
IS_TEST_CLASS = re.compile(TEST_CLASS)
HELPERS = frozenset({"loss_scaler"})  # objects that do the backward themselves when called

# What a rule can speak of: an update, or the switching of synchronisation around a backward.
JUDGED = frozenset({Kind.STEP, Kind.SYNC_OFF})


def is_test(node: ast.AST) -> bool:
    """Whether a function or class is a test: tests do odd things on purpose, and nobody trains with them."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return IS_TEST.match(node.name) is not None
    if isinstance(node, ast.ClassDef):
        return IS_TEST_CLASS.search(node.name) is not None or any(IS_TEST_CLASS.search(terminal(base)) for base in node.bases)
    return False


def trains(tree: ast.Module) -> bool:
    """Whether some backward is called outside tests."""
    return any(
        (isinstance(node, ast.Call) and terminal(node.func) in BACKWARD_NAMES | HELPERS)
        or (isinstance(node, ast.Attribute) and node.attr in BACKWARD_NAMES)
        for node in walk(tree, is_test)
    )


def module_reaches(index: Index) -> bool:
    """Whether the module's own statements reach a backward."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(Kind.BACKWARD in index.kinds(node) for node in index.tree.body if not isinstance(node, definitions))


Entry = tuple[FunctionNode, ast.ClassDef | None]  # a function, and the class of which it is called as a method


def outermost(index: Index) -> list[Entry]:
    """The functions that reach a backward and something to judge, callers before those they call; not tests.

    Those of the file itself, and those that its classes inherit from other files.
    """
    tests = set(_inside_tests(index.tree))
    candidates = [function for functions in index.functions.values() for function in functions if id(function) not in tests]
    reaching = [function for function in candidates if Kind.BACKWARD in index.kinds(function) and index.kinds(function) & JUDGED]
    called = {id(callee) for function in reaching for callee in index.calls_of(function) if callee is not function}
    nested = {id(part) for function in reaching for part in every(function, ast.FunctionDef, ast.AsyncFunctionDef) if part is not function}
    handed = {name for function in reaching for name in _handed(function)}
    found: list[Entry] = [
        (function, owner if (owner := index.owner.get(function)) is None else completed(index, owner))
        for function in reaching
        if id(function) not in nested and function.lineno < FILE_LINES
    ]
    found += inherited(index, {id(function) for function in reaching}, tests)
    return sorted(found, key=lambda entry: (id(entry[0]) in called or entry[0].name in handed, entry[0].lineno))


def inherited(index: Index, reaching: set[int], tests: set[int]) -> Iterator[Entry]:
    """The methods that classes of the file have from those of other files."""
    for cls in index.classes.values():
        if cls.lineno >= FILE_LINES or is_test(cls):
            continue
        seen: set[str] = set()
        for ancestor in lineage(index, cls):
            for method in index.class_methods(ancestor):
                if method.name not in seen and ancestor.lineno >= FILE_LINES and id(method) in reaching and id(method) not in tests:
                    yield method, cls
                seen.add(method.name)


def _handed(function: ast.AST) -> Iterator[str]:
    """The names that a function gives to what it calls: functions among them may be called back."""
    for part in every(function, ast.Call):
        if isinstance(part, ast.Call):
            yield from (given.id for given in part.args if isinstance(given, ast.Name))


def reached(index: Index, entry: FunctionNode) -> set[int]:
    """The ids of the backward calls that running a function can come to."""
    found: set[int] = set()
    for function in running(index, entry):
        found |= index.once("backwards", function, lambda node: set(map(id, filter(index.is_backward, _calls(node)))))
    return found


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    yield from (part for part in every(node, ast.Call) if isinstance(part, ast.Call))


def mentioned(index: Index, entry: FunctionNode) -> frozenset[str]:
    """The names that stand in a function and in those that it calls."""
    found: set[str] = set()
    for function in running(index, entry):
        found |= index.once("mentioned", function, _names)
    return frozenset(found)


def running(index: Index, entry: FunctionNode) -> Iterator[FunctionNode]:
    """A function and those of the file that it calls, directly or not."""
    pending, seen = [entry], {id(entry)}
    while pending:
        function = pending.pop()
        yield function
        for callee in index.calls_of(function):
            if id(callee) not in seen:
                seen.add(id(callee))
                pending.append(callee)


def enters(index: Index, entry: FunctionNode, number: int) -> bool:
    """Whether a function calls, directly or not, one of the followed file of that number."""
    return any(function.lineno // FILE_LINES == number for function in running(index, entry))


def _names(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for part in walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
    return found


def _inside_tests(tree: ast.Module) -> Iterator[int]:
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if is_test(node):
            yield from (id(part) for part in walk(node) if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)))
        else:
            pending.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler)))
