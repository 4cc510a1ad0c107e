"""Which targets a loss ignores, as far as the source says it: the index that is written into the labels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accumlint.source.reading.nodes import every, walk

IGNORED = -100
WRITERS = frozenset(
    """
    masked_fill masked_fill_ where full full_like fill_ new_full pad index_fill_ extend append
    """.split()
)
FILLING = frozenset({"value", "fill_value", "constant_values"})  # keywords of what a writer writes
COLLATORS = frozenset(
    """
    DataCollatorForSeq2Seq DataCollatorForTokenClassification DataCollatorForLanguageModeling DataCollatorForWholeWordMask
    DataCollatorForCompletionOnlyLM
    """.split()
)  # that fill the labels up with -100, or keep the masked ones only
NAMED_IGNORED = re.compile(
    r"(^|_)IGNORED?_(LABEL_|TOKEN_|TARGET_)?(INDEX|INDICES|TOKEN|ID|LABEL)(_ID)?$"
)  # constants that say what they are for
LABELS = re.compile(r"label|target|tgt", re.IGNORECASE)
OUTPUTS = re.compile(r"logit|pred|score|prob|floor", re.IGNORECASE)  # what a model gives: -100 fills it up, or is a very small logit

PLAIN = (ast.Constant, ast.UnaryOp, ast.Name, ast.Attribute)
MAY_IGNORE = (*PLAIN, ast.Call, ast.keyword, ast.Assign)


def find_ignored_targets(tree: ast.Module) -> Iterator[ast.AST]:
    """Every place where the index that a loss ignores is written into something.

    It is -100, what is given as `ignore_index=`, or a name that was made from one of them.
    """
    ignored = _ignored(tree)
    written = _written(tree)
    into_labels: set[int] | None = None
    passed = _passed(tree)
    into_outputs: set[int] | None = None
    for node in every(tree, *MAY_IGNORE):
        if node.__class__ in PLAIN and id(node) not in written:
            continue
        if id(node) in written and _is_ignored(node, ignored) and not _spelled(node).isdigit():  # a zero is written for many reasons
            into_outputs = _into_outputs(tree) if into_outputs is None else into_outputs
            if id(node) in into_outputs:
                continue
            if _spelled(node) == "-1":  # and so is a size or a position that is not given
                into_labels = _into_labels(tree) if into_labels is None else into_labels
                if id(node) not in into_labels:
                    continue
            yield node
        elif isinstance(node, ast.Call) and _name(node.func) == "pad_sequence":
            positional = node.args[2] if len(node.args) > 2 else None
            padding = next((keyword.value for keyword in node.keywords if keyword.arg == "padding_value"), positional)
            if _is_ignored(padding, ignored) if padding is not None else "0" in ignored:
                yield node
        elif isinstance(node, ast.Call) and _name(node.func) in COLLATORS and not _keeps_targets(node):
            yield node
        elif (
            isinstance(node, ast.keyword) and node.arg in {"label_pad_token_id", "pad_token_label_id"} and _is_ignored(node.value, ignored)
        ):
            yield node.value
        elif isinstance(node, ast.Assign) and _is_ignore_index(node.value):
            if any(isinstance(target, ast.Name) and target.id in passed for target in node.targets):
                yield node  # `pad_label = CrossEntropyLoss().ignore_index`, handed to what makes the labels
        elif isinstance(node, ast.Assign) and _masks_with_minus_one(node):
            yield node


def _is_ignored(node: ast.AST, ignored: set[str]) -> bool:
    """Whether an index is the one to ignore, also as the constant of another module."""
    if _spelled(node) in ignored:
        return True
    name = _name(node)
    return isinstance(node, (ast.Name, ast.Attribute)) and name.isupper() and (name in ignored or bool(NAMED_IGNORED.search(name)))


def _keeps_targets(collator: ast.Call) -> bool:
    """Whether a collator says that it masks nothing, or names what it fills the labels up with."""
    return any(
        word.arg == "label_pad_token_id" or (word.arg == "mlm" and isinstance(word.value, ast.Constant) and not word.value.value)
        for word in collator.keywords
    )


def _into_labels(tree: ast.Module) -> set[int]:
    """The nodes that stand in what is written into labels: `labels[~mask] = -1`, `labels.masked_fill(~mask, -1)`."""
    found: set[int] = set()
    for node in every(tree, ast.Assign, ast.Call):
        names: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            names = [target.value if isinstance(target, ast.Subscript) else target for target in node.targets]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = [node.func.value]
        if any(LABELS.search(_name(name)) for name in names):
            found.update(id(part) for part in walk(node))
    return found


def _into_outputs(tree: ast.Module) -> set[int]:
    """The nodes that fill up outputs: `all_logits = np.full(shape, -100)`, `F.pad(scores, (0, n), value=-100)`."""
    found: set[int] = set()
    for node in every(tree, ast.Assign, ast.Call):
        if isinstance(node, ast.Assign):
            names = [_name(target.value if isinstance(target, ast.Subscript) else target) for target in node.targets]
        elif isinstance(node, ast.Call):
            names = [_name(each) for each in node.args[:1]]
        if any(OUTPUTS.search(name) for name in names) and not any(LABELS.search(name) for name in names):
            found.update(id(part) for part in walk(node))
    return found


def _passed(tree: ast.Module) -> set[str]:
    """The names that are handed to some call."""
    calls = [node for node in every(tree, ast.Call) if isinstance(node, ast.Call)]
    given = (part for call in calls for part in (*call.args, *(keyword.value for keyword in call.keywords)))
    return {part.id for part in given if isinstance(part, ast.Name)}


def _spelled(node: ast.AST) -> str:
    """An index as the source spells it: a number, a name or a dotted name; "" for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _spelled(node.operand)
        return f"-{number}" if number.isdigit() else ""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_spelled(node.value)}.{node.attr}"
    return ""


def _is_ignore_index(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "ignore_index"


def _masks_with_minus_one(node: ast.Assign) -> bool:
    """`targets[mask == 0] = -1`, `labels[i, n:] = -1`: a class that no loss takes, so one that it ignores."""
    if _spelled(node.value) != "-1" or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Subscript):
        return False
    target = node.targets[0]
    masks = any("mask" in (_name(part)) for part in walk(target.slice))
    starts = [part.lower for part in walk(target.slice) if isinstance(part, ast.Slice)]
    tail = any(start is not None and not isinstance(start, ast.Constant) for start in starts)
    return bool(LABELS.search(_name(target.value))) and (masks or tail)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _ignored(tree: ast.Module) -> set[str]:
    """The spellings of the ignored index: -100, what is given as `ignore_index=`, names bound to -100 or to a loss's own index."""
    found = {str(IGNORED)}
    for node in every(tree, ast.Assign, ast.keyword, ast.arguments):
        if isinstance(node, ast.arguments):
            found.update(_names_by_default(node))
        elif isinstance(node, ast.Assign) and (_spelled(node.value) == str(IGNORED) or _is_ignore_index(node.value)):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.keyword) and node.arg == "ignore_index":
            found.add(_spelled(node.value))
    return found - {""}


def _names_by_default(node: ast.arguments) -> Iterator[str]:
    """`def masked_loss(logits, targets, mask, ignore_index=-100)`: the parameters that are -100 unless something else is given."""
    positional = [*node.posonlyargs, *node.args]
    pairs = [*zip(reversed(positional), reversed(node.defaults), strict=False), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    yield from (one.arg for one, default in pairs if default is not None and _spelled(default) == str(IGNORED))


def _written(tree: ast.Module) -> set[int]:
    """The nodes that are written into something, rather than compared with or named as the index to ignore."""
    written: set[int] = set()
    for node in every(tree, ast.Assign, ast.Call, ast.BinOp, ast.IfExp):
        values: list[ast.expr] = []
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Subscript) for target in node.targets):
            values = [node.value]
        elif isinstance(node, ast.Call) and _name(node.func) in WRITERS:
            values = [*node.args, *(word.value for word in node.keywords if word.arg in FILLING)]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List):
            values = [node.left]
        elif isinstance(node, ast.IfExp):
            values = [one for one in (node.body, node.orelse) if _spelled(one) != "-1" and not _stands_for_none(tree, node)]
        written.update(id(part) for value in values for part in walk(value))
        compared = (part for value in values for part in walk(value) if isinstance(part, ast.Compare))
        written.difference_update(id(part) for compare in compared for part in walk(compare))
    return written


def _stands_for_none(tree: ast.Module, node: ast.IfExp) -> bool:
    """`numbers[example.label] if example.label is not None else -100`: the class of an example that has none, as those of a test set."""
    test = node.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Is, ast.IsNot)) or not LABELS.search(_name(test.left)):
        return False
    return not any(id(part) == id(node) for each in every(tree, ast.ListComp, ast.GeneratorExp) for part in walk(each))
