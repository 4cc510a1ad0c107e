"""From a file's bytes to its text: encodings as Python declares them, one clear line for what cannot be read."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from accumlint.source.reading.notebook import NO_CELL, Broken, Cell, is_notebook, read_notebook

MAX_BYTES = 5_000_000
MAX_LINES = 200_000
# Memory follows the number of nodes, not of bytes: a megabyte of `1,1,1,…` makes half a million of them.
MAX_COMMAS = 400_000

_DECLARED = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = re.compile(rb"^[ \t\f]*(?:#.*)?$")
# Codecs that take more than linear time, or that are no encodings of source code.
_REFUSED = frozenset({"punycode", "idna", "undefined"})


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a file cannot be linted, in one line; line and column are 1-based."""

    path: str
    message: str
    line: int = 1
    column: int = 1
    cell: Cell = NO_CELL


def decode(data: bytes, path: str) -> str | Problem:
    """The text with `\\n` line ends and without a byte order mark; of a notebook its program."""
    if is_notebook(path):
        return _of_notebook(data, path)
    if len(data) > MAX_BYTES:
        return Problem(path, f"too large: {len(data) / 1e6:.1f} MB, the limit is {MAX_BYTES / 1e6:.0f} MB")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Problem(path, "not UTF-8: the file is UTF-16, which Python does not read")
    null = data.find(b"\0")
    if null >= 0:
        return Problem(path, "not Python source: the file contains null bytes", *_position(data, null))
    commas = data.count(b",")
    if commas > MAX_COMMAS:
        return _too_many_commas(path, commas)
    text = _decode(data, path)
    if isinstance(text, Problem):
        return text
    return _limited(text.replace("\r\n", "\n").replace("\r", "\n"), path)


def _of_notebook(data: bytes, path: str) -> str | Problem:
    program = read_notebook(data)
    if isinstance(program, Broken):
        return Problem(path, *program)
    if "\0" in program.text:
        return Problem(path, "not Python source: a cell contains null bytes")
    commas = program.text.count(",")
    return _too_many_commas(path, commas) if commas > MAX_COMMAS else _limited(program.text, path)


def _too_many_commas(path: str, commas: int) -> Problem:
    return Problem(path, f"too large: {commas:,} commas, which is a table of data rather than a program")


def _limited(text: str, path: str) -> str | Problem:
    lines = text.count("\n")
    if lines > MAX_LINES:
        return Problem(path, f"too large: {lines:,} lines, the limit is {MAX_LINES:,}")
    return text


def _decode(data: bytes, path: str) -> str | Problem:
    marked = data.startswith(codecs.BOM_UTF8)
    body = data[len(codecs.BOM_UTF8) :] if marked else data
    declared = _declared_encoding(body)
    name = declared or "utf-8"
    if _normal(name) in _REFUSED:
        return Problem(path, f"unknown encoding: {name}", _declaration_line(body))
    try:
        if marked and codecs.lookup(name).name != "utf-8":
            return Problem(path, f"the file begins with a UTF-8 mark but declares the encoding {name}", _declaration_line(body))
        return body.decode(name)
    except UnicodeDecodeError as error:
        byte = error.object[error.start] if error.start < len(error.object) else 0
        place = _position(body, error.start)
        if declared is None:
            return Problem(path, f"not UTF-8 (byte 0x{byte:02x}), and no other encoding is declared", *place)
        return Problem(path, f"not {name} (byte 0x{byte:02x}), which is the declared encoding", *place)
    except (LookupError, ValueError):
        return Problem(path, f"unknown encoding: {name}", _declaration_line(body))


def _declared_encoding(data: bytes) -> str | None:
    """The encoding that a comment in the first two lines declares (PEP 263)."""
    for line in _first_lines(data):
        match = _DECLARED.match(line)
        if match:
            return match.group(1).decode("ascii", "replace")
        if not _BLANK.match(line):
            return None
    return None


def _declaration_line(data: bytes) -> int:
    return next((number for number, line in enumerate(_first_lines(data), 1) if _DECLARED.match(line)), 1)


def _first_lines(data: bytes) -> list[bytes]:
    return re.split(rb"\r\n|\r|\n", data[:1000], maxsplit=2)[:2]


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _position(data: bytes, offset: int) -> tuple[int, int]:
    before = data[:offset].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
