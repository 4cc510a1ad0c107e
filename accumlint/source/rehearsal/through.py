"""The training loops of a file as the files that use it run them: there models are wrapped, K is set and loaders are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from accumlint.source.reading.library import Library
from accumlint.source.reading.parse import Source, parse
from accumlint.source.reading.program import Joined, Program, program_of
from accumlint.source.rehearsal.rehearse import Options, Rehearsal, rehearsals

K = 3
USUAL = frozenset(
    "__call__ backward evaluate fit forward main run step test train training_step update validate".split()
)  # said of many things


@dataclass
class Through:
    """The program that starts at a caller of a file, and its rehearsals that may come through that file."""

    path: str
    program: Program
    rehearsals: list[Rehearsal]

    @property
    def reaches(self) -> bool:
        """Whether something of the file happens in them."""
        return any(map(self.comes_through, self.rehearsals))

    def comes_through(self, rehearsal: Rehearsal) -> bool:
        """Whether something of the file happens in a rehearsal."""
        return any(event.place.path == self.path for trace in rehearsal.traces(K) for event in trace.events)


def through_callers(path: str, starts: Iterable[str], library: Library, options: Options, asked: list[str]) -> Iterator[Through]:
    """What these callers make of a file, up to the first that comes through it; `asked` receives what this rests on."""
    for start in starts:
        through = _from(start, path, library, options, asked)
        if through is not None:
            yield through
            if through.reaches:
                return


def _from(start: str, path: str, library: Library, options: Options, asked: list[str], joined: Joined | None = None) -> Through | None:
    """The program that starts at a file, where it leads to another; None where it does not."""
    source = parse(library.leads.read(start), start)
    if not isinstance(source, Source):
        return None
    program = program_of(source, library, joined)
    asked += (each for each in program.asked if each != path)
    return Through(path, program, list(rehearsals(program, options, through=path))) if path in program.kept else None


def asked_method(rehearsal: Rehearsal) -> Joined | None:
    """The method that others call and give a model, perhaps without an import that would lead to it."""
    entry, owner = rehearsal.entry, rehearsal.owner
    if owner is None or entry is None or entry.name in USUAL or not rehearsal.asks_callers:
        return None
    return Joined(rehearsal.path, owner.name, entry.name)


def through_meetings(method: Joined, library: Library, options: Options, asked: list[str]) -> Iterator[Through]:
    """What those make of a method who call one of its name on an object that comes from a registry, or from anywhere."""
    use = library.callers.meeting(method.path, method.name, method.method)
    asked += use.asked
    found = (_from(start, method.path, library, options, asked, method) for start in use.starts)
    yield from (through for through in found if through is not None)
