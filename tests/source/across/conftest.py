"""Small projects of several files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from accumlint.linter import lint_file

Findings = set[tuple[str, str, str]]
Lint = Callable[..., Findings]


@pytest.fixture
def lint(tmp_path: Path) -> Lint:
    """Writes a project and lints one of its files; gives file, code and guilty line of each finding."""

    def linted(files: dict[str, str], start: str = "main.py") -> Findings:
        (tmp_path / "pyproject.toml").write_text("")
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
        found = lint_file(str(tmp_path / start))
        return {
            (
                Path(each.place.path).relative_to(tmp_path).as_posix(),
                each.code,
                Path(each.place.path).read_text(encoding="utf-8").split("\n")[each.place.line - 1].strip(),
            )
            for each in found
        }

    return linted
