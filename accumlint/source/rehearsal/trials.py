"""Which open conditions make no difference to what is judged, found by answering many of them otherwise at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from accumlint.source.rehearsal.alike import alike
from accumlint.source.rehearsal.machine import Machine
from accumlint.source.rehearsal.record import Expected
from accumlint.source.rehearsal.values import Key
from accumlint.source.rehearsal.worlds import Answer, World
from accumlint.trace import Trace

FEW = 2  # fewer are rehearsed one by one
COST = 5  # times the first world's steps that are spent on rehearsals which many settings share


@dataclass
class Trials:
    """Rehearsals that are compared with that of the first world, and end where they part from it."""

    run: Callable[[World, Expected], Machine | None]
    show: Callable[[Machine], list[Trace]]
    first: Machine
    default: list[Trace]  # what the first world shows
    spent: int = 0  # steps

    def without_effect(self, doubtful: list[Answer]) -> set[Key]:
        """Those of the conditions that change nothing, as far as a bounded number of steps can tell."""
        found: set[Key] = set()
        pending = [doubtful]
        while pending and self.spent < COST * self.first.steps:
            several = pending.pop()
            if len(several) < FEW:
                continue
            expected = Expected(self.first.recorder.looks)
            other, asked = self._answered_otherwise(several, expected)
            if other is None:
                culprit = self._culprit(asked, expected.met) if asked else None
                pending += [[answer for answer in several if answer is not culprit]] if asked else []
            elif self._shows_the_same(other):
                found |= {answer.key for answer in asked}
                pending += [[answer for answer in several if answer not in asked]] if asked else []
            else:
                pending += [several[len(several) // 2 :], several[: len(several) // 2]]
        return found

    def _shows_the_same(self, other: Machine) -> bool:
        shown = self.show(other)
        other.let_go()
        return alike(self.default, shown)

    def _culprit(self, asked: list[Answer], met: int) -> Answer:
        """Which of several answers leads away from what happened in the first world after so many events."""
        last = asked[-1:]  # what was answered last has most likely led away
        while len(asked) > 1:
            half = last or asked[: len(asked) // 2]
            other, _ = self._answered_otherwise(half, Expected(self.first.recorder.looks, met))
            asked = half if other is None else asked[:-1] if last else asked[len(half) :]
            last = []
        return asked[0]

    def _answered_otherwise(self, several: list[Answer], expected: Expected) -> tuple[Machine | None, list[Answer]]:
        """The rehearsal with several answers turned round, and those that were asked in it, in that order."""
        of = self.first.world
        world = of.flipped(*several)
        other = self.run(world, expected)
        self.spent += expected.steps
        order = {key: at for at, key in enumerate(world.answers)}
        return other, sorted((answer for answer in several if answer.key in order), key=lambda answer: order[answer.key])
