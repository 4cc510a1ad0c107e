"""The training loops of a file as the files that use it run them: there models are wrapped, K is set and loaders are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from accumlint.source.reading.library import Library
from accumlint.source.reading.parse import Source, parse
from accumlint.source.reading.program import Program, program_of
from accumlint.source.rehearsal.rehearse import Options, Rehearsal, rehearsals

K = 3


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
        source = parse(library.leads.read(start), start)
        if not isinstance(source, Source):
            continue
        program = program_of(source, library)
        asked += (each for each in program.asked if each != path)
        if path in program.kept:
            through = Through(path, program, list(rehearsals(program, options, through=path)))
            yield through
            if through.reaches:
                return
