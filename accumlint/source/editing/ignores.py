"""Suppressions: `# noqa: ACC101`, `# accumlint: ignore[ACC101]`, `# accumlint: file-ignore[ACC101]`, and those that suppress nothing."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from accumlint.findings import Finding

UNUSED = "ACC001"

_NOQA = re.compile(r"#\s*noqa(?![\w-])(?P<codes>:\s*(?P<list>[A-Za-z]+[0-9]+(?:[\s,]+[A-Za-z]+[0-9]+)*))?", re.IGNORECASE)
# Codes without brackets are taken in for the remark that they need some.
_IGNORE = re.compile(r"#\s*accumlint:\s*(?P<kind>file-ignore|ignore)\b(?:\[(?P<list>[^\]]*)\]|[\s:=(]*ACC\d+(?:[\s,]+ACC\d+)*\)?)?")
_SPLIT = re.compile(r"[\s,]+")


class Suppression(NamedTuple):
    """A comment that suppresses findings on the lines `first` to `last` (both 0: in the whole file).

    `codes` are as written, without those of other linters; None is a blanket `# noqa`, an empty tuple a comment that
    forgot to name a code.
    """

    line: int
    column: int
    end_column: int
    first: int
    last: int
    codes: tuple[str, ...] | None
    text: str

    def covers(self, lines: Iterable[int]) -> bool:
        return self.first == 0 or any(self.first <= line <= self.last for line in lines)


class Unused(NamedTuple):
    """A code in a suppression that suppresses nothing, and why."""

    suppression: Suppression
    code: str
    why: str


def from_row(row: Sequence[Any]) -> Suppression:
    """The suppression that a list of its fields, as JSON keeps it, stands for."""
    line, column, end_column, first, last, codes, text = row
    return Suppression(line, column, end_column, first, last, None if codes is None else tuple(codes), text)


def _concerns_us(noqa: re.Match[str]) -> bool:
    """Whether a `noqa` is blanket or names a code of ours."""
    return noqa["list"] is None or "ACC" in noqa["list"].upper()


def suppressions(text: str) -> list[Suppression]:
    """All suppressions of a file that can concern accumlint."""
    if not any(_concerns_us(match) for match in _NOQA.finditer(text)) and _IGNORE.search(text) is None:
        return []
    found: list[Suppression] = []
    waiting: list[tokenize.TokenInfo] = []  # comments on lines of their own, for the statement below
    start = 0  # first line of the logical line that is being read, 0 between two
    comments: list[tokenize.TokenInfo] = []
    for token in _tokens(text):
        if token.type == tokenize.COMMENT:
            if start:
                comments.append(token)
            else:
                found.extend(_whole_file(token))
                waiting.append(token)
        elif token.type == tokenize.NEWLINE:
            for comment in comments:
                found.extend(_within(comment, start, token.start[0]))
            for comment in waiting:
                found.extend(_above(comment, start, token.start[0]))
            comments, waiting, start = [], [], 0
        elif token.type == tokenize.NL:
            if not start and token.line.strip() == "":
                waiting = []
        elif token.type not in {tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}:
            start = start or token.start[0]
    return sorted(set(found))


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a file, as far as they can be read."""
    try:
        yield from tokenize.generate_tokens(io.StringIO(text, newline="").readline)
    except (tokenize.TokenError, SyntaxError, RecursionError):
        return


def _within(comment: tokenize.TokenInfo, first: int, last: int) -> Iterator[Suppression]:
    """A comment beside code: at either end of a statement it speaks for all of it, in the middle for its own line."""
    line = comment.start[0]
    alone = comment.line.lstrip().startswith("#")
    lines = (first, last) if line in {first, last} else (line, line + 1 if alone else line)
    yield from _whole_file(comment)
    yield from _noqa(comment, lines)
    yield from _ignore(comment, lines)


def _above(comment: tokenize.TokenInfo, first: int, last: int) -> Iterator[Suppression]:
    """A comment on a line of its own: only accumlint's own form speaks for the statement below."""
    yield from _ignore(comment, (first, last))


def _whole_file(comment: tokenize.TokenInfo) -> Iterator[Suppression]:
    for match in _IGNORE.finditer(comment.string):
        if match["kind"] == "file-ignore":
            yield _suppression(comment, match, (0, 0), _listed(match["list"]))


def _ignore(comment: tokenize.TokenInfo, lines: tuple[int, int]) -> Iterator[Suppression]:
    for match in _IGNORE.finditer(comment.string):
        if match["kind"] == "ignore":
            yield _suppression(comment, match, lines, _listed(match["list"]))


def _noqa(comment: tokenize.TokenInfo, lines: tuple[int, int]) -> Iterator[Suppression]:
    for match in _NOQA.finditer(comment.string):
        if match["codes"] is None:
            yield _suppression(comment, match, lines, None)
        else:
            own = tuple(code for code in _listed(match["list"]) if code.upper().startswith("ACC"))
            if own:
                yield _suppression(comment, match, lines, own)


def _listed(codes: str | None) -> tuple[str, ...]:
    return tuple(code for code in _SPLIT.split(codes or "") if code)


def _suppression(comment: tokenize.TokenInfo, match: re.Match[str], lines: tuple[int, int], codes: tuple[str, ...] | None) -> Suppression:
    line, column = comment.start
    return Suppression(line, column + match.start() + 1, column + match.end() + 1, *lines, codes, match[0])


def names(selector: str, code: str, rules: Mapping[str, str]) -> bool:
    """Whether a code, prefix, name or ALL in a suppression means a rule; `rules` are the names by code."""
    upper = selector.upper()
    return upper == "ALL" or code == upper or (upper.startswith("ACC") and code.startswith(upper)) or rules.get(code) == selector.lower()


def lines_of(finding: Finding) -> tuple[int, ...]:
    """The lines at which a finding can be suppressed."""
    lines = {finding.place.line, finding.place.end_line or finding.place.line, finding.noqa_line or finding.place.line}
    return tuple(sorted(lines))


def suppressing(finding: Finding, held: Iterable[Suppression], rules: Mapping[str, str]) -> list[Suppression]:
    """The suppressions that silence a finding."""
    lines = lines_of(finding)
    return [
        each
        for each in held
        if each.covers(lines) and (each.codes is None or any(names(selector, finding.code, rules) for selector in each.codes))
    ]


def unused(
    held: Iterable[Suppression], findings: Iterable[Finding], rules: Mapping[str, str], enabled: Callable[[str], bool]
) -> Iterator[Unused]:
    """The codes that suppress none of the findings of a file, where a rule that they mean is on."""
    found = [(finding.code, lines_of(finding)) for finding in findings]
    for each in held:
        if each.codes is None:
            continue
        if not each.codes:
            bare = re.search(r"ACC\d", each.text) is not None
            yield Unused(each, "", f"{'has no brackets around its rules' if bare else 'names no rule'}, so it suppresses nothing")
        for selector in each.codes:
            meant = [code for code in rules if names(selector, code, rules)]
            if not meant:
                yield Unused(each, selector, "is no rule of accumlint")
            elif UNUSED in meant or not any(enabled(code) for code in meant):
                continue
            elif not any(code in meant and each.covers(lines) for code, lines in found):
                yield Unused(each, selector, "suppresses nothing here")


def add_ignores(data: bytes, codes: Mapping[int, Iterable[str]], reason: str = "") -> bytes:
    """The file with `# accumlint: ignore[...]` at the end of the statement of each line, in its own encoding and line ends."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)  # str.splitlines also splits where Python does not
    ends, comments = _statement_ends(text)
    wanted: dict[int, set[str]] = {}
    for line, those in codes.items():
        wanted.setdefault(ends.get(line, line), set()).update(those)
    for line, those in wanted.items():
        lines[line - 1] = _with_ignore(lines[line - 1], comments.get(line), those, " ".join(reason.split()))
    return "".join(lines).encode(encoding)


def _statement_ends(text: str) -> tuple[dict[int, int], dict[int, int]]:
    """The last line of the statement that each line belongs to, and the column at which the comment of a line begins."""
    ends: dict[int, int] = {}
    comments: dict[int, int] = {}
    start = 0
    for token in _tokens(text):
        if token.type == tokenize.NEWLINE:
            ends.update(dict.fromkeys(range(start, token.start[0] + 1), token.start[0]))
            start = 0
        elif token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.start[1]
        elif token.type not in {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}:
            start = start or token.start[0]
    return ends, comments


def _with_ignore(line: str, comment: int | None, codes: set[str], reason: str) -> str:
    body = line.rstrip("\r\n")
    end = line[len(body) :]
    held = () if comment is None else _IGNORE.finditer(body, comment)  # what stands in a string is the program's
    match = next((each for each in held if each["kind"] == "ignore" and each["list"] is not None), None)
    if match is not None:
        listed = ", ".join(sorted({*_listed(match["list"]), *codes}))
        return body[: match.start("list")] + listed + body[match.end("list") :] + end
    return f"{body.rstrip()}  # accumlint: ignore[{', '.join(sorted(codes))}]{' ' + reason if reason else ''}{end}"
