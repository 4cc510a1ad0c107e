"""The answers a rehearsal gives to what the code leaves open: numbers and conditions.

K is the same small number wherever its setting appears; a loader has 2K+1 batches; every other condition on a setting is
answered once and kept. What was learnt while rehearsing (which setting is K, which loader K divides) restarts the
rehearsal, so that the whole of it is consistent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from accumlint.source.reading.facts import names_k
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.values import Key, Root

OUTER_TURNS = 2
MOST_WORLDS = 10
MOST_STEPS = 40_000
MOST_STEPS_IN_ALL = 80_000
MOST_EVENTS = 4_000
SHORTEST = 2  # windows
SETTLED = -1  # weight of an answer that was given before the loop began


OTHER_HARDWARE = re.compile(r"(?<![a-z])(tpu|xla|hpu|npu|mlu)(?![a-z])", re.IGNORECASE)  # updates there have functions of their own


ALONE = re.compile(
    r"(^|[._])(local_?)?rank\W* (== -1|< 0|is None)|world_?size\W* (==|<=) 1$|(^|[._])(n_?gpus?|num_gpus)\W* (<=|==) [01]$", re.IGNORECASE
)  # one process; features come first, and several are one


TOGETHER = re.compile(r"(^|[._])((is|use)_?)?(distributed|multi_?gpus?|ddp)(\(\))?$", re.IGNORECASE)  # flags of several processes


AT_THE_END = re.compile(
    r"(^|[._])((is_)?(last|final)_(step|iter|iteration)|(should_|early_)?stop(ped|ping)?|stop_training|done|finished)$", re.IGNORECASE
)  # flags of a training that is over: one that goes on is rehearsed


EVALUATES = re.compile(
    r"(^|[._])((eval|evaluate|test)(_?only)?|only_?(eval|evaluate|test))$", re.IGNORECASE
)  # settings of a run that only evaluates


INCIDENTAL = re.compile(
    r"^(not )?(isinstance|issubclass|callable|hasattr|abs|len)\(|\b(exists|isfile|isdir|is_file|is_dir|startswith|endswith)\("
)  # tests of what a value looks like, and of files: seldom a choice of the user

is_incidental = found_in(INCIDENTAL)
is_together = found_in(TOGETHER)
is_elsewhere = found_in(OTHER_HARDWARE)
is_unlikely = found_in(re.compile("|".join(f"(?:{each.pattern})" for each in (ALONE, AT_THE_END, EVALUATES)), re.IGNORECASE))


class Restart(Exception):
    """Something was learnt that earlier statements should have known."""


class Differs(Exception):
    """The rehearsal shows something else than the one that it is compared with."""


class Alike(Exception):
    """The rehearsal shows the same for as long as it is compared."""


class OutOfSteps(Exception):
    """The rehearsal used up its budget."""


@dataclass
class Knowledge:
    """What is learnt over the rehearsals of one training loop; it only grows."""

    accumulations: dict[Key, Root] = field(default_factory=dict)
    proven: dict[Key, Root] = field(default_factory=dict)  # those that gate or bound, not only bear the name
    named: tuple[str, ...] = ()  # further names of K, from the configuration
    literal: int = 0  # micro-batches of a window whose size stands in place
    divisible: set[Key] = field(default_factory=set)  # lengths that K is asserted to divide
    lengths: set[Key] = field(default_factory=set)  # numbers that bound a loop over data
    told: set[tuple[str, str]] = field(default_factory=set)  # what has begun the rehearsal anew, as it is spelled
    _names: dict[str, bool] = field(default_factory=dict)  # whether each is one of K

    def learn_accumulation(self, root: Root) -> None:
        """A setting that gates an update or bounds the micro-loop is K."""
        if root.key not in self.proven:
            again = any(root.text == one.text for one in self.proven.values())
            self.proven[root.key] = root
            if again:  # computed anew in every turn
                self.accumulations.setdefault(root.key, root)
                return
            new = root.key not in self.accumulations
            self.accumulations.setdefault(root.key, root)
            if new or any(self.is_other_setting(one) for one in self.accumulations.values()):
                raise Restart(root.text)

    def learn_engine(self, root: Root) -> None:
        """The K of an engine whose configuration lies elsewhere."""
        if root.key not in self.proven:
            self.proven[root.key] = root
            self.accumulations.setdefault(root.key, root)
            raise Restart(root.text)

    def is_other_setting(self, root: Root) -> bool:
        """Whether a number that is K by its name only stands beside the real one as a setting of its own."""
        if not self.proven or root.key in self.proven or root.kind == "length":
            return False
        return all(_siblings(root, one) for one in self.proven.values())

    def learn_divisible(self, root: Root) -> None:
        self._learn("divisible", self.divisible, root)

    def learn_length(self, root: Root) -> None:
        self._learn("length", self.lengths, root)

    def _learn(self, what: str, known: set[Key], root: Root) -> None:
        if root.key not in known:
            known.add(root.key)
            if (what, root.text) not in self.told:  # else it is computed anew in every turn
                self.told.add((what, root.text))
                raise Restart(root.text)

    def is_accumulation_name(self, text: str) -> bool:
        known = self._names.get(text)
        if known is None:
            known = self._names[text] = self._names_k(text)
        return known

    def _names_k(self, text: str) -> bool:
        if " + " in text or " - " in text:
            return False  # a number beside K is not K
        last = text.rstrip("()]'\"").rsplit(".", 1)[-1].rsplit("[", 1)[-1].strip("'\"")
        if last.isdigit() and "[" in text:
            return self.is_accumulation_name(text.rsplit("[", 1)[0])  # one K of a list of them
        return names_k(last) or last in self.named


def _siblings(one: Root, other: Root) -> bool:
    """Two settings of the same object, or two named constants of different value: surely not the same number."""
    if one.kind == other.kind == "constant":
        return one.text != other.text and one.default != other.default
    return one.key[0] == other.key[0] in {".", "[]"} and one.key[1] == other.key[1] and one.key[2:] != other.key[2:]


def _is_equality(key: Key) -> bool:
    """Whether a condition asks if some value is one constant."""
    return len(key) == 4 and key[:2] == ("compare", "==") and isinstance(key[3], tuple) and key[3][0] == "known"


@dataclass(frozen=True)
class Answer:
    """How an unknown condition was answered. `flips` says that the other answer deserves a world of its own."""

    key: Key
    text: str
    holds: bool
    flips: bool
    weight: int = 0

    @property
    def is_incidental(self) -> bool:
        """Whether no event hangs on it, and no choice of the user: then there is no world for the other answer."""
        return self.weight <= 0 and is_incidental(self.text)


@dataclass
class World:
    """One consistent set of answers."""

    k: int
    knowledge: Knowledge
    forced: dict[Key, bool] = field(default_factory=dict)
    answers: dict[Key, Answer] = field(default_factory=dict)
    passes_raises: bool = False  # where every run would raise in a helper without events, what that helper gives is unknown instead

    def flipped(self, *answers: Answer) -> World:
        """The world in which these answers are the other way."""
        return World(self.k, self.knowledge, {answer.key: not answer.holds for answer in answers}, passes_raises=self.passes_raises)

    @property
    def batches(self) -> int:
        """Of an epoch: full windows and a tail. With windows of two it makes four updates, with which no period falls in step."""
        longest = max(self.k, self.knowledge.literal)
        return 2 * longest + 1 if longest > SHORTEST else 3 * longest + 1

    @property
    def period(self) -> int:
        """An unknown period, such as that of checkpoints: coprime to K and to the length of a loader."""
        return 2 * self.k - 1

    def number(self, root: Root) -> int | None:
        """The number that an open setting has in this world."""
        if root.key in self.knowledge.accumulations:
            return 2 * self.k - 1 if self.knowledge.is_other_setting(root) else self.k
        if root.key in self.knowledge.divisible:
            return 2 * max(self.k, self.knowledge.literal)
        if root.kind == "length" or root.key in self.knowledge.lengths:
            return self.batches
        return root.default

    def decide(self, key: Key, text: str, preference: bool, *, flips: bool, weight: int = 0) -> bool:
        """The answer to a condition: the one given before, the one this world is about, or the preferred one."""
        given = self.answers.get(key)
        if given is not None:
            if flips and given.flips and weight > given.weight:  # more hangs on it here than where it was asked first
                self.answers[key] = replace(given, weight=weight)
            return given.holds
        if self._is_excluded(key):
            self.answers[key] = Answer(key, text, False, False, weight)
            return False
        elsewhere = is_elsewhere(text)
        holds = self.forced.get(key, preference and not (elsewhere or is_unlikely(text)))
        self.answers[key] = Answer(key, text, holds, flips and not elsewhere, weight)
        return holds

    def _is_excluded(self, key: Key) -> bool:
        """Whether a value was found to equal another constant: `mode == "test"` after `mode == "train"` or `mode in ["train"]`."""
        if not _is_equality(key) or self.forced.get(key):
            return False
        other = self.constant(key[2])
        return (other is not None and other != key[3][1]) or any(
            (key[3][1] in one[2][1:]) is not holds
            for one, holds in self._settled()
            if len(one) == 3 and one[0] == "in" and one[1] == key[2] and one[2][:1] == ("items",) and (holds or key[3][1] in one[2][1:])
        )

    def constant(self, key: Key) -> str | None:
        """The constant that a value was found to equal, as it is written."""
        return next((one[3][1] for one, holds in self._settled() if holds and _is_equality(one) and one[2] == key), None)

    def _settled(self) -> Iterator[tuple[Key, bool]]:
        yield from self.forced.items()
        yield from ((one.key, one.holds) for one in self.answers.values())

    def settle(self) -> None:
        """What was answered so far comes last when worlds are chosen."""
        self.answers = {key: replace(answer, weight=SETTLED) for key, answer in self.answers.items()}

    def settings(self) -> tuple[tuple[str, str], ...]:
        """The answers as a person reads them, the forced ones first."""
        ordered = sorted(self.answers.values(), key=lambda answer: answer.key not in self.forced)
        return tuple((answer.text, "true" if answer.holds else "false") for answer in ordered if answer.flips)
