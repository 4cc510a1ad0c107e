"""Other names that the functions of a module go by: wrapped, returned, given as an argument, kept in a table."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.nodes import every, walk

if TYPE_CHECKING:
    from accumlint.source.reading.index import Index


def find_aliases(index: Index) -> dict[str, list[FunctionNode]]:
    """For each such name the functions that it can mean."""
    found: dict[str, dict[FunctionNode, None]] = defaultdict(dict)
    for node in every(index.tree, ast.Assign, ast.AnnAssign, ast.Call):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            meant = functions_in(index, node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (
                (one for each in targets for one in (each.elts if isinstance(each, (ast.Tuple, ast.List)) else [each])) if meant else ()
            ):
                if isinstance(target, (ast.Name, ast.Attribute)):
                    found[terminal(target)].update(dict.fromkeys(meant))
        elif isinstance(node, ast.Call):
            for name, value in _named_arguments(index, node):
                if isinstance(value, (ast.Name, ast.Attribute, ast.Lambda)):
                    found[name].update(dict.fromkeys(functions_in(index, value)))
    return {name: list(functions) for name, functions in found.items() if functions}


def functions_in(index: Index, value: ast.expr) -> list[FunctionNode]:
    """The functions of the file that an expression may give, itself or wrapped."""
    if isinstance(value, ast.Lambda):
        return [value]  # type: ignore[list-item]
    if isinstance(value, (ast.Name, ast.Attribute)):
        name = terminal(value)
        return list(index.functions.get(name, ())) if isinstance(value, ast.Name) else list(index.methods.get(name, ()))
    parts: list[ast.expr] = []
    if isinstance(value, ast.Call) and terminal(value.func) in index.functions:
        return [
            inner for function in index.functions[terminal(value.func)] for inner in index.once("returned", function, _returned_functions)
        ]
    if isinstance(value, ast.Call):
        parts = value.args
    elif isinstance(value, ast.IfExp):
        parts = [value.body, value.orelse]
    elif isinstance(value, (ast.BoolOp, ast.Dict)):
        parts = value.values
    elif isinstance(value, ast.Subscript):
        parts = [value.value]
    elif isinstance(value, (ast.List, ast.Tuple)):
        parts = value.elts
    return [function for part in parts for function in functions_in(index, part)]


def _returned_functions(function: ast.AST) -> list[FunctionNode]:
    """The functions that stand inside a function and that it returns: `step = make_step(model, k)`."""
    inside = {
        part.name: part for part in walk(function) if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and part is not function
    }
    found: dict[FunctionNode, None] = {}
    for part in walk(function):
        if isinstance(part, ast.Return) and isinstance(part.value, ast.Lambda):
            found[part.value] = None  # type: ignore[index]
        elif isinstance(part, ast.Return) and part.value is not None:
            found.update({inside[name.id]: None for name in walk(part.value) if isinstance(name, ast.Name) and name.id in inside})
    return list(found)


def _named_arguments(index: Index, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The arguments of a call of the file's functions with the parameters that they are given to."""
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)
    name = terminal(call.func)
    callees: list[FunctionNode] = index.functions.get(name, [])
    if name in index.classes:
        callees = [member for member in index.class_methods(index.classes[name]) if member.name == "__init__"]
    for callee in callees:
        parameters = [argument.arg for argument in callee.args.posonlyargs + callee.args.args]
        if callee in index.owner and parameters[:1] in (["self"], ["cls"]):
            parameters = parameters[1:]
        yield from zip(parameters, call.args, strict=False)
