"""`accumlint rule`."""

from __future__ import annotations

import json

import pytest

from accumlint.cli import run
from accumlint.rule import catalogue


def test_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rule", "acc001"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# unused-suppression (ACC001)\n\nSeverity: warning.")
    assert "## When it is silent" in out


def test_by_name_and_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rule", "unused-suppression", "ACC000"]) == 0
    out = capsys.readouterr().out
    assert out.index("(ACC001)") < out.index("(ACC000)")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rule", "ACC000", "--output-format", "json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert (page["code"], page["severity"]) == ("ACC000", "error")
    assert run(["rule", "--all", "--output-format", "json"]) == 0
    assert [each["code"] for each in json.loads(capsys.readouterr().out)] == list(catalogue())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name a rule, as in `accumlint rule ACC101`, or give --all."),
        (["ACC00"], "shows whole codes, not `ACC00`; it begins ACC000, ACC001"),
        (["unused-supression"], "did you mean `unused-suppression`?"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert run(["rule", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("code", list(catalogue()))
def test_every_page_has_its_sections(code: str) -> None:
    page = catalogue()[code].page
    sections = ["What it does", "Why is this bad?", "Example", "How it is measured", "When it is silent", "References"]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == sections
    assert "Use instead:" in page
    assert catalogue()[code].summary.endswith(".")
