"""Which classes of a program derive from which, by their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accumlint.source.reading.facts import Facts, terminal
from accumlint.source.reading.nodes import walk


def lineage(facts: Facts, cls: ast.ClassDef) -> list[ast.ClassDef]:
    """A class and those it derives from, nearest first."""
    found: list[ast.ClassDef] = []
    pending = [cls]
    while pending:
        current = pending.pop(0)
        if current not in found:
            found.append(current)
            pending += [facts.classes[name] for name in map(terminal, current.bases) if name in facts.classes]
    return found


def derived(facts: Facts, cls: ast.ClassDef) -> list[ast.ClassDef]:
    """The classes that derive from a class, directly or not."""
    return [each for each in facts.classes.values() if each is not cls and cls in lineage(facts, each)]


def completed(facts: Facts, cls: ast.ClassDef) -> ast.ClassDef:
    """The class itself, or one derived from it that has the methods which it calls on itself and lacks."""
    missing = _lacking(facts, cls)
    if not missing:
        return cls
    ranked = [(len(missing & _methods(facts, each)), each) for each in derived(facts, cls)]
    most, best = max(ranked, key=lambda one: one[0], default=(0, cls))
    return best if most else cls


def _lacking(facts: Facts, cls: ast.ClassDef) -> set[str]:
    called = {
        part.func.attr
        for each in lineage(facts, cls)
        for part in walk(each)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and terminal(part.func.value) == "self"
    }
    return called - _methods(facts, cls) - set(_assigned(facts, cls)) if called else set()


def _methods(facts: Facts, cls: ast.ClassDef) -> set[str]:
    """The methods of a class that do something, its own and inherited ones."""
    found: set[str] = set()
    for each in lineage(facts, cls):
        found |= {method.name for method in facts.class_methods(each) if not _is_abstract(method)}
    return found


def _assigned(facts: Facts, cls: ast.ClassDef) -> Iterator[str]:
    for each in lineage(facts, cls):
        for part in walk(each):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield part.attr


def _is_abstract(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method only says that it is to be written."""
    return all(
        isinstance(node, (ast.Pass, ast.Raise)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in method.body
    )
