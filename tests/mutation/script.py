"""A training script as text and tree, with the questions and edits that the operators share.

Mutants are made by editing the text, so that they are the same under every Python and keep the script's own comments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

Loop = ast.For | ast.While
_SCHEDULER = re.compile(r"sched|(^|_)lr|warm", re.IGNORECASE)
_SCALER = re.compile(r"scaler", re.IGNORECASE)


def last_name(node: ast.expr) -> str:
    """The last identifier of a name or an attribute."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace what lies between two offsets."""

    start: int
    end: int
    content: str


class Script:
    """One script. Statements that share a line with another are left alone by all operators."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def offset(self, line: int, column: int) -> int:
        # The scripts may hold non-ASCII comments, and the parser counts columns in bytes.
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def replaced(self, node: ast.expr | ast.stmt, content: str) -> str:
        return self.edited([Edit(*self.span(node), content)])

    def edited(self, edits: list[Edit]) -> str:
        text = self.text
        for edit in sorted(edits, key=lambda each: -each.start):
            text = text[: edit.start] + edit.content + text[edit.end :]
        return text

    def alone(self, statement: ast.stmt) -> bool:
        """Whether the statement has its lines to itself."""
        start, end = self.span(statement)
        assert statement.end_lineno is not None
        before = self.text[self._starts[statement.lineno - 1] : start]
        after = self.text[end : self._starts[statement.end_lineno] - 1]
        return not before.strip() and not after.partition("#")[0].strip()

    def removal(self, statement: ast.stmt) -> Edit:
        """Takes a statement away, or leaves `pass` where it is the only one of its block."""
        if len(self.block(statement)) == 1:
            return Edit(*self.span(statement), "pass")
        assert statement.end_lineno is not None
        return Edit(self._starts[statement.lineno - 1], self._starts[statement.end_lineno], "")

    def insertion(self, content: ast.stmt, *, before: ast.stmt | None = None, after: ast.stmt | None = None) -> Edit:
        """Puts a copy of a statement before or after another, with its indentation."""
        place = before or after
        assert place is not None
        assert place.end_lineno is not None
        at = self._starts[place.lineno - 1 if before is not None else place.end_lineno]
        indent = " " * place.col_offset
        copy = "\n".join(
            indent + line[content.col_offset if number else 0 :] for number, line in enumerate(self.source(content).split("\n"))
        )
        lead = "" if at <= len(self.text) and (at == 0 or self.text[at - 1 : at] == "\n") else "\n"
        return Edit(min(at, len(self.text)), min(at, len(self.text)), f"{lead}{copy}\n")

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The block that the statement stands in."""
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody", "handlers"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return [statement]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement_of(self, node: ast.AST) -> ast.stmt:
        return next(each for each in (node, *self.ancestors(node)) if isinstance(each, ast.stmt))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return sorted((node for node in ast.walk(self.tree) if isinstance(node, ast.Call)), key=lambda call: (call.lineno, call.col_offset))

    def statements(self, kind: str) -> Iterator[ast.stmt]:
        """The statements that are one call of a kind: step, schedule, zero, clip, unscale or update."""
        for call in self.calls:
            parent = self.parents[call]
            if kind_of(call) == kind and isinstance(parent, (ast.Expr, ast.Assign)) and parent.value is call and self.alone(parent):
                yield parent

    @cached_property
    def backwards(self) -> list[ast.Call]:
        return [call for call in self.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"]

    @cached_property
    def micro_loops(self) -> list[Loop]:
        """The innermost loops that hold a backward in their own function, outermost first where there are several."""
        found: dict[Loop, None] = {}
        for call in self.backwards:
            for node in self.ancestors(call):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                    break
                if isinstance(node, (ast.For, ast.While)):
                    found[node] = None
                    break
        return list(found)


def kind_of(call: ast.Call) -> str:
    """What a call does to the update, by its name."""
    name = last_name(call.func)
    owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name == "step":
        return "schedule" if _SCHEDULER.search(owner) and not _SCALER.search(owner) else "step"
    if name == "update" and _SCALER.search(owner):
        return "update"
    if name.startswith("clip_grad"):
        return "clip"
    return {"zero_grad": "zero", "unscale_": "unscale"}.get(name, "")
