"""Suppressions in notebooks: the cells are changed, and every other byte of the file stays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accumlint.source.editing.ignores import add_ignores
from accumlint.source.reading.notebook import Notebook, cell_at, read_notebook


class NotEditableError(ValueError):
    """A notebook that could not be written without changing more than was asked for."""


def add_ignores_to_cells(data: bytes, codes: Mapping[int, Iterable[str]], reason: str = "") -> bytes:
    """The notebook with a suppression at the end of the statement of each line of its program."""
    program = read_notebook(data)
    text = data.decode("utf-8")
    document = json.loads(text)
    style = next((style for style in _styles(text) if _written(document, style) == text), None)
    if style is None or not isinstance(program, Notebook):
        raise NotEditableError("it is not written as Jupyter writes notebooks, so the comments have to be put there by hand")
    before = program.text.split("\n")
    after = add_ignores(program.text.encode("utf-8"), codes, reason).decode("utf-8").split("\n")
    for line, (old, new) in enumerate(zip(before, after, strict=True), 1):
        if old != new:
            cell = cell_at(program.cells, line)
            _replace(document["cells"][cell.number - 1], line - cell.above - 1, old, new)
    return _written(document, style).encode("utf-8")


def _replace(cell: dict[str, Any], at: int, old: str, new: str) -> None:
    """Changes a line of a cell; its text stays a list of lines where it is one."""
    source = cell["source"]
    lines = ("".join(source) if isinstance(source, list) else source).split("\n")
    kept = next((length for length, (one, other) in enumerate(zip(lines[at], old, strict=False)) if one == other), 0)
    lines[at] = lines[at][:kept] + new[kept:]  # a `%time` before the statement stays
    text = "\n".join(lines)
    cell["source"] = text.splitlines(keepends=True) if isinstance(source, list) else text


Style = tuple[str | int | None, bool, str]


def _styles(text: str) -> Iterator[Style]:
    """How a notebook may have been written: indentation, whether in ASCII, what stands at its end."""
    match = re.match(r"\{\r?\n([ \t]+)", text)
    end = text[len(text.rstrip()) :]
    for plain in (False, True):
        yield match[1] if match else None, plain, end


def _written(document: Any, style: Style) -> str:
    indent, plain, end = style
    return json.dumps(document, indent=indent, ensure_ascii=plain) + end
