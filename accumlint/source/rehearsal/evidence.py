"""What a module says about its data without being rehearsed: that targets are ignored, masked or of varying number."""

from __future__ import annotations

import ast
import re

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.record import Recorder
from accumlint.trace import Evidence

PADDING = re.compile(
    r"pad_sequence|DataCollatorWithPadding|DataCollatorFor(LanguageModeling|Seq2Seq|TokenClassification)|pad_packed_sequence|BucketIterator|bucket",
    re.IGNORECASE,
)
MAKERS = frozenset({"randint", "randn", "rand", "zeros", "ones", "full", "empty"})
RANDOM = frozenset({"randint", "randrange", "choice", "integers", "uniform", "randperm"})


def gather(index: Index, recorder: Recorder) -> dict[str, list[Evidence]]:
    """The evidence of a module, by fact."""
    found: dict[str, list[Evidence]] = {}

    def note(name: str, node: ast.AST, text: str) -> None:
        found.setdefault(name, []).append(Evidence(recorder.place(node), text))

    varying = _varying_names(index.tree)
    for node in index.ignored_targets:
        note("ignored-targets", node, "targets are set to the ignored index")
    for node in walk(index.tree):
        if isinstance(node, ast.Call):
            name = terminal(node.func)
            if PADDING.fullmatch(name):
                note("padded", node, f"`{name}` pads sequences of different length")
            elif name in MAKERS and _has_varying_shape(node, varying):
                note("varying-units", node, f"`{recorder.text(node)}` has a length that varies")
    if "dist_autograd" in index.identifiers:
        note("dist-autograd", index.tree, "torch.distributed.autograd")
    if index.is_distributed:
        found.setdefault("distributed", []).append(Evidence(recorder.place(index.tree), "torch.distributed"))
    return found


def _varying_names(tree: ast.Module) -> set[str]:
    """Names that take a different number each time: loop variables over sizes, random integers."""
    names: set[str] = set()
    for node in walk(tree):
        if isinstance(node, ast.comprehension) and not _is_range(node.iter):
            names.update(part.id for part in walk(node.target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.Assign):
            drawn = (
                isinstance(node.value, ast.Call)
                and terminal(node.value.func) in {"int"} | RANDOM
                and any(isinstance(part, ast.Call) and terminal(part.func) in RANDOM for part in walk(node.value))
            )
            if drawn and all(isinstance(target, ast.Name) for target in node.targets):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and terminal(node.func) in {"range", "enumerate"}


def _has_varying_shape(call: ast.Call, varying: set[str]) -> bool:
    shapes = [arg for arg in call.args if isinstance(arg, (ast.Tuple, ast.List, ast.Name))]
    return any(isinstance(part, ast.Name) and part.id in varying for shape in shapes for part in walk(shape))
