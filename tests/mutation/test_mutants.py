"""Mistakes made mechanically in correct scripts are found, where a run of them shows that they matter.

A mutant counts when its run ends with other parameters or reduces other buckets than the script it was made from, or
raises or hangs (`effects.json`, written by `python -m tests.mutation.effects`), and, where the script does not
accumulate, when the mistake is one for every training loop. It is found when accumlint reports an
error or a warning that the script itself had not. `python -m tests.mutation.test_mutants` prints the ones that are not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest

from accumlint.config import Settings
from accumlint.findings import Confidence, Severity
from accumlint.linter import lint_data
from tests.mutation.bases import Base, bases, key
from tests.mutation.effects import NONE, PLAIN, table
from tests.mutation.operators import EVERY_LOOP, OPERATORS

SHARE = 0.95

# Changes that show in a run and are no mistake that a rule could name, by operator and script; each with its reason.
NO_MISTAKE: dict[tuple[str, str], str] = {}


class Outcome(NamedTuple):
    """One mutant that counts, and the codes that it was found by."""

    base: Base
    operator: str
    line: int
    codes: tuple[str, ...]


def reported(text: str) -> Counter[str]:
    """The codes of errors and warnings, by how often they are reported."""
    examined, _ = lint_data("-", text.encode(), Settings())
    return Counter(
        each.code
        for each in examined.findings
        if each.confidence is Confidence.HIGH and each.severity is not None and each.severity >= Severity.WARNING
    )


def judged(base: Base) -> list[Outcome]:
    """The mutants of one script that have an effect."""
    effects = table()
    plain = effects.get(key(base.text)) == PLAIN
    counting = [
        each
        for each in base.mutants
        if effects.get(key(each.text), NONE) != NONE
        and not (plain and each.operator not in EVERY_LOOP)
        and (each.operator, base.name) not in NO_MISTAKE
    ]
    before = reported(base.text) if counting else Counter()
    return [Outcome(base, each.operator, each.line, tuple(sorted(reported(each.text) - before))) for each in counting]


def outcomes() -> list[Outcome]:
    with ProcessPoolExecutor(2) as pool:
        return [each for found in pool.map(judged, bases(), chunksize=4) for each in found]


def shares(those: list[Outcome], name: str) -> Iterator[str]:
    """A line for each operator or rule: how many of its mutants were found, and by which codes."""
    groups = sorted({_group(each, name) for each in those})
    for group in groups:
        members = [each for each in those if _group(each, name) == group]
        found = sum(bool(each.codes) for each in members)
        by = Counter(code for each in members for code in each.codes)
        codes = " ".join(f"{code}:{count}" for code, count in by.most_common(6))
        yield f"{group:<30} {found:>4} of {len(members):<4} {found / len(members):>4.0%}   {codes}"


def _group(outcome: Outcome, name: str) -> str:
    return outcome.operator if name == "operator" else outcome.base.rule


def summary(those: list[Outcome]) -> str:
    found = sum(bool(each.codes) for each in those)
    lines = [f"{found} of {len(those)} mutants found, {found / max(len(those), 1):.1%}", "", "by operator", *shares(those, "operator")]
    return "\n".join([*lines, "", "by rule of the script that the mistake was made in", *shares(those, "rule")])


@pytest.fixture(scope="module")
def all_outcomes() -> list[Outcome]:
    return outcomes()


def test_mutants_are_found(all_outcomes: list[Outcome]) -> None:
    print(summary(all_outcomes))
    assert sum(bool(each.codes) for each in all_outcomes) >= SHARE * len(all_outcomes)


def test_every_operator_makes_mutants_that_count(all_outcomes: list[Outcome]) -> None:
    assert {each.operator for each in all_outcomes} == set(OPERATORS)


def test_the_effects_are_known() -> None:
    effects = table()
    ours = [base for base in bases() if not base.name.startswith("cases/")]  # those change without a commit of this project
    texts = {key(mutant.text) for base in ours for mutant in base.mutants}
    unknown = len(texts - effects.keys())
    assert unknown <= len(texts) // 50, "run `python -m tests.mutation.effects`"


def main() -> int:
    those = [each for each in outcomes() if len(sys.argv) < 2 or sys.argv[1] in f"{each.base} {each.operator}"]
    print(summary(those))
    for each in those:
        if not each.codes:
            print(f"missed: {each.base}:{each.line} {each.operator}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
