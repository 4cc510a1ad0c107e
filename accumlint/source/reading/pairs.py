"""Losses over the pairs of a batch: every sample is told apart from the others of its micro-batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk

CRITERION = re.compile(r"cross_entropy|criterion|(^|_)(loss|ce)|CrossEntropyLoss", re.IGNORECASE)
BY_NAME = re.compile(
    r"^((Sig)?(Lip|Clip)Loss|InfoNCE(Loss)?|NTXent(Loss)?|NT_?Xent|MultipleNegatives(Symmetric)?RankingLoss|info_nce(_loss)?)$"
)
PRODUCTS = frozenset({"matmul", "mm", "bmm", "einsum"})
NORMALISING = frozenset({"log_softmax", "softmax", "logsumexp", "exp"})
DIAGONAL = re.compile(r"^(matrix_)?diag(onal)?$")
TENSORS = frozenset({"tensor", "as_tensor", "LongTensor"})
NO_GRADIENTS = frozenset({"no_grad", "inference_mode"})
EVALUATION = re.compile(r"_*(eval|valid|test|infer|predict)")
SCOPES = (ast.With, ast.AsyncWith, ast.FunctionDef, ast.AsyncFunctionDef)


def pairs_of_a_batch(index: Index) -> Iterator[ast.Call]:
    """Losses of which every other sample of the batch is a negative.

    Cross entropies whose targets are positions in the batch, `arange(n)`; the diagonal of exponentiated similarities; losses that
    are known by name.
    """
    outside: list[ast.AST] = [
        each for each in index.tree.body if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    scopes = [outside, *([each] for each in every(index.tree, ast.FunctionDef, ast.AsyncFunctionDef))]
    found = {id(call): call for scope in scopes for call in _coupled(index, scope)}
    if found:
        quiet = {id(part) for scope in every(index.tree, *SCOPES) if _trains_nothing(scope) for part in walk(scope)}
        yield from (call for call in found.values() if id(call) not in quiet)


def _coupled(index: Index, scope: Sequence[ast.AST]) -> Iterator[ast.Call]:
    calls = [part for each in scope for part in every(each, ast.Call) if isinstance(part, ast.Call)]
    positions = _positions(scope)
    for call in calls:
        name, target = terminal(call.func), _target(call)
        known = BY_NAME.match(name) and name not in index.classes and name not in index.functions
        if known or (target is not None and (_counts_up(target) or (isinstance(target, ast.Name) and target.id in positions))):
            yield call
    if _multiplies(scope, calls) and any(terminal(call.func) in NORMALISING for call in calls):
        yield from (call for call in calls if DIAGONAL.match(terminal(call.func)))


def _target(call: ast.Call) -> ast.expr | None:
    """What a cross entropy is given as its targets: `F.cross_entropy(scores, labels)`, `nn.CrossEntropyLoss()(scores, labels)`."""
    called = call.func.func if isinstance(call.func, ast.Call) else call.func
    if not CRITERION.search(terminal(called)):
        return None
    named = next((word.value for word in call.keywords if word.arg == "target"), None)
    return named if named is not None else call.args[1] if len(call.args) >= 2 else None


def _positions(scope: Sequence[ast.AST]) -> set[str]:
    """The names that positions are given, also those of every n-th one: `target = arange(n)`, `target = target * group_size`."""
    found: set[str] = set()
    assigned = [part for each in scope for part in every(each, ast.Assign) if isinstance(part, ast.Assign)]
    for node in sorted(assigned, key=lambda node: node.lineno):
        names = {terminal(target) for target in node.targets}
        kept = any(isinstance(part, ast.Name) and part.id in found for part in walk(node.value)) and names <= found
        if kept or _counts_up(node.value):
            found |= names
    return found


def _multiplies(scope: Sequence[ast.AST], calls: Sequence[ast.Call]) -> bool:
    """Whether similarities are computed: a product of matrices."""
    products = (part for each in scope for part in every(each, ast.BinOp) if isinstance(part, ast.BinOp))
    return any(terminal(call.func) in PRODUCTS for call in calls) or any(isinstance(one.op, ast.MatMult) for one in products)


def _counts_up(node: ast.expr) -> bool:
    """`torch.arange(n, device=…)`, perhaps moved, cast or in steps, and `torch.tensor(list(range(n)))`."""
    while True:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return _counts_up(node.left) or _counts_up(node.right)
        if not isinstance(node, ast.Call):
            return False
        name = terminal(node.func)
        if name == "arange":
            return len(node.args) == 1 or (len(node.args) == 2 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
        if name in TENSORS and node.args:
            return _is_range(node.args[0])
        if not isinstance(node.func, ast.Attribute):
            return False
        node = node.func.value


def _is_range(node: ast.expr) -> bool:
    while isinstance(node, ast.Call) and terminal(node.func) == "list" and node.args:
        node = node.args[0]
    return isinstance(node, ast.Call) and terminal(node.func) == "range" and len(node.args) == 1


def _trains_nothing(scope: ast.AST) -> bool:
    """Whether a function or a block computes without gradients, by its decorator, its context or its name."""
    if isinstance(scope, (ast.With, ast.AsyncWith)):
        contexts = [item.context_expr for item in scope.items]
    elif isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if EVALUATION.match(scope.name):
            return True
        contexts = scope.decorator_list
    else:
        return False
    return any(terminal(each.func if isinstance(each, ast.Call) else each) in NO_GRADIENTS for each in contexts)
