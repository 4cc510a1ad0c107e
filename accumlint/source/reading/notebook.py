"""Jupyter notebooks: their code cells, one after the other, are one program.

Lines are kept, so that a line of the program is one of a cell. What is IPython and not Python (`%magic`, `!command`,
`help?`) becomes `pass`, or an unknown call where its result is assigned; cells in other languages (`%%bash`) are left out.
Cells are numbered as they stand in the notebook, from 1, those with text included.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

SUFFIX = ".ipynb"
MAX_BYTES = 200_000_000  # images in outputs make notebooks large

# Cell magics after which the rest of the cell runs as it stands, in the notebook's own process.
KEEPING_BODY = frozenset("time timeit capture debug prun memit mprun lprun heat notify scalene wandb skip_exception".split())

_MAYBE_MAGIC = re.compile(r"^[ \t]*[%!?;/,]|\?[ \t]*$|=[ \t]*[%!]", re.MULTILINE)
_CELL_MAGIC = re.compile(r"\s*%%(\w*)[^\n]*(?:\n|$)")
_MAGIC = re.compile(r"[ \t]*[%!?;/,]")
_TIMED = re.compile(
    r"(?P<indent>[ \t]*)(?P<magic>%(?:time|timeit|prun|memit)[ \t]+)(?!-|(?:async|class|def|for|if|try|while|with)\b|[@\s])"
)
_ASSIGNED = re.compile(r"(?P<target>[ \t]*[A-Za-z_][\w.\[\]\"', ]*=[ \t]*)[%!]")
_HELP = re.compile(r"[ \t]*[\w.*\[\]%]*\?{1,2}[ \t]*$")
_TOKEN = re.compile(
    r"""
      (?P<triple>\"\"\"|''') | "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | \#[^\n]*
    | (?P<open>[(\[{]) | (?P<close>[)\]}]) | \\\n | (?P<end>\n)
    """,
    re.VERBOSE | re.DOTALL,
)


class Cell(NamedTuple):
    """A code cell: its number in the notebook, and how many lines of the program stand before it."""

    number: int
    above: int


class Notebook(NamedTuple):
    """The program of a notebook: empty where it is in another language or has no code."""

    text: str
    cells: tuple[Cell, ...] = ()


class Broken(NamedTuple):
    """Why a file is no notebook; line and column are of the file itself."""

    message: str
    line: int = 1
    column: int = 1


NO_CELL = Cell(0, 0)


def is_notebook(path: str) -> bool:
    return path.endswith(SUFFIX)


def cell_at(cells: tuple[Cell, ...], line: int) -> Cell:
    """The cell that a line of the program stands in."""
    at = bisect_right(cells, line - 1, key=lambda cell: cell.above) - 1
    return cells[at] if at >= 0 else NO_CELL


@lru_cache(maxsize=2)
def read_notebook(data: bytes) -> Notebook | Broken:
    """The program of a notebook's bytes."""
    if len(data) > MAX_BYTES:
        return Broken(f"too large: {len(data) / 1e6:.1f} MB, the limit is {MAX_BYTES / 1e6:.0f} MB")
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        before = data[: error.start]
        return Broken("not a Jupyter notebook: not UTF-8", before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
    except json.JSONDecodeError as error:
        return Broken(f"not a Jupyter notebook: not valid JSON: {error.msg}", error.lineno, error.colno)
    except RecursionError:
        return Broken("not a Jupyter notebook: nested too deeply")
    cells = _cells(document)
    if cells is None:
        return Broken("not a Jupyter notebook: it holds no list of cells")
    return _program(cells) if _is_python(document) else Notebook("")


def _cells(document: Any) -> list[Any] | None:
    """All cells; those of several worksheets, as old notebooks have them, in their order."""
    if not isinstance(document, dict):
        return None
    cells = document.get("cells")
    if cells is None and isinstance(document.get("worksheets"), list):
        cells = [cell for sheet in document["worksheets"] if isinstance(sheet, dict) for cell in sheet.get("cells") or ()]
    return cells if isinstance(cells, list) else None


def _is_python(document: dict[str, Any]) -> bool:
    """Whether the kernel speaks Python, as far as the notebook says."""
    metadata = _table(document.get("metadata"))
    language = _table(metadata.get("language_info")).get("name") or _table(metadata.get("kernelspec")).get("language")
    return not isinstance(language, str) or language.lower() in {"python", "ipython"}


def _program(cells: list[Any]) -> Notebook:
    parts: list[str] = []
    found: list[Cell] = []
    above = 0
    for number, cell in enumerate(cells, 1):
        text = _python(_source(cell))
        if text:
            parts.append(text)
            found.append(Cell(number, above))
            above += text.count("\n")
    return Notebook("".join(parts), tuple(found))


def _source(cell: Any) -> str:
    """The text of a code cell in Python, "" for every other."""
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return ""
    language = _table(_table(cell.get("metadata")).get("vscode")).get("languageId", "python")
    if language != "python" or cell.get("language", "python") != "python":
        return ""
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source.replace("\r\n", "\n").replace("\r", "\n") if isinstance(source, str) else ""


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _python(source: str) -> str:
    """A cell as Python, line for line, with a line end at its end; "" where it is none."""
    if not source.strip():
        return ""
    source = source if source.endswith("\n") else f"{source}\n"
    head = ""
    while match := _CELL_MAGIC.match(source):
        if match[1] not in KEEPING_BODY:
            return ""
        head += "\n" * match[0].count("\n")
        source = source[match.end() :]
    return head + ("".join(_statements(source)) if _MAYBE_MAGIC.search(source) else source)


def _statements(source: str) -> Iterator[str]:
    """The statements of a cell, with what is IPython's own replaced."""
    at = 0
    while at < len(source):
        line = source[at : _line_end(source, at)].rstrip("\n")
        timed, assigned = _TIMED.match(line), _ASSIGNED.match(line)
        if timed:  # `%time train(model)` runs a statement, which stays at its column
            yield timed["indent"] + "0".ljust(len(timed["magic"]) - 1) + ";"
            at += timed.end()
        elif assigned or _MAGIC.match(line) or _HELP.match(line):
            end = _command_end(source, at)
            indent = line[: len(line) - len(line.lstrip())]
            yield f"{assigned['target']}get_ipython()" if assigned else f"{indent}pass"
            yield "\n" * source.count("\n", at, end)
            at = end
            continue
        end = _statement_end(source, at)
        yield source[at:end]
        at = end


def _line_end(source: str, at: int) -> int:
    return source.find("\n", at) + 1 or len(source)


def _command_end(source: str, at: int) -> int:
    """Where a magic or command ends: a backslash at the end of a line continues it."""
    end = _line_end(source, at)
    while end < len(source) and source[at:end].rstrip("\n").endswith("\\"):
        at, end = end, _line_end(source, end)
    return end


def _statement_end(source: str, at: int) -> int:
    """Where the line of Python that begins here ends, over open brackets, long strings and backslashes."""
    depth = 0
    while match := _TOKEN.search(source, at):
        at = match.end()
        if match["triple"]:
            closing = re.compile(rf"(?:\\.|[^\\])*?{match['triple']}", re.DOTALL).match(source, at)
            at = closing.end() if closing else len(source)
        elif match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
        elif match["end"] and depth <= 0:
            return at
    return len(source)
