"""What `accumlint verify` costs a run: `python -m tests.benchmarks.verify [--pairs N] [--device cuda]`.

The plain script, verify with `--no-exact` and verify with the exact reference run side by side and take their updates in
turns, so that whatever else the machine does falls on all three. The ratios are those of the CPU time of one update each
(on CUDA, of the clock, the device synchronised at the end of the update); warm-up, imports and start are not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("transformer.py")
WARM_UP = 2  # updates: the first makes the optimizer's state, the second the reference's buffers
BOUNDS = {"no-exact": 1.03, "exact": 1.10}  # of the ratio of CPU time
PATIENCE = 600.0  # seconds for one update, imports included
MIB = 2**20


class Runner:
    """A process that trains, one update at each call of `turn`."""

    def __init__(self, folder: Path, name: str, options: Sequence[str], updates: int, given: argparse.Namespace) -> None:
        self.name = name
        self._out, turns = folder / f"{name}.jsonl", folder / f"{name}.turns"
        self._out.touch()
        os.mkfifo(turns)
        script = [str(SCRIPT), "--updates", str(updates + 1), "--out", str(self._out), "--turns", str(turns)]
        script += ["--device", given.device, "--batch", str(given.batch), "--length", str(given.length)]
        command = [sys.executable, *script]
        if name != "plain":
            head = [sys.executable, "-m", "accumlint", "verify", script[0], "--steps", str(updates), "-q", *options]
            command = [*head, "--", *script[1:]]
        self._log = folder / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.started = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self._turns = os.open(turns, os.O_RDWR)  # also for reading: an open for writing waits for a reader
        self.lines: list[dict[str, Any]] = []
        self.until_trained = self.trained = 0.0

    def turn(self) -> None:
        """One update of this process. Ends the benchmark if none comes."""
        os.write(self._turns, b"x")
        deadline = time.monotonic() + PATIENCE
        while len(lines := self._out.read_text().splitlines()) <= len(self.lines):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} made no update:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.005)
        self.lines.append(json.loads(lines[-1]))
        self.trained = time.perf_counter()
        self.until_trained = self.until_trained or time.perf_counter() - self.started

    def finish(self) -> float:
        """Lets it come to its end; seconds since its last update."""
        os.write(self._turns, b"x")
        self._process.wait(PATIENCE)
        return time.perf_counter() - self.trained

    def end(self) -> None:
        """Nothing of it is left; verify is asked first, for it has a process of its own to end."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        os.close(self._turns)


def measure(pairs: int, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of all three."""
    runners: list[Runner] = []
    updates = WARM_UP + pairs
    with tempfile.TemporaryDirectory() as name:
        try:
            for each, options in (("plain", ()), ("no-exact", ("--no-exact",)), ("exact", ())):
                runners.append(Runner(Path(name), each, options, updates, given))
            for update in range(updates):
                for runner in runners if update % 2 else reversed(runners):
                    runner.turn()
            ends = {runner.name: runner.finish() for runner in reversed(runners)}
        finally:
            for runner in runners:
                runner.end()
    clock = "clock" if given.device.startswith("cuda") else "cpu"
    return {
        "device": given.device,
        "pairs": pairs,
        "measured": clock,
        "runs": [figures(each, runners[0], clock, ends[each.name]) for each in runners],
    }


def figures(runner: Runner, plain: Runner, clock: str, end: float) -> dict[str, Any]:
    taken = [line[clock] for line in runner.lines[WARM_UP:]]
    ratios = sorted(own / other[clock] for own, other in zip(taken, plain.lines[WARM_UP:], strict=True))
    last = runner.lines[-1]
    return {
        "name": runner.name,
        "seconds_an_update": statistics.median(taken),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
        "bound": BOUNDS.get(runner.name),
        "cpu_before_training": runner.lines[0]["start"],
        "clock_to_first_update": runner.until_trained,
        "clock_after_last_update": end,
        "peak_resident": last["resident"],
        "peak_allocated": last["allocated"],
        **{name: last[name] for name in ("parameters", "gradients", "state")},
    }


def show(found: dict[str, Any]) -> None:
    runs = found["runs"]
    print(f"{found['device']}, ratio of {found['measured']} time an update: median of {found['pairs']} interleaved pairs [middle half]\n")
    heads = ("update", "ratio", "", "bound", "peak", "beyond plain", "start", "first", "end")
    row = "{:<9} {:>8} {:>6} {:<15} {:>5} {:>11} {:>13} {:>7} {:>7} {:>7}"
    print(row.format("", *heads))
    for run in runs:
        peak, other = (each["peak_allocated"] or each["peak_resident"] for each in (run, runs[0]))
        times = [f"{run[name]:.2f}s" for name in ("cpu_before_training", "clock_to_first_update", "clock_after_last_update")]
        spread, bound = f"[{run['ratio_low']:.3f}, {run['ratio_high']:.3f}]", f"{run['bound']:.2f}" if run["bound"] else ""
        memory = f"{peak / MIB:.1f} MiB", f"{(peak - other) / MIB:.1f} MiB"
        line = row.format(run["name"], f"{run['seconds_an_update'] * 1e3:.0f}ms", f"{run['ratio']:.3f}", spread, bound, *memory, *times)
        print(line + ("   missed" if run["bound"] and run["ratio"] > run["bound"] else ""))
    held = ", ".join(f"{name} {runs[0][name] / MIB:.1f} MiB" for name in ("parameters", "gradients", "state"))
    print(f"\npeak: {'allocated on the device' if runs[0]['peak_allocated'] else 'resident'}; the plain run holds {held}")
    print("start: CPU time before the first update; first, end: clock to the end of the first update, and from the last one to the exit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="updates that count (%(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4, help="sequences a micro-batch (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a bound is missed")
    given = parser.parse_args()
    found = measure(given.pairs, given)
    show(found)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(given.strict and any(run["bound"] and run["ratio"] > run["bound"] for run in found["runs"]))


if __name__ == "__main__":
    sys.exit(main())
