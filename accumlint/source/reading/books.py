"""The words of what is kept beside the training: checkpoints, and averages of the weights."""

from __future__ import annotations

import ast
import re
from functools import cache

from accumlint.source.reading.nodes import walk
from accumlint.trace import Kind

BOOKKEEPING = frozenset({Kind.SAVE, Kind.AVERAGE})
SAVE_NAME = re.compile(
    r"^_?(async_)?save$|^_?(async_)?save_\w*(checkpoint|ckpt|state|snapshot|optim|resume|training)\w*$|^_?save_(model|all|everything|run)$"
    r"|^_?(write|store|dump|make|create|take)_(checkpoint|ckpt|snapshot)$|^_?checkpoint$",
    re.IGNORECASE,
)
AVERAGE_NAME = re.compile(
    r"(^|_)ema(_|\d|$)|^ema[A-Z]|EMA|(?<![A-Za-z])Ema|(?i:moving_?aver|(^|_)swa(_|$)|averaged_?model|model_?avg|polyak)"
)
METRIC_NAME = re.compile(
    r"loss|acc|metric|(?<!para)meter|time|norm|grad|lr$|score|reward|speed|stat|log|value|codebook|quant", re.IGNORECASE
)
AVERAGE_CALL = re.compile(
    r"^_?(update|step|apply|do|run)_?(the_)?(model_)?(ema|swa|averages?|moving_average\w*)(_\w+)?$|^_?(model_)?(ema|swa)_(update|step|model_update)\w*$"
    r"|^_?(soft_update\w*|moving_average\w*|momentum_update\w*|update_moving_average|update_target_\w+|update_momentum_\w+|update_and_allocate)$"
    r"|^_?_?momentum_update_\w+$",
    re.IGNORECASE,
)
UPDATES = frozenset({"update", "step", "update_params", "update_model", "update_weights", "update_average", "apply"})
IN_PLACE = frozenset({"add_", "lerp_", "copy_", "_foreach_lerp_", "_foreach_add_"})


def book_kinds(name: str, receiver: str, call: ast.Call) -> set[Kind]:
    """What a call keeps, by its name and by that of what it is called on."""
    if SAVE_NAME.search(name):
        return {Kind.SAVE}
    if averages_by_name(name, receiver):
        return {Kind.AVERAGE}
    return {Kind.AVERAGE} if name in IN_PLACE and blends(call) else set()


@cache
def may_average(name: str) -> bool:
    """Whether there is an object whose method of this name moves an average."""
    return name == "update_parameters" or name in UPDATES or AVERAGE_CALL.search(name) is not None


@cache
def averages_by_name(name: str, receiver: str) -> bool:
    """Whether a call moves an average of the weights, as far as names tell."""
    if name == "update_parameters" or AVERAGE_CALL.search(name):
        return not METRIC_NAME.search(name)
    if METRIC_NAME.search(receiver):
        return False
    return name in UPDATES and bool(AVERAGE_NAME.search(receiver))


def blends(call: ast.Call) -> bool:
    """Whether a tensor is moved towards another in place: `a.mul_(d).add_(b)`, `a.lerp_(b, w)`, `a.copy_(d * a + (1 - d) * b)`."""
    if not isinstance(call.func, ast.Attribute) or any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in walk(call)):
        return False
    match call.func.attr:
        case "lerp_" | "_foreach_lerp_" | "_foreach_add_":
            return True
        case "add_":
            inner = call.func.value
            return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "mul_"
        case "copy_":
            sums = [part for arg in call.args for part in walk(arg) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add)]
            return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) for one in sums for part in walk(one))
    return False
