"""The README's generated parts are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_parts_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.readme", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_first_shell_blocks_do_the_set_up() -> None:
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```sh\n")[1:4]
    commands = [block.split("```")[0].strip().splitlines() for block in blocks]
    assert commands == [
        ["pip install .", "accumlint fixtures/ --exit-zero --statistics"],
        [
            "pip install -c constraints.txt '.[verify]'",
            "accumlint verify fixtures/acc201_mean_of_means/good_token_exact_window.py --steps 2",
            "accumlint doctor",
        ],
        ["pip install -c constraints.txt -e '.[test]'", "pytest -n 2"],
    ]
