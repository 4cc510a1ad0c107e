"""What one target counts: the same for all of a window, and 1/N after the reduction."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from accumlint.runtime.assemble.contributions import Call, calls_by_site, scale_of
from accumlint.runtime.assemble.weights import uniform as uniform_coefficient
from accumlint.runtime.assemble.windows import SharedWindow
from accumlint.runtime.checks.context import Run, confirmed, share, unobserved, violated
from accumlint.runtime.checks.scaling import factors, unexplained
from accumlint.runtime.probes.trainer import TRUSTED
from accumlint.trace import Kind
from accumlint.verdict import Check, Topic
from accumlint.weight import Quantity

COUNTED = ("ACC207", "ACC209")  # what divides is no count of the targets: seen in the single weights, or in what they add up to
UNIFORM = ("ACC201", "ACC204", "ACC208", *COUNTED)
SUM = ("ACC202", "ACC203", "ACC205", "ACC206", "ACC212", "ACC215", "ACC319", *COUNTED)
EXACT = 2e-3
NAME = re.compile(r"[A-Za-z_][\w.]*")


def uniform(run: Run) -> Check:
    """The coefficients of all targets of a window, on all ranks."""
    topic = Topic.WEIGHTS
    spreads = _spreads(run)
    codes = tuple(code for code in run.guilty(*UNIFORM) if code not in COUNTED or not spreads or _varies(spreads))
    lines = [f"{run.name_of(window)}: {_told(window)}" for window in run.complete][:6]
    numbers = {"coefficients": [[low, high] for low, high in spreads]}
    why = uncovered(run)
    if codes:
        return violated(topic, codes, f"Targets of one window do not count the same{_from_to(spreads)}.", lines, numbers)
    if why:
        return unobserved(topic, why, lines, numbers)
    if not spreads:
        return unobserved(topic, "No loss call with a coefficient was seen.")
    if _varies(spreads):
        unexplained = "" if run.explained else " No finding says that this is wrong: see how they count."
        return unobserved(topic, f"Targets of one window count differently{_from_to(spreads)}.{unexplained}", lines, numbers)
    return confirmed(topic, "All targets of a window count the same before the reduction.", lines, numbers)


Spread = tuple[float, float | None]


def _spreads(run: Run) -> list[Spread]:
    """The least and the largest weight of a target of each loss in each window; None where one call has several."""
    calls_of = (calls for window in run.complete for calls in calls_by_site(window).values())
    return [(low, high) for calls in calls_of for low, high in [_range(calls)] if low is not None]


def _varies(spreads: Sequence[Spread]) -> bool:
    return any(high is None or not math.isclose(low, high, rel_tol=EXACT) for low, high in spreads)


def _from_to(spreads: Sequence[Spread]) -> str:
    """The window in which they are furthest apart, as the end of a clause."""
    known = [(low, high) for low, high in spreads if high is not None and low > 0 and not math.isclose(low, high, rel_tol=EXACT)]
    if not known:
        return ""
    low, high = max(known, key=lambda pair: pair[1] / pair[0])
    return f", from {share(low)} to {share(high)} each"


def total(run: Run) -> Check:
    """The coefficients times the counts, summed over the window and all ranks, after the reduction."""
    topic = Topic.SUM
    sums = [window_sum(run, window) for window in run.complete]
    known = [each for each in sums if each is not None]
    off = any(not math.isclose(each, 1.0, rel_tol=EXACT) for each in known)
    codes = tuple(code for code in run.guilty(*SUM) if code not in COUNTED or off)
    lines = [f"{run.name_of(window)}: {share(each)}" for window, each in zip(run.complete, sums, strict=True) if each is not None][:6]
    if codes:
        return violated(topic, codes, f"The weights of a window do not add up to 1{_off(sums)}.", lines, {"sums": sums})
    why = uncovered(run)
    if why or not known:
        return unobserved(topic, why or _no_sum(run), lines, {"sums": sums})
    if all(math.isclose(each, 1.0, rel_tol=EXACT) for each in known):
        return confirmed(topic, "The weights of every window add up to 1.", lines, {"sums": sums})
    other = _divided_by_another(run)
    check = unobserved(topic, other or _other_sum(run, sums), lines, {"sums": sums})
    if other and not run.explained:
        return replace(check, doubt=other)
    explained = run.explained or (own_factor(run) is not None and not _is_of_k(run)) or _is_tail(run, sums) or counted_by_framework(run)
    return check if explained else replace(check, doubt=check.summary)


def _off(sums: Sequence[float | None]) -> str:
    """What they add up to where it is furthest from 1, as the end of a clause."""
    known = [each for each in sums if each is not None and not math.isclose(each, 1.0, rel_tol=EXACT)]
    return f", but to {share(max(known, key=lambda each: abs(each - 1)))}" if known else ""


def window_sum(run: Run, window: SharedWindow) -> float | None:
    """None where a loss was not recorded, the reduction was not measured, or the gradients were changed by no scalar."""
    sites = calls_by_site(window)
    factor = 1.0 if run.world < 2 else run.reduction_factor
    if len(sites) != 1 or factor is None or any(unexplained(each) for each in window.ranks):
        return None
    found = 0.0
    scaled = {rank.rank: math.prod(value for name, value in factors(rank) if name in {"normalise", "unseen"}) for rank in window.ranks}
    for calls in sites.values():
        for row, loss, rank in calls:
            if loss["units"] == 0:
                continue
            coefficient = uniform_coefficient(loss)
            if coefficient is None:
                return None
            found += coefficient * float(loss["units"]) / (scale_of(row) or 1.0) * scaled[rank.rank]
    return found * factor


def uncovered(run: Run) -> str:
    """Why the losses of some backward are not all known; "" where they are."""
    for window in run.complete:
        for rank in window.ranks:
            for row in rank.backwards:
                if row["numbers"].get("covered") is False:
                    return f"Not covered: {row['numbers'].get('why') or 'a loss was not recorded'}."
    return ""


def own_factor(run: Run) -> float | None:
    """The one number that the weights of every whole window add up to: 1, or a factor that the objective has of its own."""
    whole = [window_sum(run, window) for window in run.complete if window.size >= run.assembly.k]
    known = [each for each in whole if each is not None]
    return known[0] if known and all(math.isclose(each, known[0], rel_tol=EXACT) for each in known) else None


def counted_by_framework(run: Run) -> bool:
    """Whether the divisor of every window is a framework's own count, which takes in more labels than the losses see as targets.

    Transformers counts the first label of each row, which the shift leaves out.
    """
    sums = [_within_counts(run, window) for window in run.complete]
    return bool(sums) and all(sums)


def _within_counts(run: Run, window: SharedWindow) -> bool:
    rows = [row for rank in window.ranks for row in rank.backwards]
    losses = [loss for rank in window.ranks for _, loss in rank.losses]
    units, elements = (sum(float(loss[name] or 0) for loss in losses) for name in ("units", "elements"))
    found = window_sum(run, window)
    if found is None or not elements or not all(TRUSTED in row["options"] for row in rows):
        return False
    return units / elements * (1 - EXACT) <= found <= 1 + EXACT


def _divided_by_another(run: Run) -> str:
    """A mean that a number with a name divides, and K does not: a number in place may be the objective's own."""
    k = run.assembly.k
    for event in (each for trace in run.assembly.traces[:1] for each in trace.of(Kind.BACKWARD)):
        weight = event.weight
        if k < 2 or weight is None or weight.of(Quantity.ACCUMULATION) or not any(one.implicit for one in weight.of(Quantity.UNITS)):
            return ""
        named = [one for one in weight.of(Quantity.CONSTANT) if one.power == -1 and one.value and NAME.fullmatch(one.text)]
        if len(named) != 1 or len(weight.factors) != 2 or named[0].value in {None, 1, k} or named[0].value.denominator != 1:
            return ""
        return f"`{named[0].text}`, which is {named[0].value}, divides each of {k} means: their weights do not add up to 1."
    return ""


def _is_of_k(run: Run) -> bool:
    """Whether the weights add up to K or to 1/K: a division that is missing, or made twice. A half is too common to tell for K = 2."""
    factor, k = own_factor(run), run.assembly.k
    return factor is not None and k > 2 and any(math.isclose(factor, each, rel_tol=EXACT) for each in (k, 1 / k))


def _is_tail(run: Run, sums: Sequence[float | None]) -> bool:
    """Whether only windows of fewer micro-batches are off."""
    pairs = zip(run.complete, sums, strict=True)
    return all(window.size < run.assembly.k for window, each in pairs if each is not None and not math.isclose(each, 1.0, rel_tol=EXACT))


def _other_sum(run: Run, sums: Sequence[float | None]) -> str:
    """What to say of sums that are not 1, and that no rule takes for a mistake."""
    pairs = zip(run.complete, sums, strict=True)
    off = [(window, each) for window, each in pairs if each is not None and not math.isclose(each, 1.0, rel_tol=EXACT)]
    window, value = off[0]
    name, k = run.name_of(window), run.assembly.k
    if len(off) < len(sums) and window.size < k and math.isclose(value, window.size / k, rel_tol=EXACT):
        return (
            f"The weights of {name}, which has {window.size} of {k} micro-batches, add up to {share(value)}: it is divided as a whole one."
        )
    if counted_by_framework(run):
        return f"The weights of {name} add up to {share(value)}: the framework's own count takes in labels that are no targets of the loss."
    if _is_of_k(run):
        what = "divides twice" if value < 1 else "divides nothing"
        return f"The weights of {name} add up to {share(value)} in windows of {k} micro-batches: perhaps {k} {what}."
    return f"The weights of {name} add up to {share(value)}: a factor of the objective's own, or a convention no rule judges."


def _no_sum(run: Run) -> str:
    if any(len(calls_by_site(window)) > 1 for window in run.complete):
        return "The loss has several terms: each has its own weights."
    if run.world > 1 and run.reduction_factor is None:
        return "The factor of the reduction was not measured."
    return "No window has one coefficient for each of its losses."


def _range(calls: Sequence[Call]) -> tuple[float | None, float | None]:
    found = [(uniform_coefficient(loss), scale_of(row) or 1.0) for row, loss, _ in calls if loss["units"]]
    if not found:
        return None, None
    if any(each is None for each, _ in found):
        return 0.0, None
    values = [each / scale for each, scale in found if each is not None]
    return min(values), max(values)


def _told(window: SharedWindow) -> str:
    """Coefficient × targets of each micro-batch, the ranks one after the other."""
    parts: list[str] = []
    for rank in window.ranks:
        cells: list[str] = []
        for row, loss in rank.losses:
            if loss["units"] == 0:
                cells.append("no targets")
                continue
            coefficient = uniform_coefficient(loss)
            value = "mixed" if coefficient is None else share(coefficient / (scale_of(row) or 1.0))
            cells.append(f"{value} × {loss['units']:g}" if loss["units"] is not None else value)
        shown = ", ".join(cells[:8]) + (", …" if len(cells) > 8 else "")
        parts.append(f"rank {rank.rank}: {shown}" if len(window.ranks) > 1 else shown)
    return "; ".join(parts[:8])
