"""Which ranks share a row: with many of them, those that agree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

FEW = 8  # as many ranks are shown one by one, and so many rows are shown of more
MAX_LABEL = 14

Member = TypeVar("Member")


class Grouping(Protocol):
    """Puts the rows of ranks into groups; `alike` gives what must be equal in a group."""

    def __call__(self, members: Sequence[Member], alike: Callable[[Member], Hashable], /) -> list[list[Member]]: ...


def every_rank(members: Sequence[Member], alike: Callable[[Member], Hashable], /) -> list[list[Member]]:
    """A group a rank."""
    return [[member] for member in members]


def folded(members: Sequence[Member], alike: Callable[[Member], Hashable], /) -> list[list[Member]]:
    """A group for all that agree, in the order of their lowest rank; where many differ, the last group holds what is left."""
    if len(members) <= FEW:
        return every_rank(members, alike)
    groups: dict[Hashable, list[Member]] = {}
    for member in members:
        groups.setdefault(alike(member), []).append(member)
    found = list(groups.values())
    if len(found) <= FEW:
        return found
    largest = max(range(len(found)), key=lambda at: len(found[at]))
    others = [at for at in range(len(found)) if at != largest]
    kept = sorted([largest, *others[: FEW - 2]])
    rest = [member for at, group in enumerate(found) if at not in kept for member in group]
    return [*(found[at] for at in kept), rest]


def label(ranks: Iterable[int]) -> str:
    """Ranks as people write them: `0-2, 5`; where that gets long, how many there are."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    count = sum(run[-1] - run[0] + 1 for run in runs)
    return text if len(text) <= MAX_LABEL else f"{count} ranks"


def named(ranks: Sequence[int]) -> str:
    """The same with its noun: `rank 5`, `ranks 0-2`, `30 ranks`."""
    text = label(ranks)
    if text.endswith("ranks"):
        return text
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
