"""Every fixture says what it expects, the linter says the same, and the script runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from accumlint.config import Selection, Settings
from accumlint.linter import lint_file
from accumlint.rule import catalogue

ROOT = Path(__file__).resolve().parents[1]
EXPECTATION = re.compile(r"# expect: (ACC\d{3}(?:, ACC\d{3})*)")
SCRIPTS = sorted((ROOT / "fixtures").glob("*/*.py"))
FEWEST = 3


def expected(path: Path) -> list[tuple[int, str]]:
    found = []
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), start=1):
        match = EXPECTATION.search(line)
        if match:
            found += [(number, code) for code in match.group(1).split(", ")]
    return sorted(found)


def settings_for(path: Path) -> Settings:
    """The default rules, and the one that the folder is about where that is a note."""
    return Settings(selection=Selection(extend_select=(path.parent.name.partition("_")[0].upper(),)))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_expected_codes_on_expected_lines(path: Path) -> None:
    found = sorted((finding.place.line, finding.code) for finding in lint_file(str(path), settings_for(path)))
    assert found == expected(path)


def test_bad_scripts_expect_the_code_of_their_folder_and_good_ones_none() -> None:
    for path in SCRIPTS:
        codes = {code for _, code in expected(path)}
        own = path.parent.name.partition("_")[0].upper()
        assert own in codes if path.name.startswith("bad_") else not codes, path


@pytest.mark.parametrize("code", catalogue())
def test_every_rule_has_bad_and_good_scripts(code: str) -> None:
    rule = catalogue()[code]
    folder = ROOT / "fixtures" / f"{code.lower()}_{rule.name.replace('-', '_')}"
    kinds = Counter(path.name.partition("_")[0] for path in folder.glob("*.py"))
    assert kinds["bad"] >= FEWEST
    assert kinds["good"] >= FEWEST


def test_every_script_runs() -> None:
    """In a process of its own: the runs are forked from one that has imported torch and has no threads."""
    done = subprocess.run([sys.executable, "-m", "tests.fixture_runs"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
