"""Which settings are answered otherwise, one world after the other, and which of them together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from accumlint.source.rehearsal.machine import Machine
from accumlint.source.rehearsal.state import DEEPEST_CALL
from accumlint.source.rehearsal.values import Key, Opaque
from accumlint.source.rehearsal.worlds import SETTLED, Answer

MOST_TOGETHER = 4  # settings that are answered otherwise in one world
MOST_CHAINED = 12  # worlds of several such settings


class Alternatives:
    """The worlds that are left to rehearse, each as the answers of the first or of a later one that are turned round.

    An if statement that only some answer leads to, as `elif` does, is decided otherwise together with that answer.
    """

    def __init__(self, first: Machine, answers: Iterable[Answer]) -> None:
        self.pending: list[tuple[Answer, ...]] = [(answer,) for answer in answers]
        self.chained: list[tuple[int, tuple[Answer, ...]]] = []  # by how deep in the calls the last one is asked
        self.seen = set(first.asked)  # ids of if statements
        self.answered = {answer.text for answer in first.world.answers.values()}
        self.taken = 0  # of those that are chained

    def take(self, idle: Container[Key]) -> tuple[Answer, ...] | None:
        """The answers that are turned round next; None where nothing is left."""
        while self.pending:
            answers = self.pending.pop(0)
            if answers[0].key not in idle:
                return answers
        if not self.chained or self.taken >= MOST_CHAINED:
            return None
        self.taken += 1
        return self.chained.pop(0)[1]

    def learn(self, answers: tuple[Answer, ...], other: Machine) -> None:
        """Notes the conditions that only the world of these answers has come to."""
        new = {node: asked for node, asked in other.asked.items() if node not in self.seen}
        found = [(depth, key) for depth, test in new.values() for key in _asked(test)]
        found += [
            (DEEPEST_CALL, key) for key, answer in other.world.answers.items() if answer.text not in self.answered
        ]  # what values hang on
        self.seen |= new.keys()
        self.answered |= {answer.text for answer in other.world.answers.values()}
        if len(answers) >= MOST_TOGETHER:
            return
        known = {answer.text for answer in answers}
        for depth, key in found:
            answer = other.world.answers.get(key)
            if answer is not None and answer.flips and answer.weight > SETTLED and answer.text not in known:
                known.add(answer.text)
                self.chained.append((depth, (*answers, answer)))
        self.chained.sort(key=lambda each: each[0])


def _asked(test: Opaque) -> Iterator[Key]:
    """The keys of what a test asks for."""
    if isinstance(test.negated, Opaque):
        yield from _asked(test.negated)
    elif test.conjunction:
        for part in test.conjunction[1:]:
            if isinstance(part, Opaque):
                yield from _asked(part)
    else:
        yield test.key
