"""Examines this machine: the experiment with its known outcome, and what there is to observe."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accumlint.runtime.doctor.observed import CODES, Observed, observe_all
from accumlint.runtime.doctor.outcome import Case, judge
from accumlint.runtime.doctor.points import FRAMEWORKS, POINTS
from accumlint.runtime.doctor.processes import NotRunError, Process, ended, finish, scratch

RANKS = 2
PARTS = frozenset({"experiment", "verify"})


@dataclass(frozen=True, slots=True)
class Experiment:
    """The experiment as it was run; `failure` says why it has no cases, `seconds` include the start of the ranks."""

    backend: str
    device: str
    cases: tuple[Case, ...]
    seconds: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """What `accumlint doctor` found. `torch` is what the inspection of torch said; `observed` is empty where it was left out."""

    torch: Mapping[str, Any]
    experiment: Experiment
    frameworks: Mapping[str, str]
    observed: tuple[Observed, ...] = ()

    @property
    def deviations(self) -> tuple[str, ...]:
        """What is not as it must be, a sentence each."""
        wrong = [f"{case.expected.name}: {each}" for case in self.experiment.cases for each in case.deviations]
        wrong += [f"{each.expected.name}: {deviation}" for each in self.observed for deviation in each.deviations]
        missing = [point for point in POINTS if point.needed and not self.has(point.names)]
        return (*wrong, *(f"this torch has no {point.names[0]}: not observed are {point.without}" for point in missing))

    @property
    def status(self) -> int:
        """0 all as expected, 1 something deviates, 3 the experiment could not be run."""
        if self.experiment.failure:
            return 3
        return 1 if self.deviations else 0

    def has(self, names: Sequence[str]) -> bool:
        return any(name in self.torch["found"] for name in names)


def torch_is_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def examine(device: str, timeout: float, parts: frozenset[str] = PARTS, say: Callable[[str], object] = lambda text: None) -> Examination:
    """Inspects torch, runs the experiment, and runs it again under verify, each in processes of their own.

    `device` is "auto", "cpu" or "cuda", `timeout` in seconds for each part, `parts` names of PARTS; `say` is told what
    goes on. Raises NotRunError when torch cannot be inspected: when it cannot be imported, or there is no such device.
    """
    with scratch() as folder:
        say("inspecting torch")
        inspection = inspect(folder, timeout)
        backend, place = _place(device, inspection)
        run, observed = Experiment(backend, place, (), 0.0), []
        if "experiment" in parts:
            say("two ranks, five ways to accumulate")
            run = experiment(folder, backend, place, timeout)
        if "verify" in parts and not run.failure:
            try:
                for each in observe_all(folder, backend, place, timeout):
                    observed.append(each)
                    say(f"{each.expected.name} under verify")
            except NotRunError as error:
                run = replace(run, failure=str(error))
        return Examination(inspection, run, frameworks(), tuple(observed))


def _place(device: str, inspection: Mapping[str, Any]) -> tuple[str, str]:
    """Backend and device of the experiment."""
    cards = len(inspection["devices"])
    if device == "cuda" and not cards:
        raise NotRunError("There is no CUDA device here; `--device cpu` runs the experiment on the CPU.")
    chosen = "cuda" if device == "cuda" or (device == "auto" and cards >= RANKS) else "cpu"
    nccl = chosen == "cuda" and cards >= RANKS and inspection["backends"].get("nccl", False)
    return ("nccl" if nccl else "gloo"), chosen


def inspect(folder: Path, timeout: float) -> dict[str, Any]:
    """What torch has; raises NotRunError when it cannot be imported."""
    process = Process(folder, "inspection", ["inspection.py"])
    with ended([process]):
        process.send(json.dumps([name for point in POINTS for name in point.names]))
        finish([process], timeout)
    answer: dict[str, Any] = json.loads(process.output.strip().splitlines()[-1])
    return answer


def experiment(folder: Path, backend: str, device: str, timeout: float) -> Experiment:
    """Runs the two ranks; a failure is told in the result."""
    common = ["--store", "rendezvous", "--backend", backend, "--device", device, "--timeout", str(timeout), "--lifeline"]
    started = time.monotonic()
    processes: list[Process] = []
    try:
        with ended(processes):
            for rank in range(RANKS):
                arguments = ["experiment.py", "--rank", str(rank), "--out", f"rank-{rank}.json", *common]
                processes.append(Process(folder, f"rank {rank}", arguments))
            finish(processes, timeout)
        results = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
        return Experiment(backend, device, judge(results), time.monotonic() - started)
    except NotRunError as error:
        return Experiment(backend, device, (), time.monotonic() - started, str(error))


def frameworks() -> dict[str, str]:
    """The frameworks that are installed, with their versions."""
    found = {}
    for name in FRAMEWORKS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def document(examination: Examination) -> dict[str, Any]:
    """The examination as data for JSON and for the report."""
    run = examination.experiment
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch": {name: examination.torch[name] for name in ("version", "cuda", "backends", "devices")},
        "experiment": {
            "backend": run.backend,
            "device": run.device,
            "seconds": round(run.seconds, 2),
            "failure": run.failure or None,
            "cases": [_case(case) for case in run.cases],
        },
        "verify": [_observed(each) for each in examination.observed],
        "hook_points": [
            {"names": list(point.names), "found": examination.has(point.names), "needed": point.needed, "without": point.without}
            for point in POINTS
        ],
        "frameworks": [
            {"name": name, "version": examination.frameworks.get(name), "observed": observed} for name, observed in FRAMEWORKS.items()
        ],
        "deviations": list(examination.deviations),
        "status": examination.status,
    }


def _case(case: Case) -> dict[str, Any]:
    return {
        "name": case.expected.name,
        "description": case.expected.says,
        "hook_calls": list(case.calls),
        "expected_hook_calls": case.expected.calls,
        "right": case.expected.right,
        "gradient_max_abs_error": case.gradient_error,
        "weight_max_abs_error": case.weight_error,
        "between_ranks": case.between_ranks,
        "deviations": list(case.deviations),
    }


def _observed(each: Observed) -> dict[str, Any]:
    return {
        "name": each.expected.name,
        "codes": list(each.codes),
        "expected_codes": list(CODES.get(each.expected.name, ())),
        "reductions": list(each.reductions),
        "gradient_max_abs_error": each.gradient_error,
        "deviations": list(each.deviations),
    }
