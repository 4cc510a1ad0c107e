"""Both halves agree: every fixture is run, and its run shows what the linter says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARES = 2  # processes, one for each of the two cores


def test_every_fixture_runs_and_shows_what_the_linter_says() -> None:
    """In processes of their own: the runs are forked from one that has imported torch and has no threads."""
    command = [sys.executable, "-m", "tests.runtime.agreement", "--share"]
    running = [
        subprocess.Popen([*command, f"{share}/{SHARES}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for share in range(SHARES)
    ]
    said = [process.communicate(timeout=3000)[0] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(said)
