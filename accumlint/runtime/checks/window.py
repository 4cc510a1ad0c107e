"""Where windows end, what happens in which order, and how often the schedule moves."""

from __future__ import annotations

from dataclasses import replace

from accumlint.runtime.checks.context import Run, confirmed, counted, listed, unobserved, violated
from accumlint.runtime.checks.said import said
from accumlint.runtime.checks.shape import oddity
from accumlint.trace import Kind
from accumlint.verdict import Check, Topic

BOUNDARY = ("ACC301", "ACC306", "ACC307", "ACC319")
ORDER = ("ACC302", "ACC303", "ACC304", "ACC308", "ACC309", "ACC312", "ACC313", "ACC314", "ACC315")
SCHEDULE = ("ACC305",)
TEMPLATE = (Kind.BACKWARD, Kind.UNSCALE, Kind.NORMALIZE, Kind.CLIP, Kind.STEP, Kind.SCALER_UPDATE, Kind.ZERO, Kind.SCHEDULE, Kind.AVERAGE)


def boundary(run: Run) -> Check:
    """The sizes of the windows."""
    topic = Topic.BOUNDARY
    sizes = [window.size for window in run.complete]
    codes = run.guilty(*BOUNDARY)
    if not any(row["numbers"].get("optimizers") for report in run.reports for row in report["events"]):
        return unobserved(topic, "No backward was seen that reaches an optimizer's parameters.")
    if not sizes:
        return unobserved(topic, "No window was seen to its end: no optimizer stepped after a backward.")
    what = (
        f"Updates after {listed(sizes)} micro-batches."
        if max(sizes) > 1
        else "An update after every micro-batch: this run accumulates nothing."
    )
    if codes:
        return violated(topic, codes, f"{said(codes)} {what}", (), {"sizes": sizes})
    if run.expect_k is not None and run.assembly.k != run.expect_k:
        return violated(
            topic, (), f"{what} {counted(run.expect_k, 'micro-batch')} were expected.", (), {"sizes": sizes, "expected": run.expect_k}
        )
    if strange := oddity(run):
        return replace(unobserved(topic, strange, (), {"sizes": sizes}), doubt="" if run.explained else strange)
    return confirmed(topic, what, (), {"sizes": sizes})


def order(run: Run) -> Check:
    """What belongs to the update happens once, at its end, in order."""
    topic = Topic.ORDER
    codes = run.guilty(*ORDER)
    seen = _sequence(run)
    text = " → ".join(seen)
    if codes:
        return violated(topic, codes, f"{said(codes)} The first window: {text}." if seen else said(codes))
    if not seen:
        return unobserved(topic, "No window was seen to its end.")
    return confirmed(topic, f"Every window: {text}.")


def schedule(run: Run) -> Check:
    """Steps of the scheduler against updates."""
    topic = Topic.SCHEDULE
    steps = len(run.rows(Kind.SCHEDULE))
    updates = sum(1 for window in run.complete if window.ranks[0].updated)
    codes = run.guilty(*SCHEDULE)
    averages = len(run.rows(Kind.AVERAGE))
    what = f"{counted(steps, 'step')} of schedules in {counted(updates, 'update')}"
    numbers = {"scheduler_steps": steps, "updates": updates, "averages": averages}
    if codes:
        return violated(topic, codes, f"{what}.", (), numbers)
    if not steps:
        return unobserved(topic, "No scheduler stepped in this run.", (), numbers)
    return confirmed(topic, f"{what}.", (), numbers)


def _sequence(run: Run) -> list[str]:
    """The kinds of events of the first complete window, in order, each once, with what follows its step."""
    window = next((window.ranks[0] for window in run.complete), None)
    if window is None or window.step is None:
        return []
    wanted = {kind.value for kind in TEMPLATE}
    own = [row for row in window.rows if row["kind"] in wanted and row["index"] >= window.backwards[0]["index"]]
    after: list[str] = []
    for row in run.reports[0]["events"][window.step["index"] + 1 :]:
        if row["kind"] in {Kind.FORWARD.value, Kind.BACKWARD.value, Kind.DATA.value, Kind.STEP.value}:
            break
        if row["kind"] in wanted:
            after.append(row["kind"])
    return list(dict.fromkeys([*(row["kind"] for row in own), *after]))
