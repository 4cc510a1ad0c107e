"""What can be said of a window's gradient once its numbers are there. Plain numbers: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

NOT_OBSERVED, NOT_SEPARABLE = "not observed", "not separable"
WORST = 5  # parameters named
SHARE = 0.01  # of the whole distance that a parameter must make up to be named


@dataclass(slots=True)
class Closed:
    """A window that its update has closed. `sheets` are those of its backwards, `read` what came from the device."""

    row: Any
    sheets: list[Any]
    refused: str
    result: Any
    where: tuple[int, int] = (0, 0)
    read: dict[str, Any] = field(default_factory=dict)


def judge(closed: Closed) -> dict[str, Any]:
    """The numbers of the STEP row: kind, and either the distance or the reason why there is none."""
    kind, why = _against(closed)
    if kind:
        return {"kind": kind, "why": why, "window": list(closed.where)}
    result, units = closed.result, closed.read["counts"][0]
    found: dict[str, Any] = {"kind": result.kind, "why": "", "dtype": result.dtype, "bytes": result.kept, "units": units}
    found["window"] = list(closed.where)
    if result.kind == "sketch":
        return {**found, **_of_sketches(closed, units)}
    if hasattr(result, "layout"):
        return {**found, "file": result.file, "gradient_file": result.gradient, "layout": result.layout}
    distances, sizes, largest = (closed.read.get(key) or [] for key in ("distances", "sizes", "largest"))
    scale = closed.read.get("scale") or 1.0
    return {**found, **distance(list(zip(result.names, distances, sizes, [each / scale for each in largest], strict=True)))}


def _against(closed: Closed) -> tuple[str, str]:
    """Why the window has no reference: the kind of answer and the reason, or two empty texts."""
    if closed.refused:
        return NOT_OBSERVED, closed.refused
    for sheet in closed.sheets:
        if sheet.row.numbers.get("covered") is not True:
            return NOT_SEPARABLE, sheet.row.numbers.get("why", "a loss was not recorded")
    names = sorted({loss.get("term", loss["name"]) for sheet in closed.sheets for loss in sheet.row.numbers.get("losses", ())})
    if len(names) > 1:
        return NOT_SEPARABLE, f"terms of different kinds ({', '.join(names)}) are in one gradient"
    counts = closed.read.get("counts")
    if counts is None or closed.result is None:
        return NOT_OBSERVED, "the gradient was not seen before the step"
    units, first, apart, lost = counts
    if apart:
        return NOT_SEPARABLE, "the units of one backward have different coefficients"
    if lost:
        return NOT_SEPARABLE, "units with the coefficient 0"
    if not units or not math.isfinite(units) or not first:
        return NOT_OBSERVED, "the window has no valid target"
    return "", ""


def _of_sketches(closed: Closed, units: float) -> dict[str, Any]:
    if closed.result.world > 1:
        # Seven digits keep reports small; double precision promises more.
        shown = list if "float64" in closed.result.dtype else rounded
        return {key: shown(closed.read[key]) for key in ("sums", "gradient") if key in closed.read}
    return compare_sketches([(closed.read["sums"], units)], closed.read["gradient"])


def compare_sketches(ranks: list[tuple[list[float], float]], gradient: list[float]) -> dict[str, Any]:
    """The relative L2 distance of a gradient from the mean over all units, by the sketches of the ranks' sums.

    `ranks` holds the sums and the number of units of each. The distance is an estimate, within 5 %.
    """
    units = sum(number for _, number in ranks)
    expected = [math.fsum(values) / units for values in zip(*(sums for sums, _ in ranks), strict=True)]
    size = math.hypot(*expected)
    apart = math.hypot(*(one - other for one, other in zip(gradient, expected, strict=True)))
    if not math.isfinite(size) or not math.isfinite(apart):
        return {"kind": NOT_OBSERVED, "why": "the gradient is not finite"}
    return {"relative": _ratio(apart, size), "max_abs": None, "worst": [], "why": "estimated within 5 % from a sketch"}


def distance(parameters: list[tuple[str, float, float, float]]) -> dict[str, Any]:
    """From name, distance, norm of the reference and largest difference of each parameter."""
    apart = math.hypot(*(each[1] for each in parameters))
    size = math.hypot(*(each[2] for each in parameters))
    if not math.isfinite(apart) or not math.isfinite(size):
        return {"kind": NOT_OBSERVED, "why": "the gradient is not finite"}
    guilty = [(name, _ratio(off, norm)) for name, off, norm, _ in parameters if off > SHARE * apart]
    guilty.sort(key=lambda pair: -pair[1])
    return {
        "max_abs": max((each[3] for each in parameters), default=0.0),
        "relative": _ratio(apart, size),
        "worst": [list(pair) for pair in guilty[:WORST]],
    }


def rounded(values: list[float]) -> list[float]:
    """To seven digits, which keeps reports small."""
    return [float(f"{value:.7g}") for value in values]


def _ratio(part: float, whole: float) -> float:
    """JSON has no infinity: a difference where nothing should be counts as a distance of its own size over the smallest number."""
    if part == 0:
        return 0.0
    return min(part / whole, 1e300) if whole else 1e300
