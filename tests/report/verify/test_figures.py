"""Numbers and ranks as people write them."""

from __future__ import annotations

import pytest

from accumlint.report.verify import figures
from accumlint.report.verify.grouping import folded, label, named


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.125, "1/8"),
        (1 / 24576, "1/24576"),
        (0.05000000074505806, "1/20"),  # as float32 has it
        (1.0, "1"),
        (0.9999999, "1"),
        (0.99999, "0.99999"),
        (2 / 3, "2/3"),
        (-0.25, "-1/4"),
        (8.0, "8"),
        (0.0, "0"),
        (0.09482934, "9.48e-02"),
        (1.1776123, "1.17761"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (5e-324, "4.94e-324"),
        (1e300, "1e+300"),
    ],
)
def test_coefficients(value: float, text: str) -> None:
    assert figures.coefficient(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(65536.0, "65536"), (7, "7"), (0.0625, "0.0625"), (1.5e-9, "1.50e-09"), (1.23456789e-3, "1.23e-03")]
)
def test_numbers(value: float, text: str) -> None:
    assert figures.number(value) == text


def test_runs_and_spans() -> None:
    assert figures.run((0, 0, 0, 2), figures.number) == "0 ×3, 2"
    assert figures.run((0, 0, 2), figures.number) == "0, 0, 2"
    assert figures.run((None, 0.5), figures.coefficient) == "?, 1/2"
    assert figures.run([1 / n for n in range(2, 66)], figures.coefficient) == "1/65 to 1/2"
    assert figures.span((3, None, 1), figures.number) == "1 to 3"
    assert figures.span((1.0, float("nan")), figures.number) == "nan"
    assert figures.span((), figures.number) == ""


def test_labels() -> None:
    assert label([5, 0, 1, 2]) == "0-2, 5"
    assert label(range(0, 64, 2)) == "32 ranks"
    assert [named([5]), named([0, 1]), named(list(range(0, 64, 2)))] == ["rank 5", "ranks 0-1", "32 ranks"]


def test_the_largest_group_keeps_its_row() -> None:
    members = list(range(100))
    groups = folded(members, lambda member: member if member < 20 else "alike")
    assert [len(group) for group in groups] == [1] * 6 + [80, 14]
    assert sorted(member for group in groups for member in group) == members
