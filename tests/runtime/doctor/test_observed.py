"""The experiment under verify: what it measures is what is known, and what is not as known is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from accumlint.report.doctor import render
from accumlint.runtime.doctor import examine, observed
from accumlint.runtime.doctor.outcome import EXPECTED
from accumlint.runtime.doctor.processes import NotRunError, scratch

pytest.importorskip("torch")

CASES = {case.name: case for case in EXPECTED}
Reports = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def reports() -> Reports:
    """What two ranks report of the mean of means."""
    with scratch() as folder:
        return observed.reports_of(folder, CASES["mean-of-means"], "gloo", "cpu", 120.0)


def test_the_mean_of_means_is_measured_as_known(reports: Reports) -> None:
    found = observed.judged(CASES["mean-of-means"], reports)
    assert found.codes == ("ACC201",)
    assert found.reductions == (1, 1, 1, 1)
    assert found.gradient_error == pytest.approx(0.0948, abs=1e-4)
    assert found.deviations == ()


def test_ranks_are_told_apart_though_their_group_was_destroyed(reports: Reports) -> None:
    assert [(report["rank"], report["world"], report["ended"]) for report in reports] == [(0, 2, "updates"), (1, 2, "updates")]


def test_coefficients_of_the_targets(reports: Reports) -> None:
    """1 / (2 n) in each micro-batch of n targets, before the ranks are averaged."""
    measured = [
        [loss["low"] for row in report["events"] if row["kind"] == "backward" for loss in row["numbers"]["losses"]] for report in reports
    ]
    assert measured == [pytest.approx([1 / 4, 1 / 12] * 2), pytest.approx([1 / 8, 1 / 16] * 2)]


def test_what_should_have_been_right(reports: Reports) -> None:
    found = observed.judged(CASES["sync-each"], reports)
    assert found.deviations == (
        "verify saw 1, 1, 1, 1 reductions in the windows of the ranks, not 2 in each",
        "verify reports ACC201, not ACC103",
        "verify measures a gradient error of 0.0948, not under 1e-15",
    )


def test_an_error_that_was_not_measured_deviates(reports: Reports) -> None:
    changed = copy.deepcopy(list(reports))
    for row in changed[0]["events"]:
        row["numbers"].pop("reference", None)
    found = observed.judged(CASES["mean-of-means"], changed)
    assert found.deviations == ("verify measures a gradient error of nan, not 0.0948 ± 0.0001",)


def test_internal_problems_are_told(reports: Reports) -> None:
    changed = copy.deepcopy(list(reports))
    changed[1]["troubles"].append("probe ddp: KeyError: x")
    assert observed.judged(CASES["mean-of-means"], changed).deviations == ("internal problem: probe ddp: KeyError: x",)


def test_ranks_that_fail_give_their_last_words() -> None:
    with scratch() as folder:
        (folder / "experiment.py").write_text("raise SystemExit('no interface')\n")
        with pytest.raises(NotRunError, match=r"sync-final under verify did not come to its end .*: no interface"):
            observed.reports_of(folder, CASES["sync-final"], "gloo", "cpu", 60.0)
    assert not folder.exists()


def test_in_the_report(reports: Reports) -> None:
    found = observed.judged(CASES["sync-each"], reports)
    run = examine.Experiment("gloo", "cpu", (), 0.0)
    told = examine.Examination({"found": [], "version": "2", "cuda": None, "backends": {}, "devices": []}, run, {}, (found,))
    document = json.loads(json.dumps(examine.document(told)))
    assert document["verify"][0]["codes"] == ["ACC201"]
    assert document["status"] == 1
    text = render(document, 100, color=False)
    assert "sync-each  1           0.09484         ACC201   ACC103    DEVIATES" in text
    assert "sync-each: verify reports ACC201, not ACC103" in text
