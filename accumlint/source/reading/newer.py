"""Lowers syntax that is newer than the running Python to what it parses, line for line.

LibCST reads the file, and only the newer pieces are rewritten in the text, each over its own extent, so that lines and
(but for a few characters) columns stay what they were. The only module of this package that imports LibCST.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper

MAX_LINES = 10_000
MAX_BRACKETS = 60
# LibCST takes quadratic time over a chain of operators: this much is some four seconds.
MAX_COST = 10_000_000

_TOKEN = re.compile(
    r"""
      \#[^\n]*
    | \"{3} (?: [^"\\] | \\. | "(?!"") )* (?: \"{3} | \Z )
    | '{3}  (?: [^'\\] | \\. | '(?!'') )* (?: '{3}  | \Z )
    | "     (?: [^"\\\n] | \\. )* "?
    | '     (?: [^'\\\n] | \\. )* '?
    | \\\n
    | (?P<open>[\[({])
    | (?P<close>[\])}])
    | (?P<end>[\n,;])
    | (?P<operator>[-+*/%@&|^~<>=.]+ | \b(?:not|and|or|if|else|lambda|await|in|is)\b)
    """,
    re.DOTALL | re.VERBOSE,
)


# What a line of a top-level statement begins with, other than its first.
_CONTINUES = re.compile(r"(?:[ \t\f#\n)\]}]|(?:else|elif|except|finally|case)\b)")


class TooLargeError(Exception):
    """LibCST would take too long over the file, or die of its nesting; the message says which."""


def lower(text: str) -> str | None:
    """The text in the syntax of the running Python; None when LibCST does not parse it either.

    Only the top-level statements that the running Python refuses are given to LibCST.
    """
    statements = _top_level(text)
    refused = [at for at, statement in enumerate(statements) if not _parses(statement)]
    if sum(statements[at].count("\n") for at in refused) > MAX_LINES:
        raise TooLargeError("too long")
    for at in refused:
        lowered = _lower(statements[at])
        if lowered is None:
            return None
        statements[at] = lowered
    return "".join(statements)


def _lower(text: str) -> str | None:
    data = text.encode("utf-8")
    pieces = _NewerPieces(data)
    try:
        MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True).visit(pieces)
    except cst.ParserSyntaxError:
        return None
    except Exception as error:  # whatever a tree too deep for LibCST's own recursion makes it raise
        raise TooLargeError("nested too deeply") from error
    return _apply(data, pieces.edits).decode("utf-8")


def _top_level(text: str) -> list[str]:
    """The text cut before each top-level statement, on the way past which its nesting is checked."""
    cuts = [0]
    line = depth = operators = cost = 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth = max(depth - 1, 0)
        elif kind == "operator":
            operators += 1
        elif kind == "end" and (depth == 0 or token.group() == ","):
            cost += operators * operators
            operators = 0
            if token.group() == "\n" and not _CONTINUES.match(text, token.end()):
                if text[line] != "@":  # a decorator belongs to what follows
                    cuts.append(token.end())
                line = token.end()
        if depth > MAX_BRACKETS or cost + operators * operators > MAX_COST:
            raise TooLargeError("nested too deeply")
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    content: bytes


class _NewerPieces(cst.CSTVisitor):
    """Collects an edit for each piece that the running Python does not know."""

    METADATA_DEPENDENCIES = (ByteSpanPositionProvider,)

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data
        self.edits: list[_Edit] = []

    def visit_FormattedString(self, node: cst.FormattedString) -> bool:  # noqa: N802
        if sys.version_info < (3, 12) and not _parses(f"({self._text(node)})"):
            self._replace(node, _string_over(self._text(node)))
        return False

    def visit_TemplatedString(self, node: cst.BaseExpression) -> bool:  # noqa: N802
        if sys.version_info < (3, 14):
            self._replace(node, _string_over(self._text(node)))
        return False

    def visit_TypeAlias(self, node: cst.TypeAlias) -> bool:  # noqa: N802
        if sys.version_info < (3, 12):
            self._replace(node, _string_over(self._text(node)))
        return False

    def visit_TypeParameters(self, node: cst.TypeParameters) -> bool:  # noqa: N802
        if sys.version_info < (3, 13):  # 3.12 knows them without defaults
            self._replace(node, _spaces_over(self._text(node)))
        return False

    def visit_ExceptHandler(self, node: cst.ExceptHandler) -> None:  # noqa: N802
        self._parenthesise(node.type)

    def visit_ExceptStarHandler(self, node: cst.ExceptStarHandler) -> None:  # noqa: N802
        self._parenthesise(node.type)
        if sys.version_info < (3, 11):
            self._blank_star(self._span(node).start)

    def visit_Index(self, node: cst.Index) -> None:  # noqa: N802
        if sys.version_info < (3, 11) and node.star:
            self._blank_star(self._span(node).start)

    def visit_Param(self, node: cst.Param) -> None:  # noqa: N802
        if sys.version_info < (3, 11) and node.annotation and isinstance(node.annotation.annotation, cst.StarredElement):
            self._blank_star(self._span(node.annotation.annotation).start)

    def _parenthesise(self, types: cst.BaseExpression | None) -> None:
        if sys.version_info < (3, 14) and isinstance(types, cst.Tuple) and not types.lpar:
            self._replace(types, f"({self._text(types)})")

    def _blank_star(self, start: int) -> None:
        star = self.data.index(b"*", start)
        self.edits.append(_Edit(star, star + 1, b" "))

    def _replace(self, node: cst.CSTNode, content: str) -> None:
        span = self._span(node)
        self.edits.append(_Edit(span.start, span.start + span.length, content.encode("utf-8")))

    def _text(self, node: cst.CSTNode) -> str:
        span = self._span(node)
        return self.data[span.start : span.start + span.length].decode("utf-8")

    def _span(self, node: cst.CSTNode) -> CodeSpan:
        span = self.get_metadata(ByteSpanPositionProvider, node)
        assert isinstance(span, CodeSpan)
        return span


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _string_over(text: str) -> str:
    """A plain string that takes up the same lines and columns; what it says is of no matter to a training loop."""
    harmless = re.sub(r'["\\]', " ", text)
    if "\n" not in text:
        return f'"{harmless[1:-1]}"'
    return f'"""{harmless[3:-3]}"""' if harmless[-3:].isprintable() else f'"""{harmless[3:]}"""'


def _spaces_over(text: str) -> str:
    """Blanks that take up the same lines: outside brackets, a line end needs a backslash."""
    return "\\\n".join(" " * len(line) for line in text.split("\n"))


def _apply(data: bytes, edits: list[_Edit]) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for edit in sorted(edits, key=lambda each: each.start):
        pieces += [data[at : edit.start], edit.content]
        at = edit.end
    return b"".join([*pieces, data[at:]])
