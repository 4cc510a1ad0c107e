"""Which files are read: named ones always, and below a named folder all Python files and notebooks that nothing leaves out."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from accumlint.config import Configuration, Settings
from accumlint.source.reading.disk import contents

SUFFIXES = (".py", ".ipynb")


class Candidate(NamedTuple):
    """A file to read."""

    path: str  # absolute
    settings: Settings
    status: os.stat_result
    named: bool  # on the command line, not found in a folder


class Unreadable(NamedTuple):
    """A path that could not be read, and why."""

    path: str
    reason: str


Ignored = Callable[[str], bool]  # takes an absolute path, with a slash at the end where it is a folder


def find(arguments: Sequence[str], configuration: Configuration, *, force_exclude: bool = False) -> Iterator[Candidate | Unreadable]:
    """The files that the arguments of a command line mean, each once."""
    seen: set[str] = set()
    for argument in arguments:
        for found in _find(os.path.abspath(argument), configuration, force_exclude):
            if found.path not in seen:
                seen.add(found.path)
                yield found


def _find(path: str, configuration: Configuration, force_exclude: bool) -> Iterator[Candidate | Unreadable]:
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        yield Unreadable(path, reason(error))
        return
    folder = stat.S_ISDIR(status.st_mode)
    if not folder and not stat.S_ISREG(status.st_mode):
        yield Unreadable(path, "neither a file nor a folder; `-` reads standard input")
        return
    if force_exclude and left_out(path, configuration, folder=folder):
        return
    if folder:
        yield from _walk(path, configuration)
    else:
        yield Candidate(path, configuration.of(os.path.dirname(path)), status, named=True)


def reason(error: OSError | ValueError) -> str:
    """Why a path cannot be read, in a few words."""
    if isinstance(error, ValueError):
        return "not a valid path"
    words = {errno.ENOENT: "no such file or folder", errno.EACCES: "permission denied", errno.ELOOP: "a symbolic link that leads to itself"}
    return words.get(error.errno or 0, (error.strerror or str(error)).lower())


def _walk(root: str, configuration: Configuration) -> Iterator[Candidate | Unreadable]:
    """All files below a folder. Links to folders are not followed, so the walk ends whatever they point to."""
    inherited = _inherited_ignores(root)
    if any(ignored(root + "/") for ignored in inherited):
        inherited = ()  # the folder was asked for by name
    pending: list[tuple[str, Settings, tuple[Ignored, ...]]] = [(root, configuration.of(root), inherited)]
    while pending:
        folder, settings, ignores = pending.pop()
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            yield Unreadable(folder, reason(error))
            continue
        names = {entry.name for entry in entries}
        if folder != root:
            settings = configuration.below(folder, settings, names)
        if ".gitignore" in names:
            ignores = (*ignores, _gitignore(os.path.join(folder, ".gitignore"), folder))
        excluded = patterns(settings.excluded, settings.root)
        folders: list[str] = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not excluded(entry.path) and not any(ignored(entry.path + "/") for ignored in ignores):
                    folders.append(entry.path)
            elif entry.name.endswith(SUFFIXES) and not excluded(entry.path) and not any(ignored(entry.path) for ignored in ignores):
                yield from _file(entry, settings)
        pending.extend((each, settings, ignores) for each in reversed(folders))


def _file(entry: os.DirEntry[str], settings: Settings) -> Iterator[Candidate | Unreadable]:
    try:
        if entry.is_file():
            yield Candidate(entry.path, settings, entry.stat(), named=False)
    except FileNotFoundError:
        pass  # gone since, or a link to nothing: there is nothing to read
    except OSError as error:
        yield Unreadable(entry.path, reason(error))


def left_out(path: str, configuration: Configuration, *, folder: bool = False) -> bool:
    """Whether excludes or .gitignore leave out a path or a folder that it lies in."""
    settings = configuration.of(path if folder else os.path.dirname(path))
    excluded = patterns(settings.excluded, settings.root)
    inside = path.startswith(settings.root + os.sep)
    parts = path[len(settings.root) + 1 :].split(os.sep) if inside else [os.path.basename(path)]
    base = settings.root if inside else os.path.dirname(path)
    for depth in range(1, len(parts) + 1):
        if excluded(os.path.join(base, *parts[:depth])):
            return True
    ignores = _inherited_ignores(path if folder else os.path.dirname(path), itself=True)
    top = repository(path) or base
    steps = path[len(top) + 1 :].split(os.sep)
    for depth in range(1, len(steps) + 1):
        end = "/" if depth < len(steps) or folder else ""
        if any(ignored(os.path.join(top, *steps[:depth]) + end) for ignored in ignores):
            return True
    return False


@cache
def patterns(globs: tuple[str, ...], root: str) -> Callable[[str], bool]:
    """A test of absolute paths: a glob without a slash matches a name at any depth, one with a slash a path below `root`."""
    names = [glob.rstrip("/") for glob in globs if "/" not in glob.rstrip("/")]
    paths = [glob.rstrip("/") for glob in globs if "/" in glob.rstrip("/")]
    literal = frozenset(name for name in names if not set(name) & set("*?["))
    wild = _regex([name for name in names if name not in literal])
    long = _regex([glob if os.path.isabs(glob) else f"{root.rstrip('/')}/{glob.removeprefix('./')}" for glob in paths], fixed=root)

    def matches(path: str) -> bool:
        name = path.rpartition(os.sep)[2]
        if name in literal or (wild is not None and wild.fullmatch(name) is not None):
            return True
        return long is not None and long.fullmatch(path.replace(os.sep, "/")) is not None

    return matches


def _regex(globs: list[str], fixed: str = "") -> re.Pattern[str] | None:
    """One expression for several globs; the `fixed` beginning is a folder's name and no glob."""
    if not globs:
        return None
    parts = [re.escape(fixed) + glob_regex(glob[len(fixed) :]) if fixed and glob.startswith(fixed) else glob_regex(glob) for glob in globs]
    return re.compile("|".join(parts))


def glob_regex(glob: str) -> str:
    """A glob as a regular expression: `*` and `?` stay within one name, `**` crosses folders."""
    out: list[str] = []
    at = 0
    while at < len(glob):
        if glob.startswith("**/", at):
            out.append("(?:.*/)?")
            at += 3
        elif glob.startswith("**", at):
            out.append(".*")
            at += 2
        elif glob[at] in "*?":
            out.append("[^/]*" if glob[at] == "*" else "[^/]")
            at += 1
        elif glob[at] == "[" and (end := glob.find("]", at + 2)) > 0:
            inside = glob[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            out.append(f"[{'^' + inside[1:] if inside[0] in '!^' else inside}]")
            at = end + 1
        else:
            out.append(re.escape(glob[at]))
            at += 1
    return "".join(out)


def _inherited_ignores(folder: str, *, itself: bool = False) -> tuple[Ignored, ...]:
    """The ignore files of the repository above a folder, the repository's own first."""
    top = repository(folder)
    if top is None:
        return ()
    found: list[Ignored] = []
    private = os.path.join(top, ".git", "info", "exclude")
    if os.path.isfile(private):
        found.append(_gitignore(private, top))
    below = [part for part in folder[len(top) :].split(os.sep) if part]
    for depth in range(len(below) + (1 if itself else 0)):
        above = os.path.join(top, *below[:depth])
        path = os.path.join(above, ".gitignore")
        if os.path.isfile(path):
            found.append(_gitignore(path, above))
    return tuple(found)


@cache
def repository(path: str) -> str | None:
    """The root of the git repository that a path lies in."""
    here = path
    while True:
        if os.path.exists(os.path.join(here, ".git")):
            return here
        parent = os.path.dirname(here)
        if parent == here:
            return None
        here = parent


@cache
def _gitignore(path: str, folder: str) -> Ignored:
    """The test that one ignore file makes of absolute paths below its folder."""
    try:
        lines = contents(path).decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        return lambda path: False
    if not any(line.strip() and not line.startswith("#") for line in lines):
        return lambda path: False
    runs = _compiled(lines)
    start = len(folder) + 1

    def ignored(path: str) -> bool:
        relative = path[start:].replace(os.sep, "/")
        return next((include for include, regex in runs if regex.match(relative)), False)

    return ignored


def _compiled(lines: list[str]) -> list[tuple[bool, re.Pattern[str]]]:
    """The patterns of an ignore file, the last first, with neighbours of one kind in one expression: the first match decides."""
    import pathspec

    runs: list[tuple[bool, list[str]]] = []
    for line in reversed(lines):
        try:
            parsed = pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue  # git passes over a line that is no pattern, too
        for pattern in parsed.patterns:
            if pattern.include is None or pattern.regex is None:
                continue
            # The named group only marks folders for pathspec's own bookkeeping, and a name may stand once in an expression.
            text = pattern.regex.pattern.replace("(?P<ps_d>", "(?:")
            if not runs or runs[-1][0] is not pattern.include:
                runs.append((pattern.include, []))
            runs[-1][1].append(text)
    return [(include, re.compile("|".join(f"(?:{text})" for text in texts))) for include, texts in runs]
