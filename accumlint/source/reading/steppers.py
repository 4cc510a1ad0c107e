"""The names of optimizers and schedulers that no name tells: what their classes make, and what a loop takes from a list of optimizers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial

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
    several = _several(tree, found)
    for node in every(tree, ast.For, ast.comprehension):
        if isinstance(node, (ast.For, ast.comprehension)):
            found.update(_taken(node.target, node.iter, frozenset(found), several))
    return frozenset(found)


def schedulers(tree: ast.AST) -> frozenset[str]:
    """The names of what schedulers' classes make: `s = CosineAnnealingLR(optimizer, 1000)`."""
    return frozenset(_given(tree, lambda node: isinstance(node, ast.Call) and SCHEDULER_CLASS.search(terminal(node.func)) is not None))


def _given(tree: ast.AST, makes: Callable[[ast.expr], bool]) -> set[str]:
    """The names that are given what is made so, at once or by a function that returns it."""
    assigned = [(target, node.value) for node in every(tree, ast.Assign) if isinstance(node, ast.Assign) for target in node.targets]
    found = {name for target, value in assigned for name in _pairs(target, value, makes)}
    returned = _returned(tree, {value.func.id for _, value in assigned if isinstance(value, ast.Call) and isinstance(value.func, ast.Name)})
    for target, value in assigned:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            is_one = partial(_is_one, makes, frozenset(found))
            found.update(name for one in returned.get(value.func.id, ()) for name in _pairs(target, one, is_one))
    return found


def _returned(tree: ast.AST, called: set[str]) -> dict[str, list[ast.expr]]:
    """What the functions of these names return, as it is written."""
    return {
        function.name: [part.value for part in walk(function) if isinstance(part, ast.Return) and part.value is not None]
        for function in every(tree, ast.FunctionDef)
        if isinstance(function, ast.FunctionDef) and function.name in called
    }


def _is_one(makes: Callable[[ast.expr], bool], names: frozenset[str], node: ast.expr) -> bool:
    return makes(node) or _is_named(node, names)


def _pairs(target: ast.expr, value: ast.expr, makes: Callable[[ast.expr], bool]) -> Iterator[str]:
    """The names in a target that are given what is made so: `o, s = SGD(…), StepLR(…)`."""
    if isinstance(target, (ast.Name, ast.Attribute)) and makes(value):
        yield terminal(target)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, its, makes)


def _is_named(node: ast.expr, names: frozenset[str]) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and terminal(node) in names


def _several(tree: ast.AST, names: set[str]) -> frozenset[str]:
    """The names of lists, tuples and dictionaries of optimizers."""
    return frozenset(
        terminal(target)
        for node in every(tree, ast.Assign)
        if isinstance(node, ast.Assign) and any(_makes(one) or _is_named(one, frozenset(names)) for one in _entries(node.value))
        for target in node.targets
        if isinstance(target, (ast.Name, ast.Attribute))
    )


def _entries(node: ast.expr) -> list[ast.expr]:
    """What a list, a tuple, a dictionary or a comprehension is made of, as it is written."""
    match node:
        case ast.List() | ast.Tuple():
            return node.elts
        case ast.Dict():
            return node.values
        case ast.ListComp() | ast.GeneratorExp():
            return [node.elt]
        case ast.DictComp():
            return [node.value]
    return []


def _makes(node: ast.expr) -> bool:
    """`torch.optim.SGD(…)`, `AdamW(…)`."""
    if not isinstance(node, ast.Call):
        return False
    path = {terminal(part) for part in walk(node.func.value)} if isinstance(node.func, ast.Attribute) else set()
    of_module = "optim" in path and not path & {"lr_scheduler", "swa_utils"}
    return CLASS.search(terminal(node.func)) is not None or (of_module and terminal(node.func)[:1].isupper())


def _taken(target: ast.expr, source: ast.expr, names: frozenset[str], several: frozenset[str]) -> Iterator[str]:
    """`for o in optimizers`, `for o in (slow, fast)`, `for o, s in zip(optimizers, schedulers)`, `for name, o in optimizers.items()`."""
    if isinstance(source, ast.Call):
        name, parts = terminal(source.func), target.elts if isinstance(target, ast.Tuple) else []
        if name == "zip":
            for part, given in zip(parts, source.args, strict=False):
                yield from _taken(part, given, names, several)
        elif name == "enumerate" and len(parts) == 2 and source.args:
            yield from _taken(parts[1], source.args[0], names, several)
        elif name in {"items", "values"} and isinstance(source.func, ast.Attribute):
            yield from _taken(parts[1] if name == "items" and len(parts) == 2 else target, source.func.value, names, several)
    elif isinstance(target, ast.Name):
        named = isinstance(source, (ast.Name, ast.Attribute)) and (OPTIMIZER_NAME.search(terminal(source)) or terminal(source) in several)
        if named or any(_is_named(one, names) or OPTIMIZER_NAME.search(terminal(one)) for one in _entries(source)):
            yield target.id
