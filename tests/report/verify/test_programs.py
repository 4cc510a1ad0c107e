"""The report of a run for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest

from accumlint import report
from accumlint.report.verify import FORMATS, render
from accumlint.rule import Rule
from accumlint.verdict import Check, Measurement, RankEnd, State, Topic, Update

Runs = Callable[..., Measurement]
Sources = Callable[[str], str]
ROOT = Path("/project")


def drawn(run: Measurement, rules: dict[str, Rule], sources: Sources, form: str = "json") -> str:
    return render(run, rules, sources, output_format=form, width=80, color=False, root=ROOT, interactive=False)


def test_json_holds_everything(wrong: Measurement, rules: dict[str, Rule], sources: Sources) -> None:
    report = json.loads(drawn(replace(wrong, problem="Ended early.", failed=3), rules, sources))
    assert set(report) == {field.name for field in fields(Measurement)} | {"version", "status", "verdict", "reason"}
    assert (report["status"], report["verdict"], report["reason"]) == (1, "violated", "Wrong: weight of a target.")
    assert (report["wanted"], report["problem"], report["failed"]) == (2, "Ended early.", 3)
    assert report["environment"]["nested"] == {"left": "out"}
    for check in report["checks"]:
        assert set(check) == {field.name for field in fields(Check)} | {"title"}
    weights = report["checks"][3]
    assert (weights["topic"], weights["title"], weights["state"]) == ("weights", "weight of a target", "violated")
    assert weights["numbers"] == {"low": 0.0625, "high": 0.25, "by_rank": [[0.25]]}
    for update in report["updates"]:
        assert set(update) == {field.name for field in fields(Update)} - {"path", "line"} | {"filename", "row"}
    assert report["updates"][0]["coefficients"] == [1 / 4, 1 / 12]
    assert (report["updates"][0]["filename"], report["updates"][0]["row"]) == ("/project/train.py", 10)
    for end in report["ranks"]:
        assert set(end) == {field.name for field in fields(RankEnd)}


def test_findings_are_the_linters_own(wrong: Measurement, rules: dict[str, Rule], sources: Sources) -> None:
    expected = {
        name: report.render(name, wrong.findings, rules, sources, width=80, color=False, root=ROOT)
        for name in ("json", "json-lines", "sarif", "github")
    }
    assert json.loads(drawn(wrong, rules, sources))["findings"] == json.loads(expected["json"])
    for form in ("json-lines", "sarif", "github"):
        assert drawn(wrong, rules, sources, form) == expected[form]
    assert "The window, as measured." in expected["sarif"]


def test_every_format_stands_without_anything(rules: dict[str, Rule], sources: Sources) -> None:
    for form in FORMATS:
        drawn(Measurement((), (), (), ()), rules, sources, form)


def test_numbers_that_json_lacks(right: Runs, rules: dict[str, Rule], sources: Sources) -> None:
    run = right(1, 1)
    numbers = {
        "nan": float("nan"),
        "half": Fraction(1, 2),
        "set": {2, 1},
        "state": State.CONFIRMED,
        "path": Path("a"),
        "none": None,
        3: -1e999,
    }
    check = Check(Topic.SUM, State.CONFIRMED, "s", numbers=numbers)  # type: ignore[arg-type]
    run = replace(run, checks=(check,), updates=(replace(run.updates[0], norm_before=float("inf"), path="", line=0),))
    report = json.loads(drawn(run, rules, sources), parse_constant=lambda name: pytest.fail(name))
    found = report["checks"][0]["numbers"]
    assert found == {"nan": "nan", "half": 0.5, "set": [1, 2], "state": "confirmed", "path": "a", "none": None, "3": "-inf"}
    assert (report["updates"][0]["norm_before"], report["updates"][0]["filename"], report["updates"][0]["row"]) == ("inf", None, None)


@pytest.mark.parametrize("form", ["json", "full"])
def test_size_grows_with_ranks_and_updates_alone(right: Runs, rules: dict[str, Rule], sources: Sources, form: str) -> None:
    sizes = {shape: len(drawn(right(*shape), rules, sources, form)) for shape in ((16, 8), (64, 8), (16, 32), (64, 32))}
    added = [sizes[64, 8] - sizes[16, 8], sizes[64, 32] - sizes[16, 32]]
    if form == "json":
        assert added[1] == pytest.approx(4 * added[0], rel=0.05)
        assert sizes[64, 32] < 4.1 * sizes[16, 32]
    else:
        assert max(added) < 1000  # ranks that agree share a row
