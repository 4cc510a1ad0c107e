"""`python -m tests.fixture_runs [PART OF A NAME]`: runs every fixture to its end, forked from one process that has imported torch.

Prints a line for each script that did not end as it declares: `# raises: …` in its head, or without an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.mutation.effects import observe, warm_up
from tests.needs import can_run

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
UNREADABLE = "acc000_unreadable_file"  # scripts that no Python reads
TRIES = 2  # two ranks on a busy machine now and then miss each other


def scripts(part: str = "") -> list[Path]:
    every = (path for path in sorted(FIXTURES.glob("*/*.py")) if part in str(path) and path.parent.name != UNREADABLE)
    return [path for path in every if can_run(path)]


def failures(paths: list[Path]) -> Iterator[str]:
    """What did not end as declared."""
    warm_up()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        head = "\n".join(text.split("\n")[:4])
        processes = re.search(r"^# nproc: (\d+)", head, re.MULTILINE)
        expected = {"raised", "hung"} if re.search(r"^# raises: ", head, re.MULTILINE) else {"done"}
        for _ in range(TRIES):
            seen = {each.status for each in observe(text, int(processes.group(1)) if processes else 1)}
            if seen & expected if "raised" in expected else seen <= expected:
                break
        else:
            yield f"{path.parent.name}/{path.name}: {', '.join(sorted(seen))}"


def main() -> int:
    found = list(failures(scripts(*sys.argv[1:2])))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
