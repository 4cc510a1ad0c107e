"""Numbers as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby

CLOSE = 1e-6  # relative: what float32 leaves of a coefficient
MAX_UNIT, MAX_NUMERATOR, MAX_DENOMINATOR = 100_000, 16, 512
MAX_RUNS, MAX_SHORT = 6, 6
LARGE = 1e15  # from here on not every digit of a float is meant

Spell = Callable[[float], str]


def number(value: float) -> str:
    """Six digits at most; whole numbers and short decimals in full."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < LARGE):
        return str(int(value))
    short = f"{value:.15g}"
    if len(short) <= MAX_SHORT:
        return short
    if math.isfinite(value) and not 0.1 <= abs(value) < 1e6:
        return scientific(value)
    return f"{value:.6g}"


def scientific(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def digits(value: float) -> str:
    """Four digits, for norms."""
    return f"{value:.4g}"


@lru_cache(maxsize=4096)
def coefficient(value: float) -> str:
    """The weight of a target: a fraction with a small numerator where it is one, such as 1/8, else a decimal number."""
    if not math.isfinite(value) or value == 0 or abs(value) >= LARGE:
        return number(value)
    size, sign = abs(value), "-" if value < 0 else ""
    if size > 0.5 and _close(round(size), size):
        return f"{sign}{round(size)}"
    for over in range(1, MAX_NUMERATOR + 1):
        under = round(min(over / size, LARGE))
        if 1 < under <= (MAX_UNIT if over == 1 else MAX_DENOMINATOR) and _close(over / under, size):
            return f"{sign}{over}/{under}"
    return number(value)


def _close(near: float, value: float) -> bool:
    return abs(near / value - 1) <= CLOSE


def run(values: Sequence[float | None], spell: Spell) -> str:
    """Numbers in order, alike neighbours told once: `0 ×7, 2`; of many different ones, from which to which."""
    runs = [(text, len(list(group))) for text, group in groupby(values, lambda value: "?" if value is None else spell(value))]
    if len(runs) > MAX_RUNS:
        return span(values, spell)
    return ", ".join(f"{text} ×{count}" if count > 2 else ", ".join([text] * count) for text, count in runs)


def span(values: Iterable[float | None], spell: Spell) -> str:
    """From the least to the largest of the numbers that are known, "" where none is."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    strange = next((value for value in known if math.isnan(value)), None)
    if strange is not None:
        return "nan"
    low, high = spell(min(known)), spell(max(known))
    return low if low == high else f"{low} to {high}"


def count(many: int, noun: str) -> str:
    return f"{many} {noun}" if many == 1 else f"{many} {noun}s"
