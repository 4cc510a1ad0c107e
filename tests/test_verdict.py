"""What a run comes to, and the exit status."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accumlint.findings import Finding, Severity
from accumlint.trace import Place
from accumlint.verdict import REQUIREMENTS, Check, Measurement, RankEnd, State, Status, Topic, exit_status, judged

BOUNDARY = Check(Topic.BOUNDARY, State.CONFIRMED, "seen")
WEIGHTS = Check(Topic.WEIGHTS, State.VIOLATED, "wrong", codes=("ACC201",))
ERROR = Finding("ACC201", Place("train.py", 7), "wrong", severity=Severity.ERROR)
WARNING = replace(ERROR, severity=Severity.WARNING)
RIGHT = Measurement((BOUNDARY,), (), (), (RankEnd(0, 2, "updates"), RankEnd(1, 2, "updates")), wanted=2)


def test_a_confirmed_boundary_is_enough() -> None:
    assert exit_status(RIGHT) == 0
    assert judged(RIGHT).reason == ""


@pytest.mark.parametrize(
    "run",
    [
        replace(RIGHT, checks=(BOUNDARY, WEIGHTS), findings=(ERROR,)),
        replace(RIGHT, findings=(ERROR,)),
        replace(RIGHT, findings=(replace(ERROR, severity=None),)),
        replace(RIGHT, checks=(BOUNDARY, WEIGHTS)),  # a violation without a finding
        replace(RIGHT, checks=(BOUNDARY, replace(WEIGHTS, codes=()))),
        replace(RIGHT, checks=(BOUNDARY, replace(WEIGHTS, codes=("ACC201", "ACC202"))), findings=(WARNING,)),
        replace(RIGHT, findings=(ERROR,), failed=1),  # the finding explains the failure
        replace(RIGHT, findings=(ERROR,), problem="A rank hung."),
    ],
)
def test_errors_and_violations_fail(run: Measurement) -> None:
    assert exit_status(run) == 1


def test_warnings_fail_where_there_are_too_many() -> None:
    run = replace(RIGHT, checks=(BOUNDARY, WEIGHTS), findings=(WARNING, replace(WARNING, place=Place("train.py", 8))))
    assert [exit_status(run, max_warnings=limit) for limit in (None, 2, 1, 0)] == [0, 0, 1, 1]
    assert judged(run).reason == "But warned of (`--max-warnings 0` makes it fail): weight of a target."
    assert judged(run, max_warnings=1).reason == "There are more warnings (2) than --max-warnings allows (1)."


def test_a_script_that_fails_by_itself() -> None:
    run = replace(RIGHT, failed=7, findings=(WARNING,), problem="It ended early.")
    assert exit_status(run, max_warnings=0) == 2
    assert judged(run).reason == "The script failed by itself with exit status 7."


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (Measurement((), (), (), ()), "Nothing could be confirmed."),
        (replace(RIGHT, checks=(replace(BOUNDARY, state=State.NOT_OBSERVED),)), "Nothing could be confirmed."),
        (replace(RIGHT, checks=(Check(Topic.MEMORY, State.CONFIRMED, "m"),)), "Not observed, though required: window boundary."),
        (replace(RIGHT, problem="Rank 1 hung."), "Rank 1 hung."),
        (
            replace(RIGHT, ranks=(RankEnd(0, 2, "updates"), RankEnd(1, 1, "script"))),
            "The run ended early: rank 1 made 1 of 2 updates.",
        ),
    ],
)
def test_what_proves_nothing_never_passes(run: Measurement, reason: str) -> None:
    assert exit_status(run) == 3
    assert judged(run).reason == reason


@pytest.mark.parametrize("name", sorted(REQUIREMENTS))
def test_what_is_required_must_be_observed(name: str) -> None:
    required = frozenset({name})
    seen = tuple(Check(topic, State.CONFIRMED, "seen") for topic in REQUIREMENTS[name])
    unseen = tuple(replace(check, state=State.NOT_OBSERVED) for check in seen)
    assert exit_status(RIGHT, require=required) == 3
    assert exit_status(replace(RIGHT, checks=(BOUNDARY, *unseen)), require=required) == 3
    assert exit_status(replace(RIGHT, checks=(BOUNDARY, *seen)), require=required) == 0
    assert REQUIREMENTS[name][0].value in judged(RIGHT, require=required).reason


def test_an_unknown_requirement_is_an_error() -> None:
    with pytest.raises(KeyError):
        judged(RIGHT, require=frozenset({"speed"}))


def test_statuses_are_the_exit_statuses() -> None:
    assert [(status.value, str(status)) for status in Status] == [
        (0, "confirmed"),
        (1, "violated"),
        (2, "script failed"),
        (3, "not proved"),
    ]
