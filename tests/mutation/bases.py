"""The correct scripts that mutants are made from.

The good fixtures that need only torch, and the good twins of public bug reports where they are at hand.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from tests.mutation.operators import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(os.environ.get("ACCUMLINT_CASES", ROOT.parent / "shared" / "cases"))
_OF_A_FRAMEWORK = re.compile(
    r"^# needs: |^\s*(?:import|from) +(?:accelerate|ignite|lightning|pytorch_lightning|transformers)\b", re.MULTILINE
)
_PROCESSES = re.compile(r"^#\s*nproc:\s*(\d+)", re.MULTILINE)


class Base:
    """One correct script; `rule` is the code that its folder or its bad twin stands for."""

    def __init__(self, name: str, rule: str, text: str, processes: int) -> None:
        self.name = name
        self.rule = rule
        self.text = text
        self.processes = processes

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        return tuple(mutants(self.text))

    def __repr__(self) -> str:
        return self.name


def key(text: str) -> str:
    """What names a mutant in the table of effects."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bases() -> list[Base]:
    return [*_fixtures(), *_cases()]


def _fixtures() -> Iterator[Base]:
    for path in sorted((ROOT / "fixtures").glob("*/good_*.py")):
        text = path.read_text(encoding="utf-8")
        if _OF_A_FRAMEWORK.search(text):
            continue  # torch's events are what the effects are measured by, and a framework takes seconds to import in every run
        processes = _PROCESSES.search(text)
        code = path.parent.name.partition("_")[0].upper()
        yield Base(f"{path.parent.name}/{path.name}", code, text, int(processes.group(1)) if processes else 1)


def _cases() -> Iterator[Base]:
    index = CASES / "INDEX.tsv"
    if not index.exists():
        return
    with index.open(encoding="utf-8", newline="") as file:
        rows = {row["file"]: row for row in csv.DictReader(file, delimiter="\t")}
    for name, row in rows.items():
        bad = rows.get(name.replace("_good.py", "_bad.py"), {})
        if name.endswith("_good.py") and row["needs"] == "torch" and bad.get("static") == "yes":
            text = (CASES / name).read_text(encoding="utf-8")
            yield Base(f"cases/{name}", bad["codes"].partition(":")[0], text, int(row["nproc"]))
