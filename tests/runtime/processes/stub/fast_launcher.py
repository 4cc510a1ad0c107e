"""A launcher: `fast_launcher.py WORLD WORDS…` starts that many ranks, and ends all when one fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    world = int(sys.argv[1])
    command = [sys.executable, str(Path(__file__).with_name("fast_rank.py")), *sys.argv[2:]]
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}) for rank in range(world)]
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.terminate()
            sys.exit(1)
        time.sleep(0.05)
    sys.exit(max(abs(rank.returncode) for rank in ranks))
