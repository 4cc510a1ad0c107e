"""The rules see the same in a script whatever spaces stand around its operators, and whatever its objects are called."""

from __future__ import annotations

import io
import re
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

from accumlint.findings import Severity
from accumlint.linter import lint_file

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
SCRIPTS = sorted(FIXTURES.glob("acc[1-4]*/bad_*.py"))
OF_TORCH_ALONE = [
    path
    for path in sorted(FIXTURES.glob("acc[1-4]*/*.py"))
    if not re.search(
        r"needs:|accelerate|transformers|lightning|deepspeed|ignite|mmengine|mmcv|composer|catalyst|fastai|apex", path.read_text("utf-8")
    )
    and not re.search(r"megatron|colossalai|torchtitan|torchtune|Trainer", path.read_text("utf-8"))
]
NAMES = {
    "optimizer": "zo",
    "opt": "zp",
    "scheduler": "zs",
    "sched": "zt",
    "model": "zm",
    "net": "zn",
    "loss": "zl",
    "scaler": "zc",
    "batch": "zb",
    "loader": "zd",
}


def squeezed(text: str) -> str:
    """A script without the spaces around its operators; its lines stay what they are."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.split("\n")
    for left, right in reversed(list(pairwise(tokens))):
        row, start, end = left.end[0], left.end[1], right.start[1]
        beside = tokenize.OP in {left.type, right.type} and right.type != tokenize.COMMENT
        if row == right.start[0] and start < end and beside:
            lines[row - 1] = lines[row - 1][:start] + lines[row - 1][end:]
    return "\n".join(lines)


def renamed(text: str) -> str:
    """A script whose objects have names that tell nothing."""
    for name, other in NAMES.items():
        text = re.sub(rf"""(?<![\w.'"]){name}\b(?!['"])""", other, text)
        text = re.sub(rf"\bself\.{name}\b", f"self.{other}", text)
    return text


def found(path: Path) -> set[tuple[str, int]]:
    return {(each.code, each.place.line) for each in lint_file(str(path))}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_spaces_around_operators_change_nothing(script: Path, tmp_path: Path) -> None:
    other = tmp_path / script.name
    other.write_text(squeezed(script.read_text(encoding="utf-8")), encoding="utf-8")
    assert found(other) == found(script)


@pytest.mark.parametrize("script", OF_TORCH_ALONE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_error_hangs_on_the_names_of_objects(script: Path, tmp_path: Path) -> None:
    other = tmp_path / script.name
    other.write_text(renamed(script.read_text(encoding="utf-8")), encoding="utf-8")
    errors = {(each.code, each.place.line) for each in lint_file(str(script)) if each.severity is Severity.ERROR}
    assert {(each.code, each.place.line) for each in lint_file(str(other)) if each.severity is Severity.ERROR} == errors
