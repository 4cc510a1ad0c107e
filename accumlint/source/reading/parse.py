"""Reads one file: bytes in, a syntax tree out, or one clear line that says why not. Source text is never executed."""

from __future__ import annotations

import ast
import gc
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from accumlint.source.reading.depth import limit_depth
from accumlint.source.reading.notebook import Cell, Notebook, cell_at, is_notebook, read_notebook
from accumlint.source.reading.text import Problem, decode

__all__ = ["Problem", "Source", "parse"]

_TOO_DEEP = "nested too deeply to follow"

# Syntax that an older Python than the file's own refuses: only where one of these stands is LibCST worth its import.
_NEWER_SIGNS = re.compile(
    r"""
      ^[ \t]*type[ \t]+\w+[^\n=]*=                        # type X = …
    | ^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+\w+[ \t]*\[  # def f[T](…)
    | ^[ \t]*except[ \t]*\*                               # except* E:
    | ^[ \t]*except[ \t]+[^\n(:]*,                        # except A, B:
    | \b(?:[fF][rR]?|[rR][fF]|[tT][rR]?|[rR][tT])["']      # f-strings as of 3.12, t-strings
    | \[[^\]\n]*\*\w                                      # x[*a]
    | \*\w+[ ]*:[ ]*\*\w                                  # *args: *Ts
    """,
    re.MULTILINE | re.VERBOSE,
)

_PYTHON_2 = (
    ("print statement", re.compile(r"""^[ \t]*print[ \t]*(?:>>|["'\w%]|$)""", re.MULTILINE)),
    ("exec statement", re.compile(r"""^[ \t]*exec[ \t]+["'\w]""", re.MULTILINE)),
    ("raise with a comma", re.compile(r"^[ \t]*raise[ \t]+[\w.]+[ \t]*,", re.MULTILINE)),
    ("except with a comma", re.compile(r"^[ \t]*except[ \t]+[\w.]+[ \t]*,[ \t]*\w+[ \t]*:", re.MULTILINE)),
    ("backquotes", re.compile(r"`[\w.]+`")),
    ("<> operator", re.compile(r"\w[ \t]*<>[ \t]*\w")),
    ("octal or long literal", re.compile(r"(?<![\w.])(?:0[0-7]+|\d+[lL])\b")),
    ("ur string", re.compile(r"""\b[uU][rR]["']""")),
)


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read. `newer` says that its syntax is newer than the running Python and was lowered; the lines are the file's own."""

    path: str
    text: str
    lines: tuple[str, ...]
    tree: ast.Module
    newer: bool = False
    cells: tuple[Cell, ...] = ()  # of a notebook


def parse(data: bytes, path: str) -> Source | Problem:
    """The tree of a file, its depth capped; that of a notebook has the lines of all code cells."""
    program = read_notebook(data) if is_notebook(path) else None
    parsed = _parse(data, path)
    if not isinstance(program, Notebook):
        return parsed
    return replace(parsed, cells=program.cells) if isinstance(parsed, Source) else _in_cell(parsed, program)


def _in_cell(problem: Problem, program: Notebook) -> Problem:
    return replace(problem, cell=cell_at(program.cells, problem.line))


def _parse(data: bytes, path: str) -> Source | Problem:
    text = decode(data, path)
    if isinstance(text, Problem):
        return text
    tree, newer = _tree(text), False
    if isinstance(tree, SyntaxError):
        lowered = _lowered(text, path, tree)
        if isinstance(lowered, Problem):
            return lowered
        tree, newer = _tree(lowered), True
    if isinstance(tree, SyntaxError):
        return _syntax_problem(path, text, tree)
    if tree is None:
        return Problem(path, _TOO_DEEP)
    guilty = limit_depth(tree)
    if guilty is not None:
        return Problem(path, _TOO_DEEP, getattr(guilty, "lineno", 1), getattr(guilty, "col_offset", 0) + 1)
    # Not splitlines(): Python's own lines do not end at form feeds and the like.
    return Source(path, text, tuple(text.split("\n")), tree, newer)


def _tree(text: str) -> ast.Module | SyntaxError | None:
    """The tree, the parser's complaint, or None where the parser itself ran out of depth."""
    try:
        with _quietly():
            return ast.parse(text)
    except SyntaxError as error:
        return error
    except (RecursionError, MemoryError):
        return None
    except (ValueError, OverflowError) as error:  # lone surrogates, integers of too many digits
        return SyntaxError(str(error))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the parser's warnings, and without the collector, which walks a growing tree again and again for nothing."""
    collected = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if collected:
            gc.enable()


def _lowered(text: str, path: str, error: SyntaxError) -> str | Problem:
    if isinstance(error, IndentationError) or "nested parentheses" in error.msg or not _NEWER_SIGNS.search(text):
        return _syntax_problem(path, text, error)
    # LibCST takes longer to import than everything else together.
    from accumlint.source.reading.newer import TooLargeError, lower

    try:
        return lower(text) or _syntax_problem(path, text, error)
    except TooLargeError as limit:
        problem = _syntax_problem(path, text, error)
        return replace(problem, message=f"{problem.message} (as newer syntax the file is {limit} to be read)")


def _syntax_problem(path: str, text: str, error: SyntaxError) -> Problem:
    line, column = max(error.lineno or 1, 1), max(error.offset or 1, 1)
    if "nested parentheses" in error.msg or "levels of indentation" in error.msg:
        return Problem(path, f"{_TOO_DEEP}: {error.msg}", line, column)
    found = _python_2(text, line)
    if found:
        return Problem(path, f"looks like Python 2: {found}", line, column)
    return Problem(path, f"syntax error: {error.msg.partition('; use sys.')[0]}", line, column)


def _python_2(text: str, line: int) -> str | None:
    """The sign of Python 2 on the line that does not parse."""
    lines = text.split("\n")
    guilty = lines[line - 1] if line <= len(lines) else ""
    return next((name for name, pattern in _PYTHON_2 if pattern.search(guilty)), None)
