"""How fast `accumlint` is, in ratios to Ruff: `python -m tests.benchmarks.lint [TREE] [--pairs N]`.

Both run as a user runs them, in turns, imports included; ratios are those of the pairs, and the figures medians. The last
lines say where the time of each case goes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.script import training_script

Command = Sequence[str | os.PathLike[str]]


class Case(NamedTuple):
    """A command of ours, what it is held against, and the most it may take: a ratio, or seconds where nothing is beside it."""

    name: str
    ours: Command
    theirs: Command | None
    bound: float
    prepare: Callable[[], object] = lambda: None


def executable(name: str) -> str:
    """The command that is installed beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed here")
    return found


def seconds(command: Command) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    taken = time.perf_counter() - started
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr.decode()}")
    return taken


def measure(case: Case, pairs: int) -> tuple[float, float, float]:
    """The medians of our seconds, of theirs, and of the pairs' ratios."""
    ours: list[float] = []
    theirs: list[float] = []
    case.prepare()
    for turn in range(pairs):
        # Taken in turns, so that whatever else the machine does falls on both; the order changes for the same reason.
        order = ((ours, case.ours), (theirs, case.theirs))
        for taken, command in order if turn % 2 else reversed(order):
            if command is not None:
                taken.append(seconds(command))
    if case.theirs is None:
        return statistics.median(ours), float("nan"), statistics.median(ours)
    return statistics.median(ours), statistics.median(theirs), statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def cases(tree: Path, scratch: Path) -> list[Case]:
    accumlint, ruff = executable("accumlint"), executable("ruff")
    plain, training, cache = scratch / "plain.py", scratch / "train.py", scratch / "cache"
    plain.write_text("".join(f"def f{i}(x):\n    return [x + {i} for _ in range(x)]\n\n\n" for i in range(100)))
    training.write_text(training_script(400))
    ours = (accumlint, "check", "--isolated")
    against = (ruff, "check", "--no-cache", "--isolated", "--select", "F401", tree)
    warm = (*ours, "--cache-dir", cache, tree)
    return [
        Case("tree, cold", (*ours, "--no-cache", tree), against, 1.5),
        Case("tree, warm", warm, against, 0.5, lambda: seconds(warm)),
        Case("one file without training", (*ours, "--no-cache", plain), None, 0.120),
        Case("training script of 400 lines", (*ours, "--no-cache", training), None, 0.600),
    ]


def phases(tree: Path, scratch: Path) -> list[tuple[str, float]]:
    """Where the time goes: the parts of a cold run in one process, one after the other."""
    from accumlint.source.reading.parse import Source, parse
    from accumlint.source.reading.sieve import concerns

    python = [sys.executable, "-c"]
    found = [
        ("start of Python", statistics.median(seconds([*python, "pass"]) for _ in range(5))),
        ("start and import of accumlint.cli", statistics.median(seconds([*python, "import accumlint.cli"]) for _ in range(5))),
    ]
    files = {path: path.read_bytes() for path in sorted(tree.rglob("*.py"))}  # warms the system's cache; not counted
    started = time.perf_counter()
    for path in files:
        path.read_bytes()
    found.append((f"read {len(files):,} files of {sum(map(len, files.values())) / 1e6:.0f} MB", time.perf_counter() - started))
    started = time.perf_counter()
    passed = [path for path, data in files.items() if concerns(data)]
    found.append((f"sieve them; {len(passed)} pass", time.perf_counter() - started))
    lines = sum(files[path].count(b"\n") for path in passed)
    found.append((f"parse the {lines:,} lines that pass", _timed(lambda: [parse(files[path], str(path)) for path in passed])))
    script = scratch / "train.py"
    source = parse(script.read_bytes(), str(script))
    assert isinstance(source, Source)
    if importlib.util.find_spec("accumlint.source.rehearsal.rehearse"):
        from accumlint.config import Settings
        from accumlint.linter import lint_data

        settings = Settings()
        _timed(lambda: lint_data(str(script), script.read_bytes(), settings))  # imports
        found.append(("rehearse and judge what passes", _timed(lambda: [lint_data(str(path), files[path], settings) for path in passed])))
        found.append(("lint the training script, imports apart", _timed(lambda: lint_data(str(script), script.read_bytes(), settings))))
    return found


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def default_tree() -> Path:
    """The installed torch package: 1.2 million lines that are at hand wherever the tests run."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed here: name a tree")
    return Path(spec.origin).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, default=None, help="folder to lint (the installed torch package)")
    parser.add_argument("--pairs", type=int, default=7, help="how often each pair runs (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a bound is missed")
    arguments = parser.parse_args()
    tree = arguments.tree or default_tree()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"{tree}, {os.cpu_count()} processors, medians of {arguments.pairs}\n")
        print(f"{'case':<30} {'accumlint':>10} {'ruff':>8} {'ratio':>7}   bound")
        for case in cases(tree, Path(folder)):
            ours, theirs, figure = measure(case, arguments.pairs)
            beside = f"{theirs:7.3f}s {figure:7.2f}   {case.bound:g}" if case.theirs is not None else f"{'':8} {'':7}   {case.bound:g}s"
            missed += figure > case.bound
            print(f"{case.name:<30} {ours:9.3f}s {beside}{'' if figure <= case.bound else '   missed'}", flush=True)
        print("\nwhere it goes, in one process")
        for name, taken in phases(tree, Path(folder)):
            print(f"  {taken:7.3f}s  {name}")
    return int(bool(missed) and arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
