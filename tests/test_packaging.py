"""What pyproject.toml lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from accumlint import __version__
from accumlint.config import read_toml

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    listed = read_toml((ROOT / "pyproject.toml").read_bytes(), "pyproject.toml")["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in (ROOT / "accumlint").rglob("__init__.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders} | {"accumlint.rules"}
    assert sorted(listed) == sorted(packages)


def test_modules_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("accumlint", "rules")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := path.read_text(encoding="utf-8").count("\n")) >= 500
    }
    assert long == {}


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)


def test_the_hook_runs_a_command_that_there_is() -> None:
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    assert "entry: accumlint check --force-exclude" in hook
    assert "require_serial: true" in hook
