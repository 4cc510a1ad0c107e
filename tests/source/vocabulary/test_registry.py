"""Frameworks are found by themselves; what is told of them in a second place is the same."""

from __future__ import annotations

from accumlint.source.reading.sieve import FRAMEWORK_ENTRIES
from accumlint.source.vocabulary.registry import frameworks


def test_the_sieve_knows_the_entries_of_every_framework() -> None:
    told = {pair for module in frameworks() for pair in getattr(module, "SIEVE", ())}
    assert told == set(FRAMEWORK_ENTRIES)


def test_every_framework_says_in_its_first_line_what_it_is() -> None:
    for module in frameworks():
        name, colon, _ = (module.__doc__ or "").partition(":")
        assert colon, module.__name__
        assert "\n" not in name, module.__name__
