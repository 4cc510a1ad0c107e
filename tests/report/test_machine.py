"""The formats for programs: JSON and GitHub's workflow commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accumlint.findings import Applicability, Edit, Finding, Fix
from accumlint.report import render
from accumlint.rule import Rule
from accumlint.trace import Place

Rules = dict[str, Rule]
Sources = Callable[[str], str]
ROOT = Path("/project")


def test_json(finding: Finding, rules: Rules, sources: Sources) -> None:
    [item] = json.loads(render("json", [finding], rules, sources, width=80, color=True, root=ROOT))
    trace = item.pop("trace")
    assert item == {
        "code": "ACC101",
        "name": "backward-only-no-sync",
        "severity": "error",
        "confidence": "high",
        "message": finding.message,
        "filename": str(ROOT.absolute() / "train.py"),
        "location": {"row": 7, "column": 13},
        "end_location": {"row": 7, "column": 28},
        "cell": None,
        "noqa_row": 7,
        "url": None,
        "fix": None,
        "settings": {"args.ddp": "True"},
    }
    assert trace[3] == {
        "kind": "backward",
        "micro_batch": 0,
        "cell": None,
        "row": 7,
        "column": 13,
        "filename": str(ROOT.absolute() / "train.py"),
        "note": "backward, sync off, weight of a target 1/(3n)",
    }


def test_json_of_a_fix_and_of_another_noqa_line(finding: Finding, rules: Rules, sources: Sources) -> None:
    edit = Edit(Place("train.py", 4, 9, 4, 10), "new")
    found = replace(finding, fix=Fix(Applicability.UNSAFE, "Widen.", (edit,)), noqa_line=6)
    [item] = json.loads(render("json", [found], rules, sources, width=80, color=False, root=ROOT))
    edits = [{"content": "new", "location": {"row": 4, "column": 9}, "end_location": {"row": 4, "column": 10}}]
    assert item["fix"] == {"applicability": "unsafe", "message": "Widen.", "edits": edits}
    assert item["noqa_row"] == 6


def test_json_of_nothing(rules: Rules, sources: Sources) -> None:
    assert render("json", [], rules, sources, width=80, color=False, root=ROOT) == "[]\n"
    assert render("json-lines", [], rules, sources, width=80, color=False, root=ROOT) == ""


def test_json_lines(finding: Finding, rules: Rules, sources: Sources) -> None:
    text = render("json-lines", [finding, finding], rules, sources, width=80, color=False, root=ROOT)
    assert [json.loads(line)["code"] for line in text.splitlines()] == ["ACC101", "ACC101"]


def test_json_survives_half_a_surrogate_pair(finding: Finding, rules: Rules, sources: Sources) -> None:
    text = render("json", [replace(finding, message="\udc80")], rules, sources, width=80, color=False, root=ROOT)
    assert text.isascii()


def test_github(finding: Finding, rules: Rules, sources: Sources) -> None:
    assert render("github", [finding], rules, sources, width=80, color=True, root=ROOT) == (
        "::error title=accumlint (ACC101 backward-only-no-sync),file=train.py,line=7,col=13,endLine=7,endColumn=28::"
        "train.py:7:13: ACC101 `loss.backward()` runs inside `model.no_sync()`, but `model(x)` does not."
        "%0A  help: Put the forward inside `no_sync`.\n"
    )


def test_github_escapes_what_would_end_a_command(rules: Rules, sources: Sources) -> None:
    found = Finding("ACC307", Place("/project/a,b:c.py", 1, 1), "100 % of\n::error::it")
    text = render("github", [found], rules, sources, width=80, color=False, root=ROOT)
    assert "file=a%2Cb%3Ac.py," in text
    assert "100 %25 of%0A::error::it\n" in text
    assert text.startswith("::warning ")
    assert text.count("\n") == 1
