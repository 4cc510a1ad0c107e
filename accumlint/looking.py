"""What the rules say of one file, as it stands and as the files that use it run it."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accumlint.judge import K, judge_rehearsal
from accumlint.rule import catalogue
from accumlint.source.reading.nodes import walk
from accumlint.source.reading.program import program_of
from accumlint.source.rehearsal.rehearse import Rehearsal, rehearsals
from accumlint.source.rehearsal.through import asked_method, through_callers, through_meetings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accumlint.findings import Finding
    from accumlint.source.reading.library import Library
    from accumlint.source.reading.parse import Source
    from accumlint.source.reading.program import Joined
    from accumlint.source.rehearsal.rehearse import Options


@dataclass
class Look:
    """What is found while a file is looked at; whoever cuts that short keeps what there is."""

    findings: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)  # files and folders (with a separator at the end) that it rests on
    asks: list[str] = field(default_factory=list)  # names for whose callers one must look, for models are made there
    methods: list[Joined] = field(default_factory=list)  # those for whose callers one must look even where no import leads to them
    left_to: list[str] = field(default_factory=list)  # callers (files, or folders with all that is in them) that are linted themselves
    gave_up: bool = False
    cut_short: bool = False  # more may be found by looking longer
    _seen: set[tuple[str, str, int, int]] = field(default_factory=set)
    _epochs: list[Rehearsal] = field(default_factory=list)  # those of functions of one epoch that others are seen to call

    def at(self, source: Source, options: Options, library: Library | None) -> None:
        """Judges every training loop that the file leads to."""
        traced = False
        try:
            program = program_of(source, library)
            self.followed += program.asked
            for rehearsal in rehearsals(program, options):
                self._judge(rehearsal)
                traces = rehearsal.traces(K)
                traced = traced or bool(traces)
                self.gave_up |= bool(rehearsal.limits) or any(trace.limits or not trace.followed for trace in traces)
                self.asks += filter(None, [rehearsal.asks_callers])
                self.methods += filter(None, [asked_method(rehearsal)])
                rehearsal.end()
                if library is not None and rehearsal.is_one_epoch:
                    self._of_every_epoch(source.path, rehearsal, library)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a bug here must not keep the rest of a tree from being linted
            self._failed(error)
        self.gave_up |= not traced and "backward" in source.text
        if not traced and library is not None:
            self.asks += _parts_of_loops(source.tree)

    def _of_every_epoch(self, path: str, rehearsal: Rehearsal, library: Library) -> None:
        """Judges what one pass leaves to the next; where a file that imports this one calls it, that one tells how often, if it can."""
        use = library.callers.of(path, [rehearsal.asks_callers])
        self.followed += use.asked
        if any(library.callers.mentions(each, f"{rehearsal.function}(") for each in use.starts):
            self._epochs.append(rehearsal)
        else:
            self._judge(rehearsal.of_two_epochs())

    def from_callers(self, path: str, options: Options, library: Library, is_linted: Callable[[str], bool]) -> None:
        """Judges what those who use the file do with it, and keeps what is found in it; callers that are linted anyway are left to that."""
        try:
            use = library.callers.of(path, self.asks)
            self.followed += use.asked
            self.left_to += filter(is_linted, use.starts)
            starts = [each for each in use.starts if not is_linted(each)]
            reached = False
            for through in through_callers(path, starts, library, options, self.followed):
                for rehearsal in through.rehearsals:
                    self._judge(rehearsal, path)
                reached = reached or through.reaches
            for epoch in () if reached or self.left_to else self._epochs:
                self._judge(epoch.of_two_epochs())
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            self._failed(error)

    def from_meetings(self, options: Options, library: Library) -> None:
        """Judges what those do with a method of the file who call it on an object that comes from a registry."""
        try:
            for method in self.methods:
                for through in through_meetings(method, library, options, self.followed):
                    for rehearsal in through.rehearsals:
                        self._judge(rehearsal, method.path)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            self._failed(error)

    def _judge(self, rehearsal: Rehearsal, path: str = "") -> None:
        """Keeps the findings of a rehearsal, or those among them that stand in one file."""
        for finding in judge_rehearsal(rehearsal, catalogue().values()):
            if finding.key not in self._seen and path in {"", finding.place.path}:
                self._seen.add(finding.key)
                self.findings.append(finding)

    def _failed(self, error: Exception) -> None:
        self.gave_up = True
        self.warnings.append(f"internal error, please report it: {type(error).__name__}: {error} ({_where(error)})")


def _parts_of_loops(tree: ast.Module) -> Iterator[str]:
    """The functions and classes of a file that do part of what a loop of another file makes whole."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            called = {each.func.attr for each in walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)}
            if called & {"backward", "step"}:
                yield node.name


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace is not None else "nowhere"
