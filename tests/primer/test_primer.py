"""The primer's lists are sound; where the checkouts are, what is found in them is what is listed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accumlint.rule import catalogue
from tests.primer.compare import checkouts, difference, lint, precision
from tests.primer.lists import Row, findings, problems, repositories, write_findings

CHECKOUTS = os.environ.get("ACCUMLINT_PRIMER", "")
LEAST = 0.95  # of the errors are true

A = Row("a/b", "train.py", 10, "ACC301", "error", "true", "Steps every time.")
B = Row("a/b", "train.py", 30, "ACC301", "error", "false", "Gated by the engine.")
C = Row("A/c", "x/y.py", 5, "ACC202", "warning", "true", "Nothing divides.")
KNOWN = {"a/b": "0" * 40, "A/c": "1" * 40}


def test_the_lists_are_sound() -> None:
    assert problems(findings(), repositories(), catalogue()) == []


def test_most_listed_errors_are_true() -> None:
    verdicts = [row.verdict for row in findings() if row.severity == "error"]
    assert verdicts.count("true") >= LEAST * len(verdicts)


@pytest.mark.skipif(not CHECKOUTS, reason="ACCUMLINT_PRIMER names no folders with checkouts")
def test_what_is_found_is_what_is_listed() -> None:
    there = checkouts(map(Path, CHECKOUTS.split(os.pathsep)), repositories())
    assert there
    found = [row for name, path in there.items() for row in lint(name, path)]
    changed = difference(found, [row for row in findings() if row.repository in there])
    assert (changed.new, changed.vanished, changed.moved) == ([], [], [])


def test_new_vanished_and_moved_rows_are_told_apart() -> None:
    seen = A._replace(line=12, verdict="?", reading="")
    new = Row("a/b", "other.py", 1, "ACC301", "error")
    changed = difference([seen, new, C._replace(verdict="?", reading="", severity="error")], [A, B, C])
    assert changed.known == [C._replace(severity="error")]
    assert changed.new == [new]
    assert changed.vanished == [B]
    assert changed.moved == [(A, seen)]
    assert changed.current() == [new, A._replace(line=12), C._replace(severity="error")]
    assert not difference([A, B], [A, B])


def test_moved_rows_go_to_the_nearest_line() -> None:
    near, far = A._replace(line=28), A._replace(line=11)
    assert sorted(difference([near, far], [A, B]).moved) == [(A, far), (B, near)]


def test_precision_counts_what_has_been_read() -> None:
    unread = C._replace(line=7, verdict="?", reading="")
    assert [" ".join(line.split()) for line in precision([A, B, C, unread])] == [
        "errors 0.500 1 true, 1 false",
        "warnings 1.000 1 true, 0 false, 1 not read",
        "ACC202 1.000 1 true, 0 false, 1 not read",
        "ACC301 0.500 1 true, 1 false",
    ]


def test_the_list_is_written_sorted_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "findings.tsv"
    write_findings([C, B, A], path)
    assert findings(path) == [A, B, C]
    assert problems(findings(path), KNOWN, ["ACC202", "ACC301"]) == []
    path.write_text(path.read_text() + "too\tfew\n")
    with pytest.raises(ValueError, match=r"findings\.tsv:5: 2 columns instead of 7"):
        findings(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (A._replace(repository="no/where"), "the repository is not listed"),
        (A._replace(code="ACC999"), "no rule has this code"),
        (A._replace(severity="fatal"), "unknown severity"),
        (A._replace(path="/abs/train.py"), "not a path within the repository"),
        (A._replace(path="../train.py"), "not a path within the repository"),
        (A._replace(line=0), "not a line"),
        (A._replace(verdict="?"), "has not been read"),
        (A._replace(verdict="maybe"), "has not been read"),
        (A._replace(reading=" "), "says not why"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row: Row, said: str) -> None:
    [found] = problems([row], KNOWN, ["ACC301"])
    assert found.endswith(said)


def test_what_is_wrong_with_the_lists_is_said() -> None:
    codes = ["ACC202", "ACC301"]
    assert problems([B, A], KNOWN, codes) == ["the findings are not sorted"]
    assert problems([A, A], KNOWN, codes) == ["a finding is listed twice"]
    assert problems([], {"b/a": "0" * 40, "a/b": "1" * 40}, codes) == ["the repositories are not sorted"]
    assert problems([], {"a/b": "main"}, codes) == ["a/b: `main` is no commit"]
    assert problems([], {"ab": "0" * 40}, codes) == ["ab: not owner/name"]


def test_checkouts_are_found_by_their_names_and_linted(tmp_path: Path) -> None:
    loop = "def train(model, loader, optimizer, accum):\n    for x, y in loader:\n        (F.mse_loss(model(x), y) / accum).backward()\n"
    script = tmp_path / "a+b" / "lib" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(f"{loop}        optimizer.step()  # noqa: ACC301\n        optimizer.zero_grad()\n")
    (tmp_path / "un+known").mkdir()
    there = checkouts([tmp_path], KNOWN)
    assert there == {"a/b": tmp_path / "a+b"}
    assert lint("a/b", there["a/b"]) == [Row("a/b", "lib/train.py", 4, "ACC301", "error")]
