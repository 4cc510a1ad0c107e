"""Transformers' Trainer: models of the source that take keywords, the count among them, and form a mean of their own all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.source.vocabulary.hf_trainer_facts import imports
from accumlint.source.vocabulary.torch_objects import CRITERIA

COUNT = "num_items_in_batch"
FUNCTIONS = frozenset(CRITERIA.values())


def own_means(index: Index) -> Iterator[tuple[FunctionNode, ast.Call]]:
    """The forwards of models given to a plain Trainer that ignore the count, with the loss that they form."""
    if not _names_k(index.tree):
        return
    for call in every(index.tree, ast.Call):
        if isinstance(call, ast.Call) and _is_plain(index, call):
            given = next((word.value for word in call.keywords if word.arg == "model"), call.args[0] if call.args else None)
            for forward in _forwards(index, given):
                loss = _mean_of(index, forward) if _takes_all(forward) else None
                if loss is not None:
                    yield forward, loss


def _names_k(tree: ast.AST) -> bool:
    return any(isinstance(word, ast.keyword) and word.arg == "gradient_accumulation_steps" for word in every(tree, ast.keyword))


def _is_plain(index: Index, call: ast.Call) -> bool:
    """`Trainer(…)` of transformers itself, which nothing tells how to compute the loss."""
    imported = imports(index)
    holder = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if terminal(call.func) != "Trainer" or not imported.get(terminal(holder), "").startswith("transformers"):
        return False
    return all(word.arg not in {"compute_loss_func", None} for word in call.keywords)


def _forwards(index: Index, given: ast.expr | None) -> Iterator[FunctionNode]:
    """The forward of the class that a model is made of, where it has one name and is made in one place."""
    if isinstance(given, ast.Name):
        assigned = [node for node in every(index.tree, ast.Assign) if isinstance(node, ast.Assign)]
        made = [node.value for node in assigned if any(terminal(target) == given.id for target in node.targets)]
        given = made[0] if len(made) == 1 else None
    if isinstance(given, ast.Call) and isinstance(given.func, ast.Name) and given.func.id in index.classes:
        yield from (member for member in index.class_methods(index.classes[given.func.id]) if member.name == "forward")


def _takes_all(forward: FunctionNode) -> bool:
    """Whether a forward takes labels and any keyword, and does nothing with the count or the keywords."""
    words = forward.args.kwarg
    names = {one.arg for one in (*forward.args.args, *forward.args.kwonlyargs)}
    if words is None or "labels" not in names or COUNT in names:
        return False
    body = [part for statement in forward.body for part in walk(statement)]
    return not any((isinstance(part, ast.Name) and part.id == words.arg) or getattr(part, "value", None) == COUNT for part in body)


def _mean_of(index: Index, forward: FunctionNode) -> ast.Call | None:
    """The one loss call of a forward, a mean that nothing divides; None where there is none or another arithmetic."""
    body = [part for statement in forward.body for part in walk(statement)]
    if any(isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Div, ast.FloorDiv)) for part in body):
        return None
    criteria = {
        terminal(target): node.value
        for node in every(index.tree, ast.Assign)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and terminal(node.value.func) in CRITERIA
        for target in node.targets
    }
    calls = [part for part in body if isinstance(part, ast.Call)]
    losses = [call for call in calls if terminal(call.func) in FUNCTIONS or terminal(call.func) in criteria]
    if len(losses) != 1:
        return None
    settings = [*losses[0].keywords, *(criteria[terminal(losses[0].func)].keywords if terminal(losses[0].func) in criteria else ())]
    return None if any(word.arg in {"reduction", "reduce", "size_average", None} for word in settings) else losses[0]
