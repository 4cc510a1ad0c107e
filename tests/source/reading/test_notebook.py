"""Notebooks: cells become one program, line for line."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from accumlint.source.reading.notebook import Broken, Cell, Notebook, cell_at, read_notebook


def code(*lines: str, **metadata: Any) -> dict[str, Any]:
    text = "\n".join(lines)
    return {"cell_type": "code", "execution_count": None, "metadata": metadata, "outputs": [], "source": text.splitlines(keepends=True)}


def markdown(text: str = "# Title") -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": [text]}


def notebook(*cells: dict[str, Any], **metadata: Any) -> bytes:
    return json.dumps({"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1).encode()


def program(*cells: dict[str, Any], **metadata: Any) -> Notebook:
    found = read_notebook(notebook(*cells, **metadata))
    assert isinstance(found, Notebook)
    return found


def text(*lines: str) -> str:
    """What one cell becomes; always Python, and always as long as before."""
    found = program(code(*lines)).text
    assert found.count("\n") == len("\n".join(lines).rstrip("\n").split("\n"))
    ast.parse(found)
    return found


def test_code_cells_follow_one_another_and_are_counted_among_all_cells() -> None:
    found = program(markdown(), code("import os", "x = 1"), markdown(), code("y = x"), code(""), code("z = y\n"))
    assert found.text == "import os\nx = 1\ny = x\nz = y\n"
    assert found.cells == (Cell(2, 0), Cell(4, 2), Cell(6, 3))
    assert [cell_at(found.cells, line).number for line in (1, 2, 3, 4)] == [2, 2, 4, 6]
    assert cell_at((), 1) == Cell(0, 0)


def test_a_source_may_be_one_string_with_any_line_ends() -> None:
    cell = code() | {"source": "a = 1\r\nb = 2"}
    assert program(cell).text == "a = 1\nb = 2\n"


@pytest.mark.parametrize(
    ("line", "python"),
    [
        ("%matplotlib inline", "pass\n"),
        ("!pip install 'x (", "pass\n"),
        ("  !ls", "  pass\n"),
        ("?model", "pass\n"),
        ("model.fit?", "pass\n"),
        ("model.fit??", "pass\n"),
        ("files = !ls *.py", "files = get_ipython()\n"),
        ("t = %timeit -o f(x)", "t = get_ipython()\n"),
        ("%time train(model)", "0    ;train(model)\n"),
        ("%timeit -n 3 f(x)", "pass\n"),
        ("%time for x in y: f(x)", "pass\n"),
        ("a = 5 % 3", "a = 5 % 3\n"),
        ("a != b", "a != b\n"),
        ("print('why?')  # why?", "print('why?')  # why?\n"),
    ],
)
def test_lines_of_ipython(line: str, python: str) -> None:
    found = program(code(*(["if x:", line] if line.startswith(" ") else [line]))).text
    assert found == ("if x:\n" + python if line.startswith(" ") else python)
    ast.parse(found)


def test_a_statement_after_time_keeps_its_column() -> None:
    line = "%time loss = step(model)"
    assert text(line).index("loss") == line.index("loss")


def test_what_only_looks_like_a_command_stays() -> None:
    lines = [
        's = """',
        "%not a magic",
        "!nor a command",
        '"""',
        "a = (b",
        "     % c)",
        "d = [",
        "    e,  # is it?",
        "]",
        "f = 1 + \\",
        "    2",
    ]
    assert text(*lines) == "\n".join(lines) + "\n"
    assert text('!echo "it\'s ("', *lines) == "pass\n" + "\n".join(lines) + "\n"
    assert text("s = '''unclosed \\''' %", "%x", "'''", "%y") == "s = '''unclosed \\''' %\n%x\n'''\npass\n"


def test_a_command_over_several_lines() -> None:
    assert text("!torchrun --nproc-per-node 2 \\", "    train.py \\", "    --lr 1", "x = 1") == "pass\n\n\nx = 1\n"


@pytest.mark.parametrize("magic", ["%%time", "%%capture out", "%%timeit -n 1", "%%prun", "%%wandb", "\n%%time"])
def test_cell_magics_that_keep_their_body(magic: str) -> None:
    lines = magic.split("\n")
    assert text(*lines, "x = 1") == "\n" * len(lines) + "x = 1\n"


@pytest.mark.parametrize("magic", ["%%bash", "%%html", "%%writefile train.py", "%%python", "%%cython", "%%", "%%javascript"])
def test_cells_in_other_languages_are_left_out(magic: str) -> None:
    found = program(code(magic, "for x in y:"), code("z = 1"))
    assert found == Notebook("z = 1\n", (Cell(2, 0),))


def test_magics_over_magics() -> None:
    assert text("%%time", "%%capture", "%load_ext x", "y = 1") == "\n\npass\ny = 1\n"
    assert program(code("%%time", "%%bash", "ls")).text == ""


@pytest.mark.parametrize(
    "metadata", [{"language_info": {"name": "R"}}, {"kernelspec": {"language": "julia"}}, {"language_info": {"name": "scala"}}]
)
def test_notebooks_in_other_languages_hold_nothing(metadata: dict[str, Any]) -> None:
    assert program(code("x <- 1"), **metadata) == Notebook("")


@pytest.mark.parametrize(
    "metadata", [{}, {"language_info": {"name": "python"}}, {"kernelspec": {"language": "python"}}, {"kernelspec": []}]
)
def test_notebooks_in_python(metadata: dict[str, Any]) -> None:
    assert program(code("x = 1"), **metadata).text == "x = 1\n"


def test_a_cell_of_its_own_language() -> None:
    assert program(code("select 1", vscode={"languageId": "sql"}), code("x = 1")).cells == (Cell(2, 0),)


def test_worksheets_of_old_notebooks() -> None:
    cell = {"cell_type": "code", "language": "python", "input": ["x = 1\n"], "outputs": []}
    old = {"worksheets": [{"cells": [markdown(), cell]}, {"cells": [cell]}], "nbformat": 3}
    assert read_notebook(json.dumps(old).encode()) == Notebook("x = 1\nx = 1\n", (Cell(2, 0), Cell(3, 1)))


@pytest.mark.parametrize(
    ("data", "message", "place"),
    [
        (b"", "not a Jupyter notebook: not valid JSON: Expecting value", (1, 1)),
        (b'{"cells": [\n}', "not a Jupyter notebook: not valid JSON: Expecting value", (2, 1)),
        (b"[1]", "not a Jupyter notebook: it holds no list of cells", (1, 1)),
        (b'{"cells": 1}', "not a Jupyter notebook: it holds no list of cells", (1, 1)),
        (b'{"cells":\n "\xff"}', "not a Jupyter notebook: not UTF-8", (2, 3)),
        (b"[" * 200_000, "not a Jupyter notebook: nested too deeply", (1, 1)),
    ],
)
def test_what_is_no_notebook(data: bytes, message: str, place: tuple[int, int]) -> None:
    assert read_notebook(data) == Broken(message, *place)


@pytest.mark.parametrize(
    "cell", [None, 1, {}, {"cell_type": "code"}, {"cell_type": "code", "source": 1}, {"cell_type": "code", "source": [1]}]
)
def test_cells_that_hold_no_text(cell: Any) -> None:
    assert read_notebook(json.dumps({"cells": [cell]}).encode()) == Notebook("")


def test_a_command_that_ends_the_cell_keeps_its_lines() -> None:
    assert text("x = 1", "!a \\", "b") == "x = 1\npass\n\n"
    assert text("%time f(", "  x)") == "0    ;f(\n  x)\n"
