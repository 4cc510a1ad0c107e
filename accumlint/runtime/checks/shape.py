"""Whether the windows of a run have a shape that somebody can mean: as long as each other, but for the last of a pass over the data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from accumlint.runtime.assemble.facts import leaves_out, usual_step
from accumlint.runtime.assemble.loops import Loops
from accumlint.runtime.assemble.sources import place_of
from accumlint.runtime.assemble.weights import uniform
from accumlint.runtime.assemble.windows import SharedWindow, stack_of
from accumlint.runtime.checks.context import Run, listed
from accumlint.runtime.checks.weights import EXACT, window_sum
from accumlint.trace import Kind

MEANT = ("leaves-out", "warm-up", "windows-by-size", "gradients-by-hand")  # facts that explain windows of other sizes
HELD = {"gated", "hook", "closure"}  # options of steps that something else than the loop's own boundary lets through


def oddity(run: Run) -> str:
    """What is strange about the sizes of the windows, as a sentence; "" where nothing is."""
    if not run.complete or any(trace.fact(name) for trace in run.assembly.traces[:1] for name in MEANT):
        return ""
    loops = Loops(run.reports[0])
    for optimizer in dict.fromkeys(window.optimizer for window in run.complete):
        windows = [window for window in run.complete if window.optimizer == optimizer]
        if any(HELD & set(each.step["options"]) for window in windows for each in window.ranks[:1] if each.step is not None):
            continue
        said = _uneven(run, windows, loops) or _share_of_a_loop(run, windows, loops) or _twice(run, optimizer)
        if said:
            return said
    return ""


def _uneven(run: Run, windows: Sequence[SharedWindow], loops: Loops) -> str:
    """Windows of other sizes than most, though the pass over the data goes on behind them, and the weights do not make up for it."""
    sizes = Counter(window.size for window in windows)
    usual = max(sizes, key=lambda size: (sizes[size], size))
    step = usual_step(run.assembly.windows)
    odd = [each for each in windows if each.size != usual and not ends_pass(each, loops) and not leaves_out(each.ranks[0], step)]
    if not odd or _grows([window.size for window in windows]) or _by_data(run, windows):
        return ""
    sums = [window_sum(run, window) for window in windows]
    known = [each for each in sums if each is not None]
    if len(known) == len(sums) and all(math.isclose(each, known[0], rel_tol=EXACT) for each in known):
        return ""
    what = listed([window.size for window in windows])
    stopped = odd[-1] is windows[-1] and run.reports[0]["ended"] == "updates"
    return (
        f"Updates after {what} micro-batches: {run.name_of(odd[0])} has {odd[0].size} where others have {usual}, and it was not seen "
        f"that a pass over the data ends there{'; more --steps would tell' if stopped else ''}."
    )


def _grows(sizes: Sequence[int]) -> bool:
    """Over a warm-up: a first window alone that is shorter is none."""
    return list(sizes) == sorted(sizes) and len(set(sizes)) > 2


def ends_pass(window: SharedWindow, loops: Loops) -> bool:
    """Whether the window's last micro-batch is known to be the last of a pass over the data."""
    backwards = window.ranks[0].backwards
    return bool(backwards) and loops.ends_pass(backwards[-1])


def _by_data(run: Run, windows: Sequence[SharedWindow]) -> bool:
    """Whether the source says that the data decide when to step."""
    for window in windows:
        stack = stack_of(run.reports[0], window.ranks[0].step) if window.ranks[0].step is not None else []
        event = run.assembly.hints.event(Kind.STEP, place_of(stack[0])) if stack else None
        if event is not None and any(guard.cause == "data" for guard in event.guards):
            return True
    return False


def _share_of_a_loop(run: Run, windows: Sequence[SharedWindow], loops: Loops) -> str:
    """An update in every turn of a loop, each from losses that are divided by the number of its turns."""
    if any(window.size != 1 for window in windows):
        return ""
    passes: dict[tuple[int, int], int] = Counter()
    shares: set[float] = set()
    for window in windows:
        own = window.ranks[0]
        turns = loops.turns(own.backwards[-1]) if own.backwards else ()
        if not turns:
            return ""
        passes[turns[-1].line, turns[-1].entry] += 1
        for _, loss in own.losses:
            coefficient = uniform(loss)
            if coefficient is None or not loss["units"]:
                return ""
            shares.add(round(coefficient * float(loss["units"]), 6))
    *whole, _ = passes.values()
    if len(shares) != 1 or not whole or len(set(whole)) != 1 or whole[0] < 2 or not math.isclose(shares.pop() * whole[0], 1, rel_tol=EXACT):
        return ""
    return f"An update after every micro-batch, each from 1/{whole[0]} of its loss, in a loop of {whole[0]} turns."


def _twice(run: Run, optimizer: int) -> str:
    """A step on gradients that the step before has used already."""
    fresh, before = False, None
    for row in run.reports[0]["events"]:
        if row["kind"] == Kind.BACKWARD.value and optimizer in row["numbers"].get("optimizers", ()):
            fresh = True
        elif row["kind"] == Kind.ZERO.value and optimizer in row["targets"]:
            before = None
        elif row["kind"] == Kind.STEP.value and optimizer in row["targets"]:
            if not fresh and before is not None:
                return "Two steps on the same gradients: nothing was added to them and nothing cleared in between."
            fresh, before = False, row
    return ""
