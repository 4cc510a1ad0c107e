"""The lists of the primer: public repositories at pinned commits, and what is to be found in them.

`repositories.tsv` holds name and commit. `findings.tsv` holds a row for every finding that is expected there, with a verdict
by reading ("true": the code is wrong as the finding says, "false": it is not), and why in one short sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORIES = HERE / "repositories.tsv"
FINDINGS = HERE / "findings.tsv"
VERDICTS = ("true", "false")
UNREAD = "?"


class Row(NamedTuple):
    """A finding that is expected, or was found."""

    repository: str
    path: str  # from the root of the repository, with slashes
    line: int
    code: str
    severity: str
    verdict: str = UNREAD
    reading: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        return (self.repository.lower(), self.path, self.line, self.code)


def repositories(path: Path = REPOSITORIES) -> dict[str, str]:
    """The commit of every repository."""
    return dict(_rows(path, 2))


def findings(path: Path = FINDINGS) -> list[Row]:
    return [Row(repository, file, int(line), *rest) for repository, file, line, *rest in _rows(path, len(Row._fields))]


def write_findings(rows: Iterable[Row], path: Path = FINDINGS) -> None:
    lines = ["\t".join(Row._fields), *("\t".join(map(str, row)) for row in sorted(rows, key=lambda row: row.key))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _rows(path: Path, width: int) -> list[list[str]]:
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, 2):
        if len(row) != width:
            raise ValueError(f"{path.name}:{number}: {len(row)} columns instead of {width}")
    return rows


def problems(listed: list[Row], known: Mapping[str, str], codes: Iterable[str]) -> list[str]:
    """What is wrong with the lists themselves, one line each."""
    found = [f"{name}: `{commit}` is no commit" for name, commit in known.items() if not re.fullmatch(r"[0-9a-f]{40}", commit)]
    found += [f"{name}: not owner/name" for name in known if not re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    if list(known) != sorted(known, key=str.lower):
        found.append("the repositories are not sorted")
    keys = [row.key for row in listed]
    if keys != sorted(keys):
        found.append("the findings are not sorted")
    if len(keys) != len(set(keys)):
        found.append("a finding is listed twice")
    allowed = frozenset(codes)
    for row in listed:
        found += (f"{row.repository} {row.path}:{row.line} {row.code}: {each}" for each in _wrong(row, known, allowed))
    return found


def _wrong(row: Row, known: Mapping[str, str], codes: frozenset[str]) -> list[str]:
    checks = {
        "the repository is not listed": row.repository in known,
        "no rule has this code": row.code in codes,
        "unknown severity": row.severity in {"error", "warning", "info"},
        "not a path within the repository": not row.path.startswith("/") and "\\" not in row.path and ".." not in row.path.split("/"),
        "not a line": row.line > 0,
        "has not been read": row.verdict in VERDICTS,
        "says not why": row.verdict == UNREAD or bool(row.reading.strip()),
    }
    return [what for what, holds in checks.items() if not holds]
