"""The outline of a module: its top-level statements, what each binds, what each mentions, and whether it matters to training."""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, cached_property

from accumlint.source.reading.facts import (
    BACKWARD_NAMES,
    CLIP_NAMES,
    LOSS_WORDS,
    TRACKED,
    mentions_k,
    names_k,
    names_loss,
    terminal,
)
from accumlint.source.reading.nodes import inside_of, walk
from accumlint.source.reading.parse import Source
from accumlint.trace import FILE_LINES

TRAINING_WORDS = (
    BACKWARD_NAMES
    | CLIP_NAMES
    | (TRACKED - {"requires_grad", "requires_grad_", "nullcontext"})
    | frozenset(
        """
        step zero_grad unscale_ accumulate gradient_state reduce_gradients init_process_group DistributedSampler loss_scaler
        train_batch train_step
        """.split()
    )
)
WEAK_WORDS = frozenset({"step", "init_process_group", "DistributedSampler", "accumulate", "gradient_state", "all_reduce"})
UPDATE_WORDS = frozenset(
    {"step", "zero_grad", "no_sync", "train_batch", "loss_scaler", "require_backward_grad_sync", "set_requires_gradient_sync"}
)
EVIDENCE = re.compile(r"ignore_?index|pad_sequence|label_pad_token|DataCollator|BucketIterator|(?-i:IGNORE_)|dist_autograd", re.IGNORECASE)
SCHEDULES = re.compile(r"sched", re.IGNORECASE)  # their steps update nothing
IGNORED = 100  # with a minus before it, the target that losses ignore
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Imported = ast.Import | ast.ImportFrom


@cache
def _tells(word: str) -> bool:
    """Whether a name tells of losses, of K, or of what targets are like."""
    return LOSS_WORDS.search(word) is not None or _tells_of_settings(word)


@cache
def _tells_of_settings(word: str) -> bool:
    return names_k(word) or EVIDENCE.search(word) is not None


class Piece:
    """A top-level statement."""

    def __init__(self, outline: Outline, node: ast.stmt) -> None:
        self.outline = outline
        self.node = node
        self.names: set[str] = set()  # that it reads
        self.attributes: dict[str, set[tuple[str, ...]]] = defaultdict(set)  # what is asked of a name, `a.b.c` as a: (b, c)
        self.imports: list[Imported] = []
        self.bases: set[str] = set()  # the last parts of the names of base classes
        self.size = 0
        self.backward = self.update = self.strong = self.trains = self.matters = False
        weighed: set[str] = set()
        for part in inside_of(node):
            if isinstance(part, ast.Name):  # the commonest come first
                word = part.id
                self.names.add(word)
            elif isinstance(part, ast.Attribute):
                word = part.attr
                self._chain(part)
                if word == "step" and SCHEDULES.search(terminal(part.value)):
                    continue
            else:
                self._note(part)
                continue
            if word not in weighed:
                weighed.add(word)
                self._weigh(word)
        self.is_model = isinstance(node, ast.ClassDef) and any(
            isinstance(member, ast.FunctionDef) and member.name == "forward" for member in node.body
        )
        self.matters = self.matters or (self.backward if self.is_model else self.trains)

    @cached_property
    def known_names(self) -> list[str]:
        """The names that it reads and its module binds, or may take from another one with a star."""
        outline = self.outline
        if outline.stars:
            return sorted(self.names)
        return sorted(name for name in self.names if name in outline.imported or name in outline.bindings)

    @cached_property
    def kept(self) -> ast.stmt:
        """The statement as it is followed: of a model that does not train itself what forms its loss."""
        if not self.is_model or self.backward or not isinstance(self.node, ast.ClassDef):
            return self.node
        body = [each for each in self.node.body if not isinstance(each, FUNCTIONS) or _forms_loss(each)]
        return ast.copy_location(
            ast.ClassDef(**{**{name: getattr(self.node, name) for name in self.node._fields}, "body": body}), self.node
        )

    def _note(self, part: ast.AST) -> None:
        if isinstance(part, ast.stmt):
            self.size += 1
            if isinstance(part, (ast.Import, ast.ImportFrom)):
                self.imports.append(part)
            elif isinstance(part, ast.ClassDef):
                self.bases.update(base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in part.bases)
        elif isinstance(part, (ast.arg, ast.keyword)):
            self.matters = self.matters or bool(part.arg and _tells_of_settings(part.arg))
        elif isinstance(part, ast.Constant):
            if not self.matters and isinstance(part.value, str):
                self.matters = mentions_k(part.value)
        elif isinstance(part, ast.UnaryOp) and isinstance(part.operand, ast.Constant) and part.operand.value == IGNORED:
            self.matters = True

    def _weigh(self, word: str) -> None:
        if word in TRAINING_WORDS:
            self.trains = True
            self.backward = self.backward or word in BACKWARD_NAMES or word in {"loss_scaler", "train_batch"}
            self.update = self.update or word in UPDATE_WORDS
            self.strong = self.strong or word not in WEAK_WORDS
        elif not self.matters:
            self.matters = _tells(word)

    def _chain(self, node: ast.Attribute) -> None:
        parts = [node.attr]
        inner = node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self.attributes[inner.id].add(tuple(reversed(parts)))


class Outline:
    """A module of the project; `number` tells its lines from those of other modules."""

    def __init__(self, source: Source, number: int = 0) -> None:
        self.source = source
        self.path = source.path
        self.number = number
        self._pieces: dict[int, Piece] = {}

    @property
    def is_package(self) -> bool:
        return os.path.basename(self.path) == "__init__.py"

    def piece(self, node: ast.stmt) -> Piece:
        known = self._pieces.get(id(node))
        if known is None:
            if self.number:
                _shift(node, self.number * FILE_LINES)
            known = self._pieces[id(node)] = Piece(self, node)
        return known

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """The top-level statements that run when the module is imported."""
        return [node for node in self.source.tree.body if not _is_script(node)]

    @cached_property
    def bindings(self) -> dict[str, list[ast.stmt]]:
        """The top-level statements that bind each name."""
        found: dict[str, list[ast.stmt]] = defaultdict(list)
        for statement in self.statements:
            for name in set(_bound(statement)):
                found[name].append(statement)
        return found

    @cached_property
    def imported(self) -> dict[str, tuple[Imported, ast.alias]]:
        """The names that imports at the top level bind."""
        found: dict[str, tuple[Imported, ast.alias]] = {}
        for node in self.statements:
            for part in _flat(node):
                if isinstance(part, (ast.Import, ast.ImportFrom)):
                    for alias in part.names:
                        found.setdefault(alias.asname or alias.name.split(".")[0], (part, alias))  # of `try` the first
        return found

    @cached_property
    def stars(self) -> list[ast.ImportFrom]:
        return [part for node in self.statements for part in _flat(node) if isinstance(part, ast.ImportFrom) and part.names[0].name == "*"]


def _forms_loss(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a model's loss rests on one of its functions: also on what says which targets count."""
    return function.name == "forward" or "mask" in function.name or names_loss(function)


def _is_script(node: ast.stmt) -> bool:
    """Whether a statement runs only where the file is the program."""
    return isinstance(node, ast.If) and any(isinstance(part, ast.Name) and part.id == "__name__" for part in walk(node.test))


def _flat(node: ast.stmt) -> Iterator[ast.stmt]:
    """A statement and those in its blocks, not in the functions and classes that it defines."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for name in ("body", "orelse", "finalbody"):
        for inner in getattr(node, name, ()):
            yield from _flat(inner)
    for handler in getattr(node, "handlers", ()):
        for inner in handler.body:
            yield from _flat(inner)


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds or changes."""
    for part in _flat(node):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield part.name
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in part.names)
        elif isinstance(part, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from (each.id for target in targets for each in walk(target) if isinstance(each, ast.Name))
        elif isinstance(part, (ast.With, ast.AsyncWith)):
            for item in part.items:
                if isinstance(item.optional_vars, ast.Name):
                    yield item.optional_vars.id
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and isinstance(part.value.func, ast.Attribute):
            holder: ast.expr = part.value.func.value
            if isinstance(holder, ast.Name):
                yield holder.id  # `parser.add_argument(…)`, `TABLE.update(…)`


def _shift(statement: ast.stmt, lines: int) -> None:
    """Moves a statement down, so that no line of it is a line of another file."""
    for node in inside_of(statement):
        place = node.__dict__
        if "lineno" in place:
            place["lineno"] += lines
            if place.get("end_lineno") is not None:
                place["end_lineno"] += lines
