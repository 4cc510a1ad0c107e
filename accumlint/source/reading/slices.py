"""Cuts a module down to what its training loops can reach, so that a long file costs no more than its training code.

Works on words: a function is kept when, by the names that it mentions and those that they mention in turn, it reaches
both a backward and an update, or when one that is kept mentions it. Whatever stands outside of functions stays.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from accumlint.source.reading.nodes import forget_inside

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_WORD = re.compile(r"[^\W\d]\w*")
_BACKWARD = re.compile(r"backward\b|\bloss_scaler\b|\btrain_batch\b")
_UPDATE = re.compile(r"step\b|\bloss_scaler\b|\btrain_batch\b")
# What a class that is mentioned brings along: what runs without being named.
_UNNAMED = re.compile(r"__\w+__|forward|step|training_step")

# What frameworks call in loops of their own: backward and update lie with them.
_CALLED = re.compile(r"training_step|compute_loss")


class _Piece:
    """A function, a method, or what a class or the module holds beside its functions."""

    def __init__(self, text: str) -> None:
        self.words = frozenset(_WORD.findall(text))
        self.backward = _BACKWARD.search(text) is not None
        self.update = _UPDATE.search(text) is not None
        self.mentions: list[_Piece] = []
        self.callers: list[_Piece] = []

    def mention(self, others: Iterable[_Piece]) -> None:
        for each in others:
            self.mentions.append(each)
            each.callers.append(self)


def prune(tree: ast.Module, lines: tuple[str, ...], leads: Iterable[str] = ()) -> bool:
    """Takes the functions out of a tree that no training loop can reach; returns whether there is a training loop at all.

    `leads` are names from other files, which may reach whatever is missing.
    """
    cutter = _Cutter(lines)
    module = cutter.collect(tree)
    for name in leads:
        cutter.lead(name)
    cutter.link()
    pieces = (*cutter.functions.values(), *cutter.others)
    backward = _closure((piece for piece in pieces if piece.backward), "callers")
    update = _closure((piece for piece in pieces if piece.update), "callers")
    training = backward & update
    if not training:
        return False
    cutter.cut(tree, _closure((*training, module), "mentions"))
    return True


def _closure(roots: Iterable[_Piece], direction: Literal["mentions", "callers"]) -> set[_Piece]:
    pending = list(roots)
    found = set(pending)
    while pending:
        piece = pending.pop()
        new = [each for each in (piece.mentions if direction == "mentions" else piece.callers) if each not in found]
        found.update(new)
        pending.extend(new)
    return found


class _Cutter:
    def __init__(self, lines: tuple[str, ...]) -> None:
        self.lines = lines
        self.functions: dict[FunctionNode, _Piece] = {}
        self.named: dict[str, list[_Piece]] = defaultdict(list)
        self.others: list[_Piece] = []

    def collect(self, holder: ast.Module | ast.ClassDef) -> _Piece:
        """The piece of a module or class, after those of the functions and classes in it."""
        own: list[str] = []
        unnamed: list[_Piece] = []
        for statement in holder.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                piece = self.functions[statement] = _Piece(self._text(statement))
                if _CALLED.fullmatch(statement.name):
                    piece.backward = piece.update = True
                self.named[statement.name].append(piece)
                if _UNNAMED.fullmatch(statement.name):
                    unnamed.append(piece)
            elif isinstance(statement, ast.ClassDef):
                self.named[statement.name].append(self.collect(statement))
            else:
                own.append(self._text(statement))
        if isinstance(holder, ast.ClassDef):
            own.append("\n".join(self.lines[_first_line(holder) - 1 : holder.body[0].lineno]))
        piece = _Piece("\n".join(own))
        if isinstance(holder, ast.ClassDef):
            piece.mention(unnamed)
        self.others.append(piece)
        return piece

    def _text(self, statement: ast.stmt) -> str:
        return "\n".join(self.lines[_first_line(statement) - 1 : statement.end_lineno])

    def lead(self, name: str) -> None:
        """Adds a name from another file."""
        piece = _Piece("")
        piece.backward = piece.update = True
        self.named[name].append(piece)
        self.others.append(piece)

    def link(self) -> None:
        # By way of one piece a name: thousands of functions may share one, and thousands mention it.
        names = frozenset(self.named)
        hubs = {name: _Piece("") for name in names}
        for name, hub in hubs.items():
            hub.mention(self.named[name])
        for piece in (*self.functions.values(), *self.others):
            piece.mention(hubs[name] for name in piece.words & names)

    def cut(self, holder: ast.Module | ast.ClassDef, kept: set[_Piece]) -> None:
        """Takes out the functions that are not kept; blocks other than the holder's own are left as they are."""
        forget_inside(holder)
        body = [
            each
            for each in holder.body
            if not (isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and self.functions[each] not in kept)
        ]
        holder.body = body or [ast.copy_location(ast.Pass(), holder.body[0])]
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                self.cut(statement, kept)


def _first_line(node: ast.stmt) -> int:
    decorated = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    first = node.decorator_list[:1] if isinstance(node, decorated) else []
    return min([node.lineno, *(each.lineno for each in first)])
