"""The experiment once more, under the probes of `accumlint verify`: its verdicts must be what is known of each case."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accumlint.runtime.doctor.outcome import EXACT, EXPECTED, MEAN_OF_MEANS, MEAN_OF_MEANS_TOLERANCE, Expected
from accumlint.runtime.doctor.processes import NotRunError, environment, last_words

UPDATES = 2
CODES: Mapping[str, tuple[str, ...]] = {"sync-each": ("ACC103",), "backward-only": ("ACC101",), "mean-of-means": ("ACC201",)}
HOOKLESS_CALLS = 1  # reductions a window of the case that has no hook of its own


@dataclass(frozen=True, slots=True)
class Observed:
    """What verify made of one case: reductions of every window of every rank, codes, and the error that it measured in the first window.

    The error is the largest absolute one against the gradient that the window should have had; None where none was measured.
    """

    expected: Expected
    reductions: tuple[int, ...]
    codes: tuple[str, ...]
    gradient_error: float | None
    deviations: tuple[str, ...] = ()


def reports_of(folder: Path, case: Expected, backend: str, device: str, timeout: float) -> Sequence[Mapping[str, Any]]:
    """Runs one case under verify; what its ranks report. Raises NotRunError where its ranks do not come to their end."""
    from accumlint.runtime.launch import Program, prepare
    from accumlint.runtime.settings import Settings
    from accumlint.runtime.supervise import Ending, supervise

    store = folder / f"rendezvous-{case.name}"
    given = ["--store", str(store), "--backend", backend, "--device", device, "--timeout", str(timeout)]
    command = (sys.executable, str(folder / "pair.py"), *given, "--alone", "--updates", str(UPDATES), "--cases", case.name)
    settings = Settings(
        token="",
        folder="",
        steps=UPDATES,
        timeout=timeout,
        reference="auto",
        graceful=False,
        keep_going=False,
        objective="token",
        controller=os.getpid(),
        host="",
    )
    outcome = supervise(prepare(Program(launcher=command), settings, environment(os.environ, folder)))
    if outcome.ending is Ending.INTERRUPTED:
        raise SystemExit(128 + (outcome.interrupted_by or 2))
    if outcome.ending is not Ending.UPDATES:
        log = folder / "ranks.log"
        said = last_words(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else "it said nothing"
        raise NotRunError(f"{case.name} under verify did not come to its end ({outcome.ending.value}): {said}")
    return outcome.reports


def judged(case: Expected, reports: Sequence[Mapping[str, Any]]) -> Observed:
    """What verify says of a case, and where that is not what is known."""
    from accumlint.judge import judge
    from accumlint.rule import catalogue
    from accumlint.runtime.assemble import assemble

    rules = catalogue().values()
    codes = {finding.code for trace in assemble(reports).traces for finding in judge(trace, rules) if finding.severity}
    steps = [row for report in reports for row in report["events"] if row["kind"] == "step"]
    error = next((row["numbers"].get("reference", {}).get("max_abs") for row in steps), None)
    found = Observed(case, tuple(count for report in reports for count in reductions(report)), tuple(sorted(codes)), error)
    troubles = [f"internal problem: {trouble}" for report in reports for trouble in report["troubles"]]
    return Observed(case, found.reductions, found.codes, error, (*_deviations(found, len(reports)), *troubles))


def reductions(report: Mapping[str, Any]) -> Iterator[int]:
    """Buckets reduced in each window of a rank."""
    count = 0
    for row in report["events"]:
        count += row["kind"] == "reduce"
        if row["kind"] == "step":
            yield count
            count = 0


def _deviations(found: Observed, ranks: int) -> Iterator[str]:
    case = found.expected
    calls = case.calls or HOOKLESS_CALLS
    if found.reductions != (calls,) * (ranks * UPDATES):
        yield f"verify saw {', '.join(map(str, found.reductions)) or 'no'} reductions in the windows of the ranks, not {calls} in each"
    if found.codes != CODES.get(case.name, ()):
        yield f"verify reports {', '.join(found.codes) or 'nothing'}, not {', '.join(CODES.get(case.name, ())) or 'nothing'}"
    error = float("nan") if found.gradient_error is None else found.gradient_error
    if case.right and not error < EXACT:
        yield f"verify measures a gradient error of {error:.3g}, not under {EXACT:g}"
    if not case.right and not abs(error - MEAN_OF_MEANS) <= MEAN_OF_MEANS_TOLERANCE:
        yield f"verify measures a gradient error of {error:.5f}, not {MEAN_OF_MEANS} ± {MEAN_OF_MEANS_TOLERANCE:g}"


def observe_all(folder: Path, backend: str, device: str, timeout: float) -> Iterator[Observed]:
    """Every case, one after the other."""
    for case in EXPECTED:
        yield judged(case, reports_of(folder, case, backend, device, timeout))
