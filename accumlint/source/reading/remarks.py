"""What a module shows of the limits of accumulation: batch statistics, losses over pairs of a batch, half precision, logged fractions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from accumlint.source.reading.facts import LOSS_WORDS, names_k, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.source.reading.pairs import pairs_of_a_batch
from accumlint.source.reading.units import Units
from accumlint.trace import FILE_LINES

NORMALISER = re.compile(r"^(Lazy)?(Sync)?BatchNorm([123]d)?$")
ZOO = re.compile(
    r"^((wide_)?resnet\d+\w*|resnext\w+|densenet\d+|mobilenet_\w+|vgg\d+_bn|efficientnet_\w+|inception_v3|googlenet|shufflenet_\w+)$"
)
HALF = frozenset({"half", "bfloat16"})
HALF_TYPES = frozenset({"bfloat16", "float16", "half"})
EMPTY = re.compile(r"^(zeros|empty|new)(_|$)|^Variable$")
LOGGING = re.compile(r"^(print|log|info|debug|add_scalar|write|set_postfix|set_description|append)$")
Note = Callable[[str, ast.AST, str], None]


def remarks(index: Index, note: Note) -> None:
    """Notes each of them by the name of its fact."""
    for call in _batch_statistics(index):
        note("batchnorm", call, terminal(call.func))
    for call in pairs_of_a_batch(index):
        note("in-batch-negatives", call, "")
    for node, name in _half_models(index):
        note("low-precision-model", node, name)
    for call, name in _logged_fractions(index):
        note("logs-a-fraction", call, name)
    for node in _gradients_by_hand(index):
        note("gradients-by-hand", node, "gradients are gathered elsewhere and put in place")
    for rounding in _whole_windows(index):
        note("whole-windows", rounding, "")


def _gradients_by_hand(index: Index) -> Iterator[ast.Assign]:
    """Where the file itself puts gradients in place that it has gathered from several backwards: `p.grad = buffer[name]`.

    Master copies and stacked gradients of optimizers, which other files make, are the gradients of one backward still.
    """
    if "grad" not in index.identifiers:
        return
    own = [part for each in index.tree.body if getattr(each, "lineno", 0) < FILE_LINES and not _is_optimizer(each) for part in walk(each)]
    placed = [node for node in own if isinstance(node, ast.Assign) and _places_gradient(node)]
    if placed and any(map(_gathers, own)):
        yield from placed


def _is_optimizer(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any("optim" in terminal(base).lower() for base in node.bases)


def _places_gradient(node: ast.Assign) -> bool:
    """`p.grad = something` that is neither None nor made from the gradient there, nor new and empty."""
    if not any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in node.targets):
        return False
    if isinstance(node.value, ast.Constant) or _reads_gradient(node.value):
        return False
    return not any(isinstance(part, ast.Call) and EMPTY.search(terminal(part.func)) for part in walk(node.value))


def _reads_gradient(node: ast.AST) -> bool:
    gradients = (part for part in every(node, ast.Attribute) if isinstance(part, ast.Attribute) and part.attr == "grad")
    return any(terminal(part.value) != "autograd" for part in gradients)


def _gathers(node: ast.AST) -> bool:
    """`buffer += p.grad`, `buffer.add_(p.grad)`, `buffer = buffer + p.grad`, `gathered.append(p.grad.clone())`."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Add) and not _reads_gradient(node.target) and _reads_gradient(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"add_", "append", "copy_", "lerp_"}:
        return not _reads_gradient(node.func) and any(map(_reads_gradient, node.args))
    if isinstance(node, ast.Assign) and not any(map(_reads_gradient, node.targets)):
        return isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add) and _reads_gradient(node.value)
    return False


def _batch_statistics(index: Index) -> Iterator[ast.Call]:
    """Where a normalisation over the batch is made, unless the module switches such parts to evaluation."""
    made = [node for node in every(index.tree, ast.Call) if isinstance(node, ast.Call) and _normalises(index, terminal(node.func))]
    if made and not any(_freezes(node) for node in every(index.tree, ast.If)):
        yield made[0]


def _normalises(index: Index, name: str) -> bool:
    return bool(NORMALISER.match(name)) or ("torchvision" in index.packages and bool(ZOO.match(name)))


def _freezes(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    names = [terminal(part) for part in walk(node.test) if isinstance(part, (ast.Name, ast.Attribute))]
    asks = any(NORMALISER.match(name) or name == "_BatchNorm" for name in names)
    return asks and any(isinstance(part, ast.Attribute) and part.attr == "eval" for each in node.body for part in walk(each))


def _half_models(index: Index) -> Iterator[tuple[ast.AST, str]]:
    """Where an object is cast to half precision or loaded in it, and its name."""
    for node in every(index.tree, ast.Call, ast.Assign):
        if isinstance(node, ast.Call) and _casts(node) and isinstance(node.func, ast.Attribute):
            yield node, terminal(node.func.value)
        elif isinstance(node, ast.Assign):
            for call in every(node.value, ast.Call):
                if isinstance(call, ast.Call) and (_casts(call) or _loads(call)):
                    yield from ((call, terminal(target)) for target in node.targets)


def _casts(call: ast.Call) -> bool:
    """`model.half()`, `model.to(torch.bfloat16)`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr in HALF or (call.func.attr == "to" and any(map(_is_half, (*call.args, *(each.value for each in call.keywords)))))


def _loads(call: ast.Call) -> bool:
    """`from_pretrained(name, torch_dtype=torch.bfloat16)`, `nn.Linear(8, 8, dtype=torch.bfloat16)`."""
    return any(each.arg in {"dtype", "torch_dtype"} and _is_half(each.value) for each in call.keywords)


def _is_half(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in HALF_TYPES


def _logged_fractions(index: Index) -> Iterator[tuple[ast.Call, str]]:
    """Logs of a loss that was divided by K before, in the same function, and is not multiplied back."""
    units = index.once("units", index.tree, Units)
    for functions in index.functions.values():
        for function in functions:
            for line, name in _divided(units, function):
                calls = (part for part in every(function, ast.Call) if isinstance(part, ast.Call) and part.lineno > line)
                yield from ((call, name) for call in calls if _logs(units, call, name))


def _divided(units: Units, scope: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines in which a loss is divided by K and keeps its name."""
    for node in every(scope, ast.AugAssign, ast.Assign):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            name, divisor = terminal(node.target), node.value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Div):
            name, divisor = terminal(node.targets[0]), node.value.right
        else:
            continue
        if LOSS_WORDS.search(name) and units.power(divisor) == 1:
            yield node.lineno, name


def _logs(units: Units, call: ast.Call, name: str) -> bool:
    if not LOGGING.match(terminal(call.func)):
        return False
    scaled = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) and units.power(part) >= 1 for part in walk(call))
    given = (*call.args, *(each.value for each in call.keywords))
    read = any(isinstance(part, ast.Name) and part.id == name for each in given for part in walk(each))
    return read and not scaled


def _whole_windows(index: Index) -> Iterator[ast.AST]:
    """Where only as many batches are given as fill whole windows: by the length of a loader, or by a list that is cut to it."""
    for owner in index.classes.values():
        if not any(isinstance(member, ast.FunctionDef) and member.name in {"__len__", "__iter__"} for member in owner.body):
            continue
        for node in walk(owner):
            divisor = _rounded_to(node)
            if divisor is not None and any(map(names_k, _names_behind(divisor, owner))):
                yield node
    tests = [node.test for node in every(index.tree, ast.If) if isinstance(node, ast.If) and index.has_modulo(node.test)]
    moduli = {terminal(part.right) for test in tests for part in walk(test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)}
    for node in every(index.tree, ast.Subscript) if moduli else ():
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.upper is not None:
            ends = _values_of(node.slice.upper, index)
            if any(terminal(divisor) in moduli for end in ends if (divisor := _rounded_to(end)) is not None):
                yield node


def _values_of(node: ast.expr, index: Index) -> list[ast.expr]:
    """An expression, or what is assigned to its name."""
    if not isinstance(node, ast.Name):
        return [node]
    assigned = (each for each in every(index.tree, ast.Assign) if isinstance(each, ast.Assign))
    return [each.value for each in assigned if any(terminal(target) == node.id for target in each.targets)]


def _rounded_to(node: ast.AST) -> ast.expr | None:
    """What a number is rounded down to a multiple of: `n // k * k`, `n - n % k`."""
    match node:
        case ast.BinOp(left=whole, op=ast.Sub(), right=ast.BinOp(left=number, op=ast.Mod(), right=divisor)):
            return divisor if ast.dump(whole) == ast.dump(number) else None
        case ast.BinOp(op=ast.Mult()):
            pass
        case _:
            return None
    for quotient, factor in ((node.left, node.right), (node.right, node.left)):
        if isinstance(quotient, ast.BinOp) and isinstance(quotient.op, ast.FloorDiv) and ast.dump(quotient.right) == ast.dump(factor):
            return factor
    return None


def _names_behind(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """The names in an expression, and in what the names were set to."""
    for part in walk(node):
        if isinstance(part, (ast.Name, ast.Attribute)):
            yield terminal(part)
    if isinstance(node, ast.Name):
        for each in walk(scope):
            if isinstance(each, ast.Assign) and any(terminal(target) == node.id for target in each.targets):
                yield from (terminal(part) for part in walk(each.value) if isinstance(part, (ast.Name, ast.Attribute)))
