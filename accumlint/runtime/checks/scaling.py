"""The loss scale, and what happened to `.grad` between the last backward and the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from accumlint.runtime.assemble.contributions import divisor_of
from accumlint.runtime.assemble.windows import LEFT_OUT, RankWindow
from accumlint.runtime.checks.context import Run, confirmed, counted, share, unobserved, violated
from accumlint.runtime.checks.said import said
from accumlint.trace import Kind
from accumlint.verdict import Check, Topic

AMP = ("ACC401", "ACC402", "ACC403", "ACC404", "ACC405", "ACC406")
CHANGES = {Kind.UNSCALE.value: "unscale", Kind.CLIP.value: "clip"}
EXACT = 1e-3


def amp(run: Run) -> Check:
    """Scaled, unscaled and updated once a window."""
    topic = Topic.AMP
    codes = run.guilty(*AMP)
    scales = [float(row["numbers"]["scale"]) for row in run.rows(Kind.BACKWARD) if row["scaled"] and row["numbers"].get("scale")]
    left_out = sum(1 for row in run.rows(Kind.STEP) if LEFT_OUT in row["options"])
    what = f"Scale {' → '.join(share(scale) for scale in dict.fromkeys(scales))}"
    if left_out:
        what += f"; {counted(left_out, 'step')} left out, for the gradients were not finite"
    numbers = {"scales": scales, "left_out": left_out}
    if codes:
        return violated(topic, codes, f"{said(codes)} {what}." if scales else f"{said(codes)} No loss was scaled.", (), numbers)
    if not scales:
        return unobserved(topic, "No loss was scaled in this run.")
    return confirmed(topic, f"{what}; the same in all micro-batches of a window.", (), numbers)


def normalisation(run: Run) -> Check:
    """Every change of the gradients before the step is one scalar."""
    topic = Topic.NORMALISATION
    codes = run.guilty("ACC308", "ACC403", "ACC405")
    windows = [window.ranks[0] for window in run.complete]
    told = [factors(window) for window in windows]
    lines = [
        f"window {number + 1}: " + (", ".join(f"{name} × {share(value)}" for name, value in each) or "nothing")
        for number, each in enumerate(told)
    ]
    numbers = {"factors": [[[name, value] for name, value in each] for each in told]}
    if codes:
        return violated(topic, codes, said(codes), lines[:6], numbers)
    if not any(window.step is not None and window.step["numbers"].get("drift") is not None for window in windows):
        return unobserved(topic, "No gradient was seen before a step.")
    if nothing := without_gradient(windows):
        return unobserved(topic, nothing, lines[:6], numbers)
    if any(unexplained(window) for window in windows):
        return unobserved(
            topic, "Between the last backward and the step the gradients changed by more than one scalar.", lines[:6], numbers
        )
    names = list(dict.fromkeys(name for each in told for name, _ in each))
    return confirmed(
        topic, f"Before the step: {', '.join(names)}." if names else "Nothing scales the gradients before the step.", lines[:6], numbers
    )


def without_gradient(windows: Sequence[RankWindow]) -> str:
    """What is wrong with gradients that are zero or not finite in some window; "" where none are."""
    for number, window in enumerate(windows, start=1):
        size = window.step["numbers"].get("magnitude") if window.step is not None else None
        if size == 0:
            return f"The gradients that reached the step of window {number} are zero."
        if size is not None and not math.isfinite(size):
            return f"The gradients that reached the step of window {number} are not finite."
    return ""


def factors(window: RankWindow) -> list[tuple[str, float]]:
    """By what the gradients were multiplied between the last backward and the step, in order."""
    last = window.backwards[-1]["index"] if window.backwards else -1
    found: list[tuple[str, float]] = []
    expected = 1.0
    for row in window.rows:
        if row["index"] <= last:
            continue
        numbers = row["numbers"]
        drift = numbers.get("drift")
        if drift is not None:
            if not math.isclose(drift, expected, rel_tol=EXACT) and not _reduced(window, row["index"]):
                found.append(("unseen", drift / expected if expected else drift))
            expected = 1.0
        divisor = divisor_of(row) if row["kind"] == Kind.NORMALIZE.value else None
        if divisor:
            found.append(("normalise", 1 / divisor))
            expected /= divisor
        elif row["kind"] in CHANGES and numbers.get("factor") is not None:
            found.append((CHANGES[row["kind"]], float(numbers["factor"])))
    return found


def unexplained(window: RankWindow) -> bool:
    """Whether some change of the gradients was no scalar."""
    last = window.backwards[-1]["index"] if window.backwards else -1
    residuals = (
        row["numbers"].get(key)
        for row in window.rows
        if row["index"] > last
        for key in ("residual", "drift_residual")
        if not _reduced(window, row["index"])
    )
    return any(each is not None and (each > EXACT or math.isnan(each)) for each in residuals)


def _reduced(window: RankWindow, before: int) -> bool:
    return any(row["kind"] == Kind.REDUCE.value and "manual" in row["options"] and row["index"] < before for row in window.rows)
