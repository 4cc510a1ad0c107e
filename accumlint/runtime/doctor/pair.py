"""Starts the two ranks of the experiment as a launcher would, without torch: what is given goes to each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    folder = Path(__file__).parent
    with (folder / "ranks.log").open("ab") as log:
        commands = [[sys.executable, str(folder / "experiment.py"), "--rank", str(rank), *sys.argv[1:]] for rank in range(2)]
        ranks = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) for command in commands]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
