"""Runs a program as `accumlint verify` does and prints its outcome as JSON: `driver.py PROGRAM SETTINGS`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from accumlint.runtime.endings import problem, rank_ends
from accumlint.runtime.launch import Program, prepare
from accumlint.runtime.settings import Settings
from accumlint.runtime.supervise import Outcome, supervise


def table(outcome: Outcome, steps: int) -> dict[str, Any]:
    return {
        "ending": outcome.ending.value,
        "code": outcome.code,
        "signal": outcome.signal,
        "interrupted_by": outcome.interrupted_by,
        "shows": outcome.shows,
        "seconds": outcome.seconds,
        "problem": problem(outcome, steps),
        "ends": [asdict(end) for end in rank_ends(outcome)],
        "missing": [asdict(rank) for rank in outcome.missing],
        "troubles": list(outcome.troubles),
        "reports": list(outcome.reports),
    }


def main() -> None:
    program, settings = (json.loads(each) for each in sys.argv[1:3])
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in program.items()}
    launch = prepare(Program(**lists), Settings("", "", **settings), os.environ)
    print(json.dumps(table(supervise(launch), settings.get("steps", 2))))


if __name__ == "__main__":
    main()
