"""The names of optimizers and schedulers that no name tells: what their classes make, and what a loop takes from a list of optimizers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from accumlint.source.reading.facts import OPTIMIZER_NAME, terminal
from accumlint.source.reading.nodes import every, walk

CLASS = re.compile(
    r"^(Distributed|Fused|ZeroRedundancy)?(SGDW?|(Sparse|Deep|CPU|N|R)?Adam(W|ax|8bit|W8bit)?|Adagrad|Adadelta|RMSprop|Rprop|ASGD|LBFGS|Lion|Lamb|LARS|Adafactor"
    r"|Muon|Shampoo|SOAP|Prodigy)$|Optimizer$"
)

SCHEDULER_CLASS = re.compile(r"LR$|Scheduler$|LROnPlateau$|WarmRestarts$|^get_(\w+_)?schedule(r|_with_warmup)?$")


def steppers(tree: ast.AST) -> frozenset[str]:
    """The names of optimizers."""
    found = _given(tree, _makes)
    for node in every(tree, ast.For):
        if isinstance(node, ast.For):
            found.update(_taken(node.target, node.iter))
    return frozenset(found)


def schedulers(tree: ast.AST) -> frozenset[str]:
    """The names of what schedulers' classes make: `s = CosineAnnealingLR(optimizer, 1000)`."""
    return frozenset(_given(tree, lambda node: isinstance(node, ast.Call) and SCHEDULER_CLASS.search(terminal(node.func)) is not None))


def _given(tree: ast.AST, makes: Callable[[ast.expr], bool]) -> set[str]:
    """The names that are given what is made so."""
    return {
        terminal(target)
        for node in every(tree, ast.Assign)
        if isinstance(node, ast.Assign) and makes(node.value)
        for target in node.targets
        if isinstance(target, (ast.Name, ast.Attribute))
    }


def _makes(node: ast.expr) -> bool:
    """`torch.optim.SGD(…)`, `AdamW(…)`."""
    if not isinstance(node, ast.Call):
        return False
    path = {terminal(part) for part in walk(node.func.value)} if isinstance(node.func, ast.Attribute) else set()
    of_module = "optim" in path and not path & {"lr_scheduler", "swa_utils"}
    return CLASS.search(terminal(node.func)) is not None or (of_module and terminal(node.func)[:1].isupper())


def _taken(target: ast.expr, source: ast.expr) -> Iterator[str]:
    """`for o in optimizers`, `for o, s in zip(optimizers, schedulers)`, `for name, o in optimizers.items()`."""
    if isinstance(source, ast.Call):
        name, parts = terminal(source.func), target.elts if isinstance(target, ast.Tuple) else []
        if name == "zip":
            for part, given in zip(parts, source.args, strict=False):
                yield from _taken(part, given)
            return
        if name == "enumerate" and len(parts) == 2 and source.args:
            yield from _taken(parts[1], source.args[0])
            return
        if name in {"items", "values"} and isinstance(source.func, ast.Attribute):
            yield from _taken(parts[1] if name == "items" and len(parts) == 2 else target, source.func.value)
            return
    if isinstance(target, ast.Name) and isinstance(source, (ast.Name, ast.Attribute)) and OPTIMIZER_NAME.search(terminal(source)):
        yield target.id
