"""The gradient that reached the optimizer against the one that the window should have had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accumlint.runtime.assemble.contributions import calls_by_site
from accumlint.runtime.assemble.windows import SharedWindow
from accumlint.runtime.checks.context import Run, confirmed, share, unobserved, violated
from accumlint.runtime.checks.scaling import unexplained, without_gradient
from accumlint.runtime.checks.weights import SUM, UNIFORM, counted_by_framework, own_factor, uncovered, window_sum
from accumlint.runtime.checks.window import ORDER
from accumlint.verdict import Check, Topic

# Relative L2 by dtype of the gradient, and beside it the bound on the largest difference, which depends on scale.
TOLERANCES = {"float64": 1e-12, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
LARGEST = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
EVIDENCE = (*UNIFORM, *SUM, *ORDER, "ACC101", "ACC102", "ACC108", "ACC111", "ACC402", "ACC404", "ACC405", "ACC406")


def gradient(run: Run) -> Check:
    """Relative L2 and largest difference; coefficients decide, the gradient confirms."""
    topic = Topic.GRADIENT
    found = [(window, reference) for window in run.complete if (reference := reference_of(window.ranks[0].step)) is not None]
    compared = [(window, reference) for window, reference in found if reference.get("relative") is not None]
    if not compared:
        why = next((reference.get("why") for _, reference in found if reference.get("why")), "")
        return unobserved(topic, _why(found, str(why or "")))
    lines = [_line(run.name_of(window), reference) for window, reference in compared][:6]
    numbers = {"windows": [dict(reference) for _, reference in compared]}
    if nothing := without_gradient([window.ranks[0] for window, _ in compared]):
        return unobserved(topic, nothing, lines, numbers)
    worst = max((reference for _, reference in compared), key=lambda reference: reference["relative"] / _bound(run, reference))
    text = f"relative L2 {worst['relative']:.2e}" + (
        f", largest difference {worst['max_abs']:.2e}" if worst.get("max_abs") is not None else ""
    )
    text += f" ({worst['dtype'].removeprefix('torch.')}, bound {_bound(run, worst):g})"
    if worst["relative"] <= _bound(run, worst):
        return confirmed(topic, f"The gradient is the one of the whole window: {text}.", lines, numbers)
    codes = run.guilty(*EVIDENCE)
    if codes:
        return violated(topic, codes, f"The gradient is not the one of the whole window: {text}.", lines, numbers)
    if any(len(calls_by_site(window)) > 1 for window, _ in compared):
        return unobserved(topic, "The loss has several terms: the mean over the targets of one of them is no reference.", (), numbers)
    factor = own_factor(run)
    if factor is not None and factor != 1 and all(abs(each["relative"] - abs(factor - 1)) <= _bound(run, each) for _, each in compared):
        return unobserved(topic, f"The gradient is {share(factor)} times the mean over all targets, as the weights are.", lines, numbers)
    if counted_by_framework(run) and _follows_weights(run, compared):
        return unobserved(topic, "The gradient is smaller than the mean over all targets by what the weights are.", lines, numbers)
    unexplained = "" if run.explained else "; no finding explains it"
    what = f"The gradient is not the mean over all targets of the window: {text}{unexplained}."
    return replace(unobserved(topic, what, lines, numbers), doubt="" if run.explained or _has_reason(run) else what)


def _follows_weights(run: Run, compared: list[tuple[SharedWindow, Mapping[str, Any]]]) -> bool:
    """Whether each window's gradient differs from the reference by what its weights add up to, and no more."""
    sums = [window_sum(run, window) for window, _ in compared]
    pairs = [(reference, each) for (_, reference), each in zip(compared, sums, strict=True)]
    return all(each is not None and abs(reference["relative"] - abs(each - 1)) <= _bound(run, reference) for reference, each in pairs)


def _has_reason(run: Run) -> bool:
    """Whether the run shows why gradients differ: code of the user's own changes them, ranks average parameters, a window is short, or
    terms are not covered."""
    averages = any(fact["name"] == "averages-parameters" for report in run.reports for fact in report.get("facts", ()))
    changed = any(unexplained(window.ranks[0]) for window in run.complete)
    short = any(window.size < run.assembly.k for window in run.complete)
    return averages or changed or short or bool(uncovered(run)) or (run.world > 1 and run.reduction_factor is None)


def reference_of(step: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return None if step is None else step["numbers"].get("reference")


def _bound(run: Run, reference: Mapping[str, Any]) -> float:
    return run.tolerance or TOLERANCES.get(str(reference.get("dtype", "")).removeprefix("torch."), 1e-3)


def _why(found: object, why: str) -> str:
    if not found:
        return "No reference was computed in this run."
    return f"No reference: {why}." if why else "No reference was computed."


def _line(name: str, reference: Mapping[str, Any]) -> str:
    text = f"{name}: relative L2 {reference['relative']:.2e}"
    if reference.get("max_abs") is not None:
        bound = LARGEST.get(str(reference.get("dtype", "")).removeprefix("torch."))
        text += f", largest difference {reference['max_abs']:.2e}" + (f" (the usual bound is {bound:g})" if bound else "")
    worst = reference.get("worst") or ()
    if worst and reference["relative"] > 1e-9:
        text += "; furthest off: " + ", ".join(f"{name} {value:.1e}" for name, value in worst[:5])
    return text
