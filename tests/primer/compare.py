"""What is found in checkouts, against the list: what is new, gone or elsewhere, and how much of it is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.primer.lists import Row


class Difference(NamedTuple):
    """A found set against a listed one. Moved rows are pairs: as listed, and as found."""

    known: list[Row]
    new: list[Row]
    vanished: list[Row]
    moved: list[tuple[Row, Row]]

    def __bool__(self) -> bool:
        return bool(self.new or self.vanished or self.moved)

    def current(self) -> list[Row]:
        """What is found now, with the verdicts that are known."""
        moved = [there._replace(verdict=listed.verdict, reading=listed.reading) for listed, there in self.moved]
        return sorted([*self.known, *moved, *self.new], key=lambda row: row.key)


def checkouts(folders: Iterable[Path], known: Mapping[str, str]) -> dict[str, Path]:
    """The checkouts in some folders, each called `owner+name`, of the repositories that are listed."""
    found = {path.name.replace("+", "/", 1): path for folder in folders for path in sorted(folder.iterdir()) if path.is_dir()}
    return {name: path for name, path in sorted(found.items(), key=lambda each: each[0].lower()) if name in known}


def lint(repository: str, checkout: Path) -> list[Row]:
    """What `accumlint check` reports of a checkout, without any configuration of its own."""
    options = ("--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--quiet", "--output-format", "json")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-m", "accumlint", "check", ".", *options]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, env=environment)
    if done.returncode not in {0, 2} or not done.stdout:  # 2: some path could not be read, such as a link to nothing
        raise RuntimeError(f"{repository}: accumlint ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    rows = (_row(repository, checkout, each) for each in json.loads(done.stdout))
    return sorted({row.key: row for row in rows if row.code != "ACC000"}.values(), key=lambda row: row.key)


def _row(repository: str, checkout: Path, found: Mapping[str, object]) -> Row:
    path = Path(str(found["filename"])).resolve().relative_to(checkout.resolve()).as_posix()
    location = found["location"]
    assert isinstance(location, Mapping)
    return Row(repository, path, int(location["row"]), str(found["code"]), str(found["severity"]))


def difference(found: Iterable[Row], listed: Iterable[Row]) -> Difference:
    """Rows are the same by repository, path, line and code; what remains in one file of one code has moved, nearest lines first."""
    before, after = {row.key: row for row in listed}, {row.key: row for row in found}
    known = [before[key]._replace(severity=after[key].severity) for key in after if key in before]
    new = _by_file(row for key, row in after.items() if key not in before)
    gone = _by_file(row for key, row in before.items() if key not in after)
    moved: list[tuple[Row, Row]] = []
    for file, rows in gone.items():
        for row, there in _pairs(rows, new.get(file, [])):
            moved.append((row, there))
            rows.remove(row)
            new[file].remove(there)
    return Difference(known, _flat(new), _flat(gone), sorted(moved))


def _by_file(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    files: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        files[row.repository, row.path, row.code].append(row)
    return files


def _flat(files: Mapping[tuple[str, str, str], list[Row]]) -> list[Row]:
    return sorted((row for rows in files.values() for row in rows), key=lambda row: row.key)


def _pairs(gone: list[Row], new: list[Row]) -> list[tuple[Row, Row]]:
    pairs: list[tuple[Row, Row]] = []
    taken: set[Row] = set()
    for row, there in sorted(((row, there) for row in gone for there in new), key=lambda pair: abs(pair[0].line - pair[1].line)):
        if row not in taken and there not in taken:
            taken |= {row, there}
            pairs.append((row, there))
    return pairs


def precision(rows: Iterable[Row]) -> Iterator[str]:
    """The share of true findings by severity and by code, of those that have been read."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for group in (f"{row.severity}s", row.code):
            groups[group][row.verdict] += 1
    for group, verdicts in sorted(groups.items(), key=lambda each: (each[0].startswith("ACC"), each[0])):
        read = verdicts["true"] + verdicts["false"]
        share = f"{verdicts['true'] / read:.3f}" if read else "-"
        unread = f", {verdicts['?']} not read" if verdicts["?"] else ""
        yield f"{group:<9} {share:>6}   {verdicts['true']} true, {verdicts['false']} false{unread}"
