"""Joins the halves for `accumlint check`: files in, findings out."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache as memoised
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from accumlint.config import Configuration, Settings, shown
from accumlint.interest import interesting, parses, wraps
from accumlint.source.reading.files import Candidate, Unreadable, find, reason
from accumlint.source.reading.imports import Imports
from accumlint.source.reading.leads import Leads
from accumlint.source.reading.sieve import concerns

if TYPE_CHECKING:
    from accumlint.findings import Finding
    from accumlint.looking import Look
    from accumlint.source.cache import Cache, Result
    from accumlint.source.editing.ignores import Suppression
    from accumlint.source.reading.library import Library
    from accumlint.source.reading.notebook import Cell
    from accumlint.source.reading.parse import Problem, Source
    from accumlint.workers import Lost

SECONDS = 10  # of processor time for one file
SECONDS_FROM_CALLERS = 6
PATIENCE = 300  # on the clock, for a worker that does not react to that limit: a busy machine may be twenty times slower
WORTH_A_WORKER = 60_000  # bytes of training code
FEW = 20  # files named on a command line
NAMED = "!"  # marks what is only found in a file because it was named on the command line


class TimeUp(BaseException):
    """A file took too long. Not an Exception, so that nothing on the way up takes it for its own."""


class Linted(NamedTuple):
    """What is linted in one run: folders with all that is in them, and single files; absolute paths."""

    folders: tuple[str, ...] = ()
    files: frozenset[str] = frozenset()

    @classmethod
    def of(cls, arguments: Iterable[str]) -> Linted:
        paths = [os.path.abspath(each) for each in arguments]
        return cls(tuple(each for each in paths if os.path.isdir(each)), frozenset(paths))

    def holds(self, path: str) -> bool:
        """Whether a file, or a folder (with a separator at the end), is among it."""
        return path in self.files or any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in self.folders)


NOTHING = Linted()


class Job(NamedTuple):
    """A file that was read and must be looked at."""

    path: str  # absolute
    data: bytes
    settings: Settings
    root: str  # what paths in the payload are relative to
    linted: Linted = NOTHING  # with it


class Examined(NamedTuple):
    """What was found in a file before anything is selected or suppressed."""

    path: str
    settings: Settings
    findings: list[Finding]
    suppressions: list[Suppression]
    gave_up: bool = False
    cells: tuple[Cell, ...] = ()  # of a notebook


class Outcome(NamedTuple):
    """What a run over a tree found, before anything is selected or suppressed."""

    files: list[Candidate]
    examined: list[Examined]
    unreadable: list[Unreadable]
    warnings: list[str]
    cached: int
    contents: Mapping[str, bytes] = MappingProxyType({})  # what was not read from the disk, by path


def lint_file(path: str, settings: Settings | None = None) -> list[Finding]:
    """The findings of one file that a check of it alone reports, in this process and without the cache."""
    from accumlint.selection import Thresholds, report

    chosen = Configuration(fixed=settings or Settings())
    full = os.path.abspath(path)
    examined, _ = lint_data(full, read(full), chosen.of(os.path.dirname(full)))
    return report([examined], chosen, Thresholds()).findings


def lint_data(path: str, data: bytes, settings: Settings) -> tuple[Examined, list[str]]:
    """Everything that can be said of one file's content, in this process, and warnings; the path is absolute, or `-`."""
    _forget()
    job = Job(path, data, settings, os.getcwd())
    examined, warnings = _opened(job, examine(job))
    return examined or Examined(path, settings, [], []), warnings


def lint_paths(
    arguments: Sequence[str],
    configuration: Configuration,
    *,
    cache: Callable[[], Cache] | None = None,
    jobs: int = 1,
    force_exclude: bool = False,
) -> Outcome:
    """Everything that can be said of the files that the arguments mean. The cache is opened where it is of use."""
    _forget()
    run = _Run(cache, Linted.of(arguments), thrifty=len(arguments) > FEW)
    for found in find(arguments, configuration, force_exclude=force_exclude):
        if isinstance(found, Unreadable):
            run.unreadable.append(found)
        else:
            run.look_up(found)
    run.look_at(jobs)
    run.close()
    return Outcome(run.files, run.examined, run.unreadable, run.warnings, run.cached)


class _Run:
    """One run over a tree: what it knows already, and what remains to be looked at."""

    def __init__(self, open_cache: Callable[[], Cache] | None, linted: Linted, *, thrifty: bool) -> None:
        self._open_cache = open_cache
        self._linted = linted
        self._cache: Cache | None = None
        self._thrifty = thrifty
        self.files: list[Candidate] = []
        self.pending: list[tuple[Candidate, bytes, str]] = []
        self.examined: list[Examined] = []
        self.unreadable: list[Unreadable] = []
        self.warnings: list[str] = []
        self.cached = 0
        self._bare: list[Candidate] = []  # files of which the cache says that they hold nothing by themselves
        self._parts_changed = False  # whether a file changed that such files may hold a loop together with

    @property
    def cache(self) -> Cache | None:
        if self._cache is None and self._open_cache is not None:
            self._cache = self._open_cache()
        return self._cache

    @property
    def root(self) -> str:
        """What paths in payloads are relative to."""
        return self.cache.root if self.cache is not None else os.getcwd()

    def close(self) -> None:
        if self._cache is not None:
            self._cache.save()
            if self._cache.problem:
                self.warnings.append(self._cache.problem)

    def look_up(self, found: Candidate) -> None:
        """Takes what is known of a file; else reads it, and keeps it for later if it may hold something."""
        self.files.append(found)
        # A few named files are read before the cache is opened: most hold nothing, and reading them is cheaper.
        if (self._thrifty or not found.named) and self._known_by_time(found):
            return
        try:
            data = read(found.path)
        except OSError as error:
            self.unreadable.append(Unreadable(found.path, reason(error)))
            return
        extra = ""
        if not interesting(data, found):
            starts = leads(_roots(found.settings)).starts(found.path, data)
            self._parts_changed |= starts or b"backward" in data or found.path.endswith("__init__.py")
            if not starts and (not found.named or parses(data, found.path)):
                self._nothing_in(found, data)
                return
            extra = "" if starts else NAMED
        else:
            self._parts_changed = True
        cache = self.cache
        if cache is not None:
            mark = _mark(found) + extra
            if self._known(found, cache.same(found.path, found.status, mark, data)):
                return
        self.pending.append((found, data, extra))

    def _known_by_time(self, found: Candidate) -> bool:
        cache = self.cache
        if cache is None:
            return False
        if cache.is_bare(found.path):  # sieved only; a named file is parsed, too
            known = not (found.named or found.settings.wrappers) and self._known(found, cache.fresh(found.path, found.status, ""))
            self._bare += [found] if known else []
            return known
        mark = _mark(found)
        if not found.named:
            return self._known(found, cache.fresh(found.path, found.status, mark))
        return any(self._known(found, cache.fresh(found.path, found.status, each)) for each in (mark, mark + NAMED))

    def _nothing_in(self, found: Candidate, data: bytes) -> None:
        if not found.named and self.cache is not None:
            self.cache.unconcerned(found.path, found.status)
        elif self._thrifty and self.cache is not None:
            from accumlint.source.cache import Result

            self.cache.put(found.path, found.status, _mark(found), data, Result(None))

    def _known(self, found: Candidate, result: Result | None) -> bool:
        if result is None:
            return False
        if result.payload is not None:
            from accumlint.source.codec import CodecError

            if not all(map(self._linted.holds, result.payload.get("left_to", ()))):
                return False
            try:
                self._take(Job(found.path, b"", found.settings, self.root), result.payload)
            except (CodecError, KeyError, TypeError):
                return False  # a damaged cache costs time, nothing else
        self.cached += 1
        return True

    def look_at(self, jobs: int) -> None:
        """Rehearses and judges what is left."""
        if self._parts_changed:
            self._look_again()
        pending = [(found, self._job(found, data), extra) for found, data, extra in self.pending]
        for at, payload in _examine_all([job for _, job, _ in pending], jobs):
            found, job, extra = pending[at]
            self._take(job, payload)
            if self.cache is not None and payload["whole"]:
                from accumlint.source.cache import Result

                kept = payload if _says_something(payload) else None
                followed = tuple(os.path.join(job.root, each) for each in payload["followed"])
                self.cache.put(found.path, found.status, _mark(found) + extra, job.data, Result(kept, followed))

    def _job(self, found: Candidate, data: bytes) -> Job:
        return Job(found.path, data, found.settings, self.root, self._linted)

    def _look_again(self) -> None:
        """Files that hold nothing by themselves, but may with one that changed."""
        for found in self._bare:
            try:
                data = read(found.path)
            except OSError:
                continue
            if leads(_roots(found.settings)).starts(found.path, data):
                self.cached -= 1
                self.pending.append((found, data, ""))

    def _take(self, job: Job, payload: dict[str, Any]) -> None:
        examined, warnings = _opened(job, payload)
        self.warnings.extend(warnings)
        if examined is not None:
            self.examined.append(examined)


def _roots(settings: Settings) -> tuple[str, ...]:
    """The source roots that a configuration file names."""
    return settings.source_roots if settings.origin else ()


@memoised
def leads(roots: tuple[str, ...]) -> Leads:
    """Tells which files of a project are parts of training loops, in this run."""
    return Leads(Imports(roots))


@memoised
def library(roots: tuple[str, ...], wrappers: tuple[tuple[str, tuple[str, ...]], ...]) -> Library:
    """What was read of a project's other files, in this run."""
    from accumlint.source.reading.library import Library

    return Library(leads(roots), prunes=not wrappers)


def library_for(settings: Settings) -> Library:
    """The library that the files under these settings share."""
    return library(_roots(settings), settings.wrappers)


def _forget() -> None:
    """Begins a new run: files may have changed."""
    leads.cache_clear()
    library.cache_clear()
    _mark_of.cache_clear()
    for name in ("versions", "project_files"):
        module = sys.modules.get(f"accumlint.source.reading.{name}")
        if module is not None:
            module.forget()


def read(path: str) -> bytes:
    """The bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


def _mark(found: Candidate) -> str:
    """What the result of a file rests on beside its content."""
    return _mark_of(found.settings, os.path.dirname(found.path))


@memoised
def _mark_of(settings: Settings, folder: str) -> str:
    from accumlint.source.cache import digest
    from accumlint.source.reading.project_files import stamp

    own = repr((settings.objective, settings.accumulation_names, settings.wrappers, settings.source_roots))
    return digest(own.encode(), os.fsencode(stamp(folder)))


def _examine_all(pending: list[Job], jobs: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The payload of every file with its number; in several processes where that pays."""
    size = sum(len(job.data) for job in pending)
    useful = min(jobs, len(pending), size // WORTH_A_WORKER)
    if useful < 2:
        yield from ((at, examine(job)) for at, job in enumerate(pending))
        return
    import json

    import accumlint.rule
    from accumlint.workers import Lost, spread

    accumlint.rule.catalogue()  # imported once, before the workers are forked
    order = sorted(range(len(pending)), key=lambda at: -len(pending[at].data))
    for number, answer in spread(_examined_text, [pending[at] for at in order], useful, PATIENCE):
        at = order[number]
        yield at, _lost(pending[at], answer) if isinstance(answer, Lost) else json.loads(answer)


def _examined_text(job: Job) -> str:
    import json

    return json.dumps(examine(job))


def examine(job: Job) -> dict[str, Any]:
    """Everything that can be said of one file, as JSON values."""
    from accumlint.looking import Look
    from accumlint.source.editing.ignores import suppressions
    from accumlint.source.reading.parse import Problem, parse

    look = Look()
    held: list[Suppression] = []
    cells: tuple[Cell, ...] = ()
    try:
        with _uncollected(), _limited(SECONDS):
            parsed = parse(job.data, job.path)
            if isinstance(parsed, Problem):
                look.findings.append(_unreadable_file(parsed))
            else:
                held, cells = suppressions(parsed.text), parsed.cells
                _look(look, parsed, job)
        if look.asks:
            _look_from_callers(look, job)
    except TimeUp:
        look.gave_up = True
        look.warnings.append(f"gave up after {SECONDS} seconds; findings may be missing")
    except (MemoryError, RecursionError):
        look.gave_up = True
        look.warnings.append("too deep or too large to follow; findings may be missing")
    return _payload(look, held, job) | ({"cells": cells} if cells else {})


def _look(look: Look, source: Source, job: Job) -> None:
    """Judges every training loop of a file."""
    from accumlint.source.rehearsal.rehearse import Options

    settings = job.settings
    on_disk = os.path.isabs(source.path)
    data = source.text.encode("utf-8", "surrogatepass")
    if concerns(data) or wraps(data, settings) or (on_disk and leads(_roots(settings)).starts(source.path, data)):
        look.at(source, Options.of(settings), library_for(settings) if on_disk else None)


def _look_from_callers(look: Look, job: Job) -> None:
    """Judges a file whose models come from elsewhere as those who use it run it; what takes too long is tried again next time."""
    from accumlint.source.rehearsal.rehearse import Options

    if not os.path.isabs(job.path):
        return
    library = library_for(job.settings)
    project = library.imports.folders.root(os.path.dirname(job.path)).rstrip(os.sep) + os.sep
    callers_lead_here = job.linted.holds(project)  # if there are any
    try:
        with _limited(SECONDS_FROM_CALLERS):
            if callers_lead_here:
                look.left_to.append(project)
            else:
                look.from_callers(job.path, Options.of(job.settings), library, job.linted.holds)
            look.from_meetings(Options.of(job.settings), library)
    except TimeUp:
        look.gave_up = look.cut_short = True


def _unreadable_file(problem: Problem) -> Finding:
    from accumlint.findings import Finding, Severity
    from accumlint.trace import Place

    place = Place(problem.path, problem.line, problem.column, problem.line, problem.column + 1, *problem.cell)
    return Finding("ACC000", place, problem.message, severity=Severity.ERROR)


def _lost(job: Job, lost: Lost) -> dict[str, Any]:
    from accumlint.looking import Look
    from accumlint.source.reading.parse import Problem

    if lost.late:
        return _payload(Look(warnings=[f"gave up after {PATIENCE} seconds; findings may be missing"], gave_up=True), [], job)
    # Kept in the cache: alone, the file would be read in this very process next time, and end it.
    return _payload(Look([_unreadable_file(Problem(job.path, f"could not be linted: {lost.reason}"))], gave_up=True), [], job)


def _payload(look: Look, held: list[Suppression], job: Job) -> dict[str, Any]:
    from accumlint.source.codec import encode

    prefix = job.root.rstrip(os.sep) + os.sep
    coded = encode(look.findings, lambda path: path.removeprefix(prefix)) if look.findings else None
    return {
        "findings": coded,
        "suppressions": held,
        "gave_up": look.gave_up,
        "warnings": look.warnings,
        "whole": not look.warnings and not look.cut_short,
        "left_to": look.left_to,
        "followed": [path.removeprefix(prefix) for path in dict.fromkeys(look.followed)],
    }


def _says_something(payload: dict[str, Any]) -> bool:
    return payload["findings"] is not None or bool(payload["suppressions"]) or bool(payload["left_to"])


def _opened(job: Job, payload: dict[str, Any]) -> tuple[Examined | None, list[str]]:
    """The payload as findings and suppressions (None where there is neither), and the warnings with the file's name before them."""
    warnings = [f"{shown(job.path)}: {each}" for each in payload["warnings"]]
    if not _says_something(payload):
        return None, warnings
    from accumlint.source.codec import decode
    from accumlint.source.editing.ignores import from_row
    from accumlint.source.reading.notebook import Cell

    back = _back(job.root)
    findings = decode(payload["findings"], back) if payload["findings"] is not None else []
    held = [from_row(row) for row in payload["suppressions"]]
    cells = tuple(Cell(*row) for row in payload.get("cells", ()))
    return Examined(job.path, job.settings, findings, held, payload["gave_up"], cells), warnings


def _back(root: str) -> Callable[[str], str]:
    return lambda path: path if path == "-" else os.path.join(root, path)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing is looked for that can be thrown away while one file is examined: most of what there is lasts until its end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the block after so much processor time, where the platform can tell; a worker is ended by its parent at last."""
    import signal
    import threading

    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
