"""Text for a terminal: spans with a tone, coloured only when they leave, and nothing raw from a source file."""

from __future__ import annotations

import enum
import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any


class Tone(enum.Enum):
    """What a piece of text is to the reader. Only `paint` knows the colours."""

    PLAIN = "plain"
    DIM = "dim"
    STRONG = "strong"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    QUIET = "quiet"  # sync off: nothing is exchanged
    LIVE = "live"  # sync on, a reduction
    UPDATE = "update"
    FRAME = "frame"


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    tone: Tone = Tone.PLAIN


Line = list[Span]

TAB = "    "

# One character for one, so that the columns still stand.
_ASCII = str.maketrans(
    {"●": "*", "✗": "X", "▲": "^", "│": "|", "─": "-", "┄": "-", "╎": ":", "…": "~", "·": ".", "×": "x", "÷": "/", "→": ">"}
)


def escape(text: str) -> str:
    """The text with tabs widened and every character that does not print spelled as an escape.

    Escape sequences, bidirectional overrides and halves of surrogate pairs in a source file must not reach a terminal.
    """
    text = text.replace("\t", TAB)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def encodable(text: str, encoding: str) -> str:
    """The text as a stream of this encoding can show it: the drawing's own glyphs get ASCII ones, the rest is escaped."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
    return text


@lru_cache(4_096)
def cells(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(_cells(char) for char in text)


@cache
def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, width: int) -> str:
    """The text, cut with an ellipsis where it is wider than `width`."""
    if cells(text) <= width:
        return text
    kept, used = [], 1
    for char in text:
        used += _cells(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept).rstrip() + "…" if width > 0 else ""


def pad(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def paragraph(text: str, width: int, *, first: str = "", rest: str = "", tone: Tone = Tone.PLAIN) -> list[Line]:
    """Lines no wider than `width` where the words allow it, what stands in backquotes strong, and unbroken if it is short."""
    room = max(width, len(rest) + 20)
    glued = "`".join(part.replace(" ", "\0") if at % 2 and len(part) < room // 2 else part for at, part in enumerate(text.split("`")))
    wrapped = textwrap.wrap(glued, room, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False)
    lines, inside = [], False
    for line in wrapped:
        spans, inside = _quoted(line.replace("\0", " "), inside, tone)
        lines.append(spans)
    return lines


def _quoted(text: str, inside: bool, tone: Tone) -> tuple[Line, bool]:
    """A line as spans, the backquotes with what they quote, and whether a quotation is open at its end."""
    spans = Line()
    for at, part in enumerate(text.split("`")):
        if at:
            inside = not inside
        if at and inside:
            part = "`" + part
        elif at:
            spans.append(Span("`", Tone.STRONG))
        if part:
            spans.append(Span(part, Tone.STRONG if inside else tone))
    return spans, inside


def plain(line: Iterable[Span]) -> str:
    return "".join(span.text for span in line).rstrip()


def paint(lines: Iterable[Line], *, color: bool) -> str:
    """The lines as one string."""
    if not color:
        return "\n".join(plain(line) for line in lines)
    return "\n".join("".join(_style(span) for span in line).rstrip() for line in lines)


def _style(span: Span) -> str:
    import click

    return click.style(span.text, **_STYLES[span.tone]) if span.tone in _STYLES else span.text


# Dim and not "bright black", which some palettes draw in the colour of the background.
_STYLES: dict[Tone, dict[str, Any]] = {
    Tone.DIM: {"dim": True},
    Tone.FRAME: {"dim": True},
    Tone.STRONG: {"bold": True},
    Tone.ERROR: {"fg": "red", "bold": True},
    Tone.WARNING: {"fg": "yellow", "bold": True},
    Tone.INFO: {"fg": "cyan", "bold": True},
    Tone.QUIET: {"fg": "magenta"},
    Tone.LIVE: {"fg": "green"},
    Tone.UPDATE: {"fg": "blue", "bold": True},
}
