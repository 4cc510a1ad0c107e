"""Notebooks on the command line: findings by cell and line in every format, suppressions, editing, discovery."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accumlint.cli import run
from tests.conftest import Write
from tests.source.reading.test_notebook import code, markdown, notebook

SETUP = code("!pip install torch", "import torch", "import torch.nn.functional as F", "accum = 4")
LOOP = (
    "for i, (x, y) in enumerate(loader):",
    "    loss = F.cross_entropy(model(x), y) / accum",
    "    loss.backward()",
    "    optimizer.step(){comment}",
    "    optimizer.zero_grad()",
)


def training(comment: str = "") -> bytes:
    loop = "\n".join(LOOP).format(comment=comment).split("\n")
    return notebook(markdown(), SETUP, markdown("## Train"), code("%%time", *loop))


Lint = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lint(project: Path, capsys: pytest.CaptureFixture[str]) -> Lint:
    def ran(*arguments: str) -> tuple[int, str, str]:
        status = run(["check", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return ran


def test_concise(write: Write, lint: Lint) -> None:
    write("a.ipynb", training())
    status, out, err = lint(".", "--output-format", "concise")
    assert status == 1
    assert out.startswith("a.ipynb:cell 4:5:5: ACC301 error `optimizer.step()` runs after every micro-batch")
    assert err == ""


def test_full(write: Write, lint: Lint) -> None:
    write("a.ipynb", training())
    out = lint("a.ipynb")[1]
    assert "-> a.ipynb:cell 4:5:5" in out
    assert " 5 |     optimizer.step()" in out
    [step] = [line for line in out.splitlines() if line.strip().startswith("step ")]
    assert "4:5  optimizer.step()" in step


def test_json(write: Write, lint: Lint) -> None:
    write("a.ipynb", training())
    [found] = json.loads(lint(".", "--output-format", "json")[1])
    assert (found["cell"], found["location"], found["end_location"]) == (4, {"row": 5, "column": 5}, {"row": 5, "column": 21})
    assert found["noqa_row"] == 5
    backward = next(event for event in found["trace"] if event["kind"] == "backward")
    assert (backward["cell"], backward["row"], backward["column"]) == (4, 4, 5)


def test_sarif_and_github_mark_the_file_and_name_the_cell(write: Write, lint: Lint) -> None:
    write("a.ipynb", training())
    [result] = json.loads(lint(".", "--output-format", "sarif")[1])["runs"][0]["results"]
    [location] = result["locations"]
    assert location["physicalLocation"]["region"] == {"startLine": 1, "startColumn": 1}
    assert location["logicalLocations"] == [{"fullyQualifiedName": "cell 4:5:5", "kind": "cell"}]
    assert result["message"]["text"].startswith("cell 4:5:5: `optimizer.step()`")
    out = lint(".", "--output-format", "github")[1]
    assert "file=a.ipynb,line=1,col=1,endLine=1,endColumn=1::a.ipynb:cell 4:5:5: ACC301 " in out


def test_suppressions_in_cells(write: Write, lint: Lint) -> None:
    write("a.ipynb", training("  # noqa: ACC301"))
    assert lint(".")[:2] == (0, "Nothing found.\n")
    write("b.ipynb", notebook(markdown(), SETUP, code("x = 1", "y = 2  # noqa: ACC301")))
    assert "b.ipynb:cell 3:2:8: ACC001 warning" in lint(".", "--output-format", "concise")[1]


@pytest.mark.parametrize("style", [{"indent": 1, "ensure_ascii": False}, {"indent": 2}, {"indent": "\t"}, {}])
def test_suppressions_are_added_to_cells_and_nothing_else_changes(write: Write, lint: Lint, style: dict[str, Any]) -> None:
    document = json.loads(training())
    document["cells"][0]["source"] = ["# Ünïcode"]
    path = write("a.ipynb", json.dumps(document, **style) + "\n")
    assert lint("a.ipynb", "--add-ignore=on purpose")[:2] == (0, "Added 1 suppression in 1 file.\n")
    document["cells"][3]["source"][4] = "    optimizer.step()  # accumlint: ignore[ACC301] on purpose\n"
    assert path.read_text(encoding="utf-8") == json.dumps(document, **style) + "\n"
    assert lint(".")[:2] == (0, "Nothing found.\n")


def test_a_notebook_that_jupyter_did_not_write_is_not_edited(write: Write, lint: Lint) -> None:
    data = training().replace(b'"metadata": {}', b'"metadata":  {}', 1)
    path = write("a.ipynb", data)
    status, _, err = lint("a.ipynb", "--add-ignore", "")
    assert (status, path.read_bytes()) == (2, data)
    assert "a.ipynb: not changed: it is not written as Jupyter writes notebooks" in err


def test_standard_input(lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(training())))
    assert lint("-", "--stdin-filename", "n.ipynb", "--output-format", "concise")[1].startswith("n.ipynb:cell 4:5:5: ACC301")


def test_found_in_folders_and_kept_in_the_cache(write: Write, lint: Lint) -> None:
    write("notes/a.ipynb", training())
    write("notes/.ipynb_checkpoints/a-checkpoint.ipynb", training())
    write("notes/b.ipynb", notebook(code("print(1)")))
    assert lint(".", "--show-files")[1] == "notes/a.ipynb\nnotes/b.ipynb\n"
    for known in (0, 1):
        status, out, err = lint(".", "-v", "--output-format", "concise")
        assert (status, out.count("notes/a.ipynb:cell 4:5:5: ACC301")) == (1, 1)
        assert f"2 files, {known} of them known" in err


def test_what_cannot_be_read(write: Write, lint: Lint) -> None:
    write("cut.ipynb", training()[:-20])
    write("syntax.ipynb", notebook(markdown(), code("x = 1"), code("%time 1", "y = = 2")))
    write("other.ipynb", notebook(SETUP, code(*LOOP), kernelspec={"language": "R"}))
    write("none.ipynb", notebook(markdown()))
    status, out, _ = lint("cut.ipynb", "syntax.ipynb", "other.ipynb", "none.ipynb", "--output-format", "concise")
    lines = training()[:-20].count(b"\n") + 1
    assert status == 1
    assert out.splitlines()[0].startswith(f"cut.ipynb:{lines}:")
    assert "ACC000 error not a Jupyter notebook: not valid JSON: " in out.splitlines()[0]
    assert out.splitlines()[1] == "syntax.ipynb:cell 3:2:5: ACC000 error syntax error: invalid syntax"
    assert out.splitlines()[2] == "Found 2 errors in 2 files."


def test_a_broken_notebook_without_training_is_passed_over_in_a_folder(write: Write, lint: Lint) -> None:
    write("a.ipynb", "{")
    assert lint(".")[:2] == (0, "Nothing found.\n")


def test_sources_that_are_one_string(write: Write, lint: Lint) -> None:
    document = json.loads(training())
    for cell in document["cells"]:
        cell["source"] = "".join(cell["source"])
    write("a.ipynb", json.dumps(document))
    assert "a.ipynb:cell 4:5:5: ACC301" in lint(".", "--output-format", "concise")[1]


def test_show(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("a.ipynb", training())
    assert run(["show", "a.ipynb"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a.ipynb:cell 4:2\n")
    assert "4:5  optimizer.step()" in out
    assert "`accum` (line 3 of cell 4)" in out


def test_messages_name_lines_of_cells(write: Write, lint: Lint) -> None:
    body = code(
        "for i, (x, y) in enumerate(loader):",
        "    F.cross_entropy(model(x), y).backward()",
        "    if (i + 1) % accum == 0:",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "        for p in model.parameters():",
        "            p.grad.div_(accum)",
        "        optimizer.step()",
        "        optimizer.zero_grad()",
    )
    write("a.ipynb", notebook(SETUP, body))
    out = lint(".", "--select", "ACC308", "--output-format", "concise")[1]
    assert "`p.grad.div_(accum)` in line 6 of cell 2" in out
