"""What a module says about its data without being rehearsed: that targets are ignored, masked or of varying number."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from accumlint.source.reading.counting import k_without_nodes, k_without_ranks, skips_in_updates
from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.source.reading.remarks import remarks
from accumlint.source.reading.shifted import fills_behind
from accumlint.source.rehearsal.branches import WRAPPERS
from accumlint.source.rehearsal.record import Recorder
from accumlint.source.vocabulary.distributed import BY_HAND
from accumlint.trace import FILE_LINES, Evidence

PADDING = re.compile(
    r"pad_sequence|DataCollatorWithPadding|DataCollatorFor(LanguageModeling|Seq2Seq|TokenClassification)|pad_packed_sequence|BucketIterator|bucket",
    re.IGNORECASE,
)
SUMS = re.compile(r"#[^\n]*\breduction\s*={1,2}\s*[\"']?sum\b")  # a comment that says how the losses are meant
RATES = frozenset({"lr", "learning_rate"})
MAKERS = frozenset({"randint", "randn", "rand", "zeros", "ones", "full", "empty"})
RANDOM = frozenset({"randint", "randrange", "choice", "integers", "uniform", "randperm"})


def gather(index: Index, recorder: Recorder) -> dict[str, list[Evidence]]:
    """The evidence of a module, by fact."""
    found: dict[str, list[Evidence]] = {}

    def note(name: str, node: ast.AST, text: str) -> None:
        found.setdefault(name, []).append(Evidence(recorder.place(node), text or recorder.text(node)))

    varying = _varying_names(index.tree)
    makers: list[ast.Call] = []
    if fills_behind(index.tree, index.ignored_targets):
        note("ignored-behind", index.ignored_targets[0], "")
    for node in index.ignored_targets:
        note("ignored-targets", node, "targets are set to the ignored index")
    for node in every(index.tree, ast.Call, ast.For, ast.While):
        if isinstance(node, ast.Call):
            name = terminal(node.func)
            if PADDING.fullmatch(name):
                note("padded", node, f"`{name}` pads sequences of different length")
            elif name in MAKERS and _has_varying_shape(node, varying):
                makers.append(node)
        elif isinstance(node, (ast.For, ast.While)):
            for gate in _changing_gates(node):
                note("warm-up", gate, f"`{recorder.text(gate)}` changes over the run")
    for node in _in_scope(index, makers) if makers else ():
        note("varying-units", node, f"`{recorder.text(node)}` has a length that varies")
    remarks(index, note)
    for bound, degree in skips_in_updates(index):
        note("skips-in-updates" if degree < 1 else "skips-k-twice", bound, recorder.text(bound))
    for quotient, name in k_without_ranks(index):
        note("k-without-ranks", quotient, name)
    for quotient, name in k_without_nodes(index):
        note("k-without-nodes", quotient, name)
    if "dist_autograd" in index.identifiers:
        note("dist-autograd", index.tree, "torch.distributed.autograd")
    if SUMS.search(recorder.program.source.text):
        note("sum-convention", index.tree, "losses that are sums")
    for rate in _rates_over_k(index):
        note("sum-convention", rate, f"`{recorder.text(rate)}` is a rate for sums")
    by_hand = sorted(index.identifiers & BY_HAND)
    if by_hand:  # whether or not this world comes to it
        note("reduces-by-hand", index.tree, by_hand[0])
    made = next((node for node in every(index.tree, ast.Call) if isinstance(node, ast.Call) and terminal(node.func) in WRAPPERS), None)
    if made is not None:
        note("makes-wrapper", made, terminal(made.func))
    if index.is_distributed:
        found.setdefault("distributed", []).append(Evidence(recorder.place(index.tree), "torch.distributed"))
    return found


def _rates_over_k(index: Index) -> Iterator[ast.BinOp]:
    """`lr=0.1 / k`, where something is gated by k or done k times: the learning rate is divided in the place of the losses."""
    given = [node.value for node in every(index.tree, ast.keyword) if isinstance(node, ast.keyword) and node.arg in RATES]
    given += [node.value for node in every(index.tree, ast.Assign) if isinstance(node, ast.Assign) and terminal(node.targets[0]) in RATES]
    rates = [rate for rate in given if isinstance(rate, ast.BinOp) and isinstance(rate.op, ast.Div) and terminal(rate.right)]
    if not rates:
        return
    counts = {terminal(node.right) for node in every(index.tree, ast.BinOp) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)}
    for node in every(index.tree, ast.Call):
        if isinstance(node, ast.Call) and terminal(node.func) == "range":
            counts |= {terminal(each) for each in node.args}
    yield from (rate for rate in rates if terminal(rate.right) in counts)


class Stretch(NamedTuple):
    """Lines of a file."""

    path: str
    first: int
    last: int

    def holds(self, evidence: Evidence) -> bool:
        return evidence.place.path == self.path and self.first <= evidence.place.line <= self.last


def never_run(index: Index, recorder: Recorder, sides: Iterable[tuple[ast.If, set[bool]]], entered: Container[int]) -> Iterator[Stretch]:
    """What no run of this kind comes to: sides of if statements that are ruled out, and modules of other files that it does not use."""
    for node, open_sides in sides:
        for side, body in ((True, node.body), (False, node.orelse)):
            if side not in open_sides and body:
                yield _stretch(recorder, body[0], body[-1])
    for function, owner in index.owner.items():
        if id(function) in entered or function.lineno < FILE_LINES:
            continue
        if any(isinstance(member, ast.FunctionDef) and member.name == "forward" for member in owner.body):
            yield _stretch(recorder, function, function)


def _stretch(recorder: Recorder, first: ast.AST, last: ast.AST) -> Stretch:
    begin, end = recorder.place(first), recorder.place(last)
    return Stretch(begin.path, begin.line, end.end_line)


def _changing_gates(loop: ast.For | ast.While) -> Iterator[ast.expr]:
    """The moduli of a loop's tests which the loop itself sets under a condition: `if i <= warmup: k = interp(i, …)`."""
    branches = list(_own_branches(loop.body))
    changed = {
        target.id
        for branch in branches
        for part in (*branch.body, *branch.orelse)
        if isinstance(part, ast.Assign) and not isinstance(part.value, ast.Constant)
        for target in part.targets
        if isinstance(target, ast.Name)
    }
    for branch in branches if changed else ():
        for part in walk(branch.test):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and terminal(part.right) in changed:
                yield part.right


def _own_branches(statements: Iterable[ast.stmt]) -> Iterator[ast.If]:
    """The branches of a block that lie in no loop inside it."""
    for statement in statements:
        if isinstance(statement, ast.If):
            yield statement
            yield from _own_branches((*statement.body, *statement.orelse))
        elif isinstance(statement, (ast.With, ast.Try)):
            yield from _own_branches(statement.body)


def _varying_names(tree: ast.AST) -> set[str]:
    """Names that take a different number each time: loop variables over sizes, random integers."""
    names: set[str] = set()
    for node in every(tree, ast.comprehension, ast.Assign):
        if isinstance(node, ast.comprehension):
            names |= _taken(node)
        elif isinstance(node, ast.Assign):
            names |= _drawn(node)
    return names


def _taken(node: ast.comprehension) -> set[str]:
    return set() if _is_range(node.iter) else {part.id for part in walk(node.target) if isinstance(part, ast.Name)}


def _drawn(node: ast.Assign) -> set[str]:
    drawn = (
        isinstance(node.value, ast.Call)
        and terminal(node.value.func) in {"int"} | RANDOM
        and any(isinstance(part, ast.Call) and terminal(part.func) in RANDOM for part in walk(node.value))
    )
    return {target.id for target in node.targets if isinstance(target, ast.Name)} if drawn else set()


def _in_scope(index: Index, makers: list[ast.Call]) -> Iterator[ast.Call]:
    """Those whose number varies where they stand: in its comprehension or function, or in a function that is given it."""
    scopes: list[tuple[ast.AST, set[str]]] = []
    for node in every(
        index.tree, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module
    ):
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            scopes.append((node, set().union(*map(_taken, node.generators))))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            scopes.append((node, set().union(*(_drawn(part) for part in walk(node) if isinstance(part, ast.Assign)))))
    scopes += [given for scope, names in scopes if names for given in _given(index, scope, names)]
    for maker in makers:
        if any(part is maker and _has_varying_shape(maker, names) for scope, names in scopes if names for part in walk(scope)):
            yield maker


def _given(index: Index, scope: ast.AST, names: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """The functions that a scope calls with its varying numbers, and what they call them."""
    for call in walk(scope):
        if not isinstance(call, ast.Call):
            continue
        for function in index.callees(call):
            parameters = [one.arg for one in function.args.args if one.arg != "self"]
            given = {to for to, arg in zip(parameters, call.args, strict=False) if isinstance(arg, ast.Name) and arg.id in names}
            given |= {word.arg for word in call.keywords if word.arg and isinstance(word.value, ast.Name) and word.value.id in names}
            if given:
                yield function, given


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and terminal(node.func) in {"range", "enumerate"}


def _has_varying_shape(call: ast.Call, varying: set[str]) -> bool:
    shapes = [arg for arg in call.args if isinstance(arg, (ast.Tuple, ast.List, ast.Name))]
    return any(isinstance(part, ast.Name) and part.id in varying for shape in shapes for part in walk(shape))
