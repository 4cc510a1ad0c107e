"""Tells which files `accumlint check` must look at, without importing what looks at them."""

from __future__ import annotations

from accumlint.config import Settings
from accumlint.source.reading.files import Candidate
from accumlint.source.reading.sieve import concerns, holds_sign, may_concern_notebook


def interesting(data: bytes, found: Candidate) -> bool:
    """Whether a file must be looked at: it holds a training loop or a suppression, or is no text."""
    if found.path.endswith(".ipynb"):
        return may_concern_notebook(data, _signs(found.settings)) and _is_interesting_notebook(data, found.settings)
    return concerns(data) or wraps(data, found.settings) or b"\0" in data or not (data.isascii() or _is_utf8(data))


def _is_interesting_notebook(data: bytes, settings: Settings) -> bool:
    code = _code(data)
    return code is None or concerns(code) or wraps(code, settings)


def _code(data: bytes) -> bytes | None:
    """The program of a notebook, None where the file is no notebook."""
    from accumlint.source.reading.notebook import Notebook, read_notebook

    program = read_notebook(data)
    return program.text.encode("utf-8", "surrogatepass") if isinstance(program, Notebook) else None


def wraps(data: bytes, settings: Settings) -> bool:
    """Whether a file names one of the wrappers of its project."""
    return bool(settings.wrappers) and holds_sign(data, _signs(settings))


def _signs(settings: Settings) -> tuple[bytes, ...]:
    if not settings.wrappers:
        return ()
    from accumlint.source.vocabulary.project_wrappers import signs

    return signs(settings.wrappers)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def parses(data: bytes, path: str) -> bool:
    """Whether a file, or the program of a notebook, is Python at all."""
    import warnings

    if path.endswith(".ipynb"):
        code = _code(data)
        if code is None:
            return False
        data = code
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "<file>", "exec", flags=0x400, dont_inherit=True)  # ast.PyCF_ONLY_AST, without importing ast
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True
