"""Numbers that a loss was scaled by are recognised as the counts of a window; the numbers here are chosen, not measured."""

from __future__ import annotations

from fractions import Fraction

import pytest

from accumlint.runtime.assemble.weights import Counts, explain, factors_of
from accumlint.weight import Quantity

UNITS = [3.0, 5.0, 2.0, 6.0]  # of four micro-batches; two ranks have two each


def counts(world: int = 1, k: int = 4) -> list[Counts]:
    if world == 1:
        return [Counts(each, 8.0, sum(UNITS), sum(UNITS), 0.0, 32.0, k, 4, 1) for each in UNITS]
    own = [8.0, 8.0, 8.0, 8.0] if world == 0 else [sum(UNITS[:2])] * 2 + [sum(UNITS[2:]) + 1] * 2
    return [Counts(each, 8.0, mine, sum(UNITS) + 1, 0.0, 16.0, 2, 2, 2) for each, mine in zip(UNITS, own, strict=True)]


K, N, NR, ALL, W, X = (
    Quantity.ACCUMULATION,
    Quantity.UNITS,
    Quantity.WINDOW_UNITS,
    Quantity.GLOBAL_UNITS,
    Quantity.WORLD,
    Quantity.INPUTS,
)


@pytest.mark.parametrize(
    ("divisors", "monomial"),
    [
        ([4.0] * 4, ((K, 1),)),
        ([16.0] * 4, ((NR, 1),)),  # 16 is K² as well: for a sum the count comes first
        (UNITS, ((N, 1),)),
        ([each * 4 for each in UNITS], ((N, 1), (K, 1))),
        ([8.0] * 4, ((X, 1),)),
        ([1.0] * 4, ()),
        ([7.0] * 4, None),
        ([3.0, 5.0, 2.0, 7.0], None),
    ],
)
def test_one_rank_and_a_sum(divisors: list[float], monomial: object) -> None:
    assert explain(divisors, counts(), mean=False) == monomial


@pytest.mark.parametrize(
    ("divisors", "monomial"),
    [
        ([17.0] * 4, ((ALL, 1),)),
        ([17.0 / 2] * 4, ((ALL, 1), (W, -1))),
        ([8.0, 8.0, 9.0, 9.0], ((NR, 1),)),
        ([16.0, 16.0, 18.0, 18.0], ((NR, 1), (W, 1))),
    ],
)
def test_two_ranks_and_a_sum(divisors: list[float], monomial: object) -> None:
    assert explain(divisors, counts(2), mean=False) == monomial


def test_a_mean_is_rather_divided_by_k_than_by_a_count_that_happens_to_be_as_large() -> None:
    alike = [Counts(4.0, 4.0, 16.0, 16.0, 0.0, 16.0, 4, 4, 1)] * 4
    assert explain([4.0] * 4, alike, mean=True) == ((K, 1),)
    assert explain([4.0] * 4, alike, mean=False) == ((N, 1),)


def test_a_short_window_keeps_the_k_it_is_divided_by() -> None:
    tail = [Counts(4.0, 4.0, 4.0, 4.0, 0.0, 4.0, 3, 1, 1)]
    (factors,) = factors_of([3.0], tail, mean=True)
    assert [(factor.quantity, factor.power, factor.value) for factor in factors] == [(K, -1, Fraction(3))]


def test_a_number_of_the_objective_is_a_constant_and_a_moving_one_unknown() -> None:
    (first, *_) = factors_of([2.0] * 4, counts(), mean=True)
    assert [(factor.quantity, factor.power, factor.value) for factor in first] == [(Quantity.CONSTANT, -1, Fraction(2))]
    (first, *_) = factors_of([2.0, 3.0, 7.0, 2.0], counts(), mean=True)
    assert [factor.quantity for factor in first] == [Quantity.UNKNOWN]


def test_equal_counts_on_all_ranks_are_the_global_count_over_the_ranks() -> None:
    equal = [Counts(each, 8.0, 8.0, 16.0, 0.0, 16.0, 2, 2, 2) for each in (3.0, 5.0, 2.0, 6.0)]
    assert explain([8.0] * 4, equal, mean=False) in {((ALL, 1), (W, -1)), ((X, 1),)}


def test_short_last_window_of_as_many_micro_batches_as_ranks_is_divided_by_its_size() -> None:
    tail = [Counts(5.0, 5.0, 10.0, 20.0, 0.0, 10.0, 4, 2, 2)] * 4
    assert explain([2.0] * 4, tail, mean=True) == ((K, 1),)
    full = [Counts(5.0, 5.0, 20.0, 40.0, 0.0, 20.0, 4, 4, 2)] * 8
    assert explain([2.0] * 8, full, mean=True) == ((W, 1),)
