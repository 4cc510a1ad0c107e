"""What the files of a project say of the packages it needs: lock files, requirements, pyproject.toml, setup.*, conda environments.

A reader takes a file's text and gives the distributions that it names. A file that is broken says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from accumlint.config import ConfigError, read_toml
from accumlint.source.reading.specifiers import NEWEST, Range, allowed, normal, requirement, version


class Statement(NamedTuple):
    """A distribution that a file names, as it is written, and which versions are allowed."""

    name: str
    text: str
    range: Range


class Reader(NamedTuple):
    names: re.Pattern[str]  # of files, from the project's folder
    read: Callable[[str], Iterator[Statement]]
    locked: bool = False


_LOCKED = re.compile(r"""^\[\[packages?\]\][^\[]*?^name\s*=\s*["']([^"']+)["']\s*^version\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def read_lock(text: str) -> Iterator[Statement]:
    """uv.lock, poetry.lock, pdm.lock and pylock.toml: `[[package]]`, a name, a version. They are long, and parsing one takes a second."""
    for match in _LOCKED.finditer(text):
        yield from _exact(match[1], match[2])


def read_pipfile_lock(text: str) -> Iterator[Statement]:
    import json

    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    for section in _tables(document):
        for name, entry in section.items():
            if isinstance(entry, dict) and isinstance(entry.get("version"), str):
                yield from _exact(name, entry["version"].lstrip("="))


def read_requirements(text: str) -> Iterator[Statement]:
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        if line.strip() and line.lstrip()[0] not in "#-":
            yield from _required(line)


def read_pyproject(text: str) -> Iterator[Statement]:
    document = _toml(text)
    project = _table(document.get("project"))
    tool = _table(document.get("tool"))
    poetry = _table(tool.get("poetry"))
    yield from _itself(project.get("name") or poetry.get("name"))
    yield from _listed(project.get("dependencies"))
    for extra in _table(project.get("optional-dependencies")).values():
        yield from _listed(extra)
    for group in _table(document.get("dependency-groups")).values():
        yield from _listed(group)
    yield from _by_name(poetry.get("dependencies"))
    for group in _table(poetry.get("group")).values():
        yield from _by_name(_table(group).get("dependencies"))
    yield from _by_name(poetry.get("dev-dependencies"))


def read_pipfile(text: str) -> Iterator[Statement]:
    for section in _tables(_toml(text)):
        yield from _by_name(section)


def read_setup_cfg(text: str) -> Iterator[Statement]:
    import configparser

    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    yield from _itself(parser.get("metadata", "name", fallback=None))
    yield from read_requirements(parser.get("options", "install_requires", fallback=""))
    if parser.has_section("options.extras_require"):
        for _, lines in parser.items("options.extras_require"):
            yield from read_requirements(lines)


def read_setup_py(text: str) -> Iterator[Statement]:
    """The requirements that stand as strings in a list, wherever it is."""
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            yield from _listed([part.value for part in node.elts if isinstance(part, ast.Constant)])
        elif isinstance(node, ast.keyword) and node.arg == "name" and isinstance(node.value, ast.Constant):
            yield from _itself(node.value.value)


def read_environment(text: str) -> Iterator[Statement]:
    """A conda environment: `- pytorch=2.4`, and what stands below `- pip:`."""
    for match in re.finditer(r"^[ \t]*-[ \t]+(?P<entry>[^\s#-][^#\r\n:]*(?:::[^#\r\n]*)?)", text, re.MULTILINE):
        yield from _required(match["entry"])


def _exact(name: str, text: str) -> Iterator[Statement]:
    found = version(text)
    if found:
        yield Statement(normal(name), f"{name}=={text}", Range(found, found))


def _required(text: str) -> Iterator[Statement]:
    found = requirement(text)
    if found is not None:
        yield Statement(*found)


def _itself(name: Any) -> Iterator[Statement]:
    """The sources of a framework are its newest version."""
    if isinstance(name, str):
        yield Statement(normal(name), f"the project is {name}", Range(NEWEST, NEWEST))


def _listed(value: Any) -> Iterator[Statement]:
    for each in value if isinstance(value, list) else ():
        if isinstance(each, str):
            yield from _required(each)


def _by_name(value: Any) -> Iterator[Statement]:
    """`transformers = "^4.46"`, or a table with a version, or several of them for several platforms."""
    for name, entry in _table(value).items():
        for one in entry if isinstance(entry, list) else [entry]:
            text = one.get("version", "*") if isinstance(one, dict) else one
            if isinstance(text, str):
                yield Statement(normal(name), f'{name} = "{text}"', allowed(text))


def _toml(text: str) -> dict[str, Any]:
    try:
        return read_toml(text.encode(), "")
    except ConfigError:
        return {}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tables(document: Any) -> Iterator[dict[str, Any]]:
    for value in _table(document).values():
        if isinstance(value, dict):
            yield value


# In the order of their exactness.
READERS = (
    Reader(re.compile(r"(uv|poetry|pdm)\.lock|pylock(\.[\w-]+)?\.toml"), read_lock, locked=True),
    Reader(re.compile(r"Pipfile\.lock"), read_pipfile_lock, locked=True),
    Reader(re.compile(r"(requirements/)?constraints[\w.-]*\.txt"), read_requirements),
    Reader(re.compile(r"requirements[\w.-]*\.txt|requirements/[\w.-]+\.txt"), read_requirements),
    Reader(re.compile(r"pyproject\.toml"), read_pyproject),
    Reader(re.compile(r"Pipfile"), read_pipfile),
    Reader(re.compile(r"setup\.cfg"), read_setup_cfg),
    Reader(re.compile(r"setup\.py"), read_setup_py),
    Reader(re.compile(r"environment[\w.-]*\.ya?ml|conda[\w.-]*\.ya?ml"), read_environment),
)
