"""Numbers that count in the wrong unit, as far as a module shows them: totals of schedules, skips of a resumed run, K itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accumlint.source.reading.facts import names_k, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.source.reading.units import DEEPEST, Units
from accumlint.trace import Kind

LOADER = re.compile(r"loader|(^|_)(batches|dl)$", re.IGNORECASE)
TOTALS = ("num_training_steps", "total_steps", "T_max", "total_iters", "t_total", "max_iters", "steps_per_epoch", "first_cycle_steps")
TOTAL_NAME = re.compile(
    r"^(t_total|T_max|total|horizon)$|(^|_)(total|max|train|training)_(train_|training_)?(steps|iters|iterations|updates)$"
)
POSITIONS = {
    "CosineAnnealingLR": 1,
    "PolynomialLR": 2,
    "get_linear_schedule_with_warmup": 2,
    "get_cosine_schedule_with_warmup": 2,
    "get_cosine_with_hard_restarts_schedule_with_warmup": 2,
    "get_polynomial_decay_schedule_with_warmup": 2,
    "get_scheduler": 3,
    "OneCycleLR": 2,
}
MICRO_BATCH = re.compile(r"micro_?(batch|bs)|per_(device|gpu)\w*_(batch|bs)", re.IGNORECASE)  # a plain batch size may be that of an update
SAMPLES = re.compile(
    r"^(n|len|num)$|samples|examples|(^|_)(data|dataset|train)_?(size|len|length)$|^(n|num|len)_?(train|data|rows|items)", re.IGNORECASE
)
UPDATES = re.compile(
    r"(^|_)(num_?|n_?)?(updates|optim(izer)?_?steps?|opt_?steps?|update_steps?)(_?(done|count|taken|num))?$", re.IGNORECASE
)
GLOBAL_BATCH = re.compile(r"(global|total|effective|target|overall|desired)_?(train_?)?(mini_?)?(batch|bs)", re.IGNORECASE)
GLOBAL_HELP = re.compile(
    r"\b(global|overall)\b[\w\s-]*\bbatch|batch[\w\s-]*\b(over|across|of|on) all (the )?(ranks|gpus|devices|processes|workers)",
    re.IGNORECASE,
)
SIZE = re.compile(r"batch|(^|_)bs(_|$)|per_(device|gpu)|micro", re.IGNORECASE)
WORLD = re.compile(
    r"world|num_processes|n?_?gpus?(_|$)|n_?gpus?$|dp_size|replicas|nprocs|ranks?$|num_devices|device_count|data_parallel|(^|_)dp(_|$)|nnodes",
    re.IGNORECASE,
)
NODES = re.compile(r"^n_?nodes$|(^|_)num_?nodes$|^nodes$|^node_count$", re.IGNORECASE)
NODE_SIGN = re.compile(r"^n_?nodes$|(^|_)num_?nodes$|^node_rank$", re.IGNORECASE)
OF_NODE = re.compile(r"(gpus?|devices?|ranks?|proc(esse)?s?)_per_node$|^local_world_size$|^device_count$", re.IGNORECASE)


def total_of(call: ast.Call) -> ast.expr | None:
    """The argument of a schedule that says how long it is."""
    for keyword in call.keywords:
        if keyword.arg in TOTALS:
            return keyword.value
    at = POSITIONS.get(terminal(call.func))
    return call.args[at] if at is not None and at < len(call.args) else None


def totals_in(index: Index, call: ast.Call) -> Iterator[ast.expr]:
    """The totals that the function behind a `LambdaLR` divides by, told by their names."""
    if terminal(call.func) not in {"LambdaLR", "MultiplicativeLR"}:
        return
    given = call.args[1] if len(call.args) > 1 else next((one.value for one in call.keywords if one.arg == "lr_lambda"), None)
    named = next((part.func for part in walk(given) if isinstance(part, ast.Call)), given) if given is not None else None
    if isinstance(named, ast.Lambda):
        bodies: list[ast.AST] = [named]
    else:
        bodies = [
            node
            for node in every(index.tree, ast.FunctionDef)
            if isinstance(node, ast.FunctionDef) and named is not None and node.name == terminal(named)
        ]
    read = [
        part for body in bodies for part in walk(body) if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Load)
    ]
    if not any(names_k(terminal(part)) for part in read):
        yield from (part for part in read if TOTAL_NAME.search(terminal(part)))


def counts_batches(node: ast.expr) -> bool:
    """`len(loader)`, or samples over the size of a micro-batch."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        return bool(MICRO_BATCH.search(terminal(node.right)) and SAMPLES.search(terminal(node.left)))
    return isinstance(node, ast.Call) and terminal(node.func) == "len" and bool(node.args) and bool(LOADER.search(terminal(node.args[0])))


def bounds_in_micro_batches(index: Index) -> frozenset[str]:
    """The names of settings that end a loop which counts micro-batches: its index, or what it counts up, tells the boundary by K."""
    return index.once("bounds in micro-batches", index.tree, lambda _: frozenset(_bounds_in_micro_batches(index)))


def _bounds_in_micro_batches(index: Index) -> Iterator[str]:
    counters = _told_by_k(index)
    if not counters:
        return
    units = index.once("units", index.tree, Units)
    for counter, bound in _ends(index):
        whole = bound.left if isinstance(bound, ast.BinOp) and isinstance(bound.op, ast.Add) else bound  # `range(1, total + 1)`
        name = terminal(whole) if isinstance(whole, (ast.Name, ast.Attribute)) else ""
        if name and counter in counters and not names_k(name) and units.degree(whole, counts_batches) is None:
            yield name


def _told_by_k(index: Index) -> set[str]:
    """The names that count one on for each micro-batch: `if counter % K == 0` steps, and counting stands outside of that."""
    steps = [node for node in every(index.tree, ast.If) if isinstance(node, ast.If) and Kind.STEP in index.kinds(node.body)]
    found: set[str] = set()
    for branch in steps:
        for part in walk(branch.test):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and names_k(terminal(part.right)):
                found |= {terminal(one) for one in walk(part.left) if isinstance(one, (ast.Name, ast.Attribute))}
    return found - _update_counters(index)


def _ends(index: Index) -> Iterator[tuple[str, ast.expr]]:
    """What counts the turns of an outermost loop, and the bound at which it ends."""
    loops = every(index.tree, ast.For, ast.While)
    inner = {id(part) for loop in loops for part in walk(loop) if part is not loop and isinstance(part, (ast.For, ast.While))}
    for loop in loops:
        match loop:
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[*_, bound])) if id(loop) not in inner:
                yield terminal(loop.target), bound
            case ast.While(test=ast.Compare(left=left, ops=[ast.Lt() | ast.LtE()], comparators=[bound])):
                yield terminal(left), bound


def skips_in_updates(index: Index) -> Iterator[tuple[ast.expr, int]]:
    """What a resumed loop compares its index with, or skips of its loader, where that was counted in updates: with its degree of K."""
    counters = _update_counters(index)
    if not counters:
        return
    periods = _periods(index)
    units = index.once("units", index.tree, Units).asking(lambda name: name in periods or names_k(name))
    for bound in _skips(index):
        degree = units.degree(bound, lambda node: terminal(node) in counters and not isinstance(node, ast.Call))
        if degree is not None and degree != 1:
            yield bound, degree


def counted_in_updates(index: Index) -> dict[int, str]:
    """The advances by one of a counter of updates, by node, each with what is seen to take it for one."""
    advances = [node for node in every(index.tree, ast.AugAssign) if isinstance(node, ast.AugAssign) and _advances_by_one(node)]
    if not advances or not any(map(names_k, index.identifiers)):
        return {}
    names = {terminal(node.target) for node in advances}
    signs = {**_named(names - _tell_boundaries(index)), **_rates(index, names), **_limits(index, names)}
    return {id(node): signs[terminal(node.target)] for node in advances if terminal(node.target) in signs}


def _advances_by_one(node: ast.AugAssign) -> bool:
    return isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant) and node.value.value == 1


def _tell_boundaries(index: Index) -> frozenset[str]:
    """The names that a boundary is told by: what counts there counts micro-batches, whatever its name."""
    branches = (node for node in every(index.tree, ast.If) if isinstance(node, ast.If) and index.has_modulo(node.test))
    return frozenset(terminal(part) for node in branches if _is_boundary(index, node) for part in walk(node.test))


def _named(counters: set[str]) -> dict[str, str]:
    return {name: "its name says that it counts updates" for name in counters if UPDATES.search(name)}


def _rates(index: Index, counters: set[str]) -> dict[str, str]:
    """What sets the learning rate beside an update by a counter that no boundary is told by."""
    branches = [node for node in every(index.tree, ast.If) if isinstance(node, ast.If)]
    tests = {terminal(part) for node in branches if index.has_modulo(node.test) for part in walk(node.test)}
    found: dict[str, str] = {}
    for branch in branches:
        for node in (part for each in branch.body for part in walk(each)) if _is_boundary(index, branch) else ():
            if isinstance(node, ast.Assign) and any(_is_rate(target) for target in node.targets):
                read = {terminal(part) for part in walk(node.value)} & counters - tests
                found |= {
                    name: f"`{ast.unparse(node.value)}` is the learning rate of an update: its schedule passes K times as fast"
                    for name in read
                }
    return found


def _is_rate(target: ast.expr) -> bool:
    """`group["lr"]`."""
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == "lr"


def _limits(index: Index, counters: set[str]) -> dict[str, str]:
    """What counters are compared with where a loop over the data ends: `if counter >= limit: break`, `while counter < limit:`."""
    units = index.once("units", index.tree, Units)
    found: dict[str, str] = {}
    for node in every(index.tree, ast.If, ast.While):
        if isinstance(node, ast.If) and any(isinstance(part, (ast.Break, ast.Return)) for part in node.body):
            reached: tuple[type[ast.cmpop], ...] = (ast.Gt, ast.GtE, ast.Eq)
        elif isinstance(node, ast.While):
            reached = (ast.Lt, ast.LtE, ast.NotEq)
        else:
            continue
        match node.test:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(op, reached) and terminal(left) in counters:
                if units.degree(right, counts_batches) == -1:
                    found[terminal(left)] = f"`{ast.unparse(right)}` counts updates: the run ends after 1/K of them"
    return found


def _update_counters(index: Index) -> frozenset[str]:
    """Names that are advanced only where an update is made."""
    gated: set[ast.AST] = set()
    for node in every(index.tree, ast.If):
        if isinstance(node, ast.If) and _is_boundary(index, node):
            gated.update(part for each in node.body for part in walk(each) if isinstance(part, ast.AugAssign))
    advanced = [node for node in every(index.tree, ast.AugAssign) if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)]
    return frozenset(terminal(node.target) for node in advanced if node in gated) - {
        terminal(node.target) for node in advanced if node not in gated
    }


def _periods(index: Index) -> frozenset[str]:
    """The names of what a boundary's test takes the remainder by."""
    tests = (node.test for node in every(index.tree, ast.If) if isinstance(node, ast.If) and _is_boundary(index, node))
    moduli = (part.right for test in tests for part in walk(test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod))
    return frozenset(terminal(modulus) for modulus in moduli if isinstance(modulus, (ast.Name, ast.Attribute, ast.Subscript)))


def _is_boundary(index: Index, node: ast.If) -> bool:
    kinds = index.kinds(node.body)
    if any(isinstance(part, ast.Attribute) and part.attr == "sync_gradients" for part in walk(node.test)):
        return True
    named = any(isinstance(part, (ast.Name, ast.Attribute)) and names_k(terminal(part)) for part in walk(node.test))
    return Kind.BACKWARD not in kinds and (Kind.STEP in kinds or (index.has_modulo(node.test) and named))


def _skips(index: Index) -> Iterator[ast.expr]:
    """The numbers of batches that statements skip."""
    own = index.functions.get("skip_first_batches", ())  # whose callers say how many
    helpers = {id(part) for helper in own for part in walk(helper)}
    for node in every(index.tree, ast.Call, ast.For, ast.AsyncFor):
        if isinstance(node, ast.Call) and terminal(node.func) == "skip_first_batches":
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "num_batches")
            yield from node.args[1:2]
        elif isinstance(node, ast.Call) and terminal(node.func) == "islice" and len(node.args) >= 3 and id(node) not in helpers:
            yield node.args[1]
        elif isinstance(node, (ast.For, ast.AsyncFor)) and _only_draws(node):
            yield from node.iter.args[:1] if isinstance(node.iter, ast.Call) else ()
        elif isinstance(node, (ast.For, ast.AsyncFor)) and isinstance(node.target, ast.Tuple) and _is_enumerated(node.iter):
            yield from _bounds(node, terminal(node.target.elts[0]))


def _only_draws(loop: ast.For | ast.AsyncFor) -> bool:
    """`for _ in range(n): next(batches)`."""
    ranged = isinstance(loop.iter, ast.Call) and terminal(loop.iter.func) == "range" and len(loop.iter.args) == 1
    drawn = loop.body[0].value if len(loop.body) == 1 and isinstance(loop.body[0], ast.Expr) else None
    return ranged and isinstance(drawn, ast.Call) and terminal(drawn.func) in {"next", "__next__"}


def _is_enumerated(node: ast.expr) -> bool:
    """Whether an iterable gives the index of a batch beside it, also behind a progress bar."""
    return any(isinstance(part, ast.Call) and terminal(part.func) == "enumerate" for part in walk(node))


def _bounds(loop: ast.For | ast.AsyncFor, counter: str) -> Iterator[ast.expr]:
    """What the loop's index is compared with before a `continue`."""
    for statement in loop.body:
        for branch in walk(statement):
            if not isinstance(branch, ast.If) or not any(isinstance(part, ast.Continue) for part in branch.body):
                continue
            yield from _counted_down(branch)
            for test in walk(branch.test):
                if isinstance(test, ast.Compare) and len(test.ops) == 1:
                    left, right = test.left, test.comparators[0]
                    if isinstance(test.ops[0], (ast.Lt, ast.LtE)) and terminal(left) == counter and isinstance(left, ast.Name):
                        yield right
                    elif isinstance(test.ops[0], (ast.Gt, ast.GtE)) and terminal(right) == counter and isinstance(right, ast.Name):
                        yield left


def _counted_down(branch: ast.If) -> Iterator[ast.expr]:
    """What is counted down to zero before each `continue`: `if to_skip > 0: to_skip -= 1; continue`."""
    down = {terminal(part.target) for part in branch.body if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Sub)}
    test = branch.test.left if isinstance(branch.test, ast.Compare) and isinstance(branch.test.ops[0], ast.Gt) else branch.test
    if terminal(test) in down:
        yield test


def k_without_ranks(index: Index) -> Iterator[tuple[ast.expr, str]]:
    """Where K is a global batch size over that of one rank, though there are several ranks: the expression, and the name of K."""
    units = index.once("units", index.tree, Units) if index.is_distributed else None
    for quotient, name in _global_over_own(index):
        if units is not None and not any(units.mentions(each, WORLD.search) for each in units.definitions[name]):
            yield quotient, name


def k_without_nodes(index: Index) -> Iterator[tuple[ast.expr, str]]:
    """Where only the ranks of one node divide the global batch, though the source speaks of several nodes."""
    if not any(map(NODE_SIGN.search, index.identifiers)):
        return
    units = index.once("units", index.tree, Units)
    for quotient, name in _global_over_own(index):
        kinds = {kind for each in units.definitions[name] for kind in _ranks_in(units, each)}
        if kinds == {OF_NODE}:
            yield quotient, name


def _ranks_in(units: Units, node: ast.AST, seen: frozenset[str] = frozenset()) -> Iterator[re.Pattern[str]]:
    """Which counts of ranks are in a number: those of a node, the nodes, or all ranks; `world_size // nnodes` are those of a node."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)) and NODES.search(terminal(node.right)):
        yield OF_NODE
        return
    name = terminal(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) else ""
    found = next((kind for kind in (OF_NODE, NODES, WORLD) if name and kind.search(name)), None)
    made = units.definitions.get(name, ()) if name and name not in seen and len(seen) < DEEPEST else ()
    if found is not None and not (found is WORLD and made):
        yield found
        return
    for each in (*ast.iter_child_nodes(node), *made):
        yield from _ranks_in(units, each, seen | {name} if name else seen)


def _global_over_own(index: Index) -> Iterator[tuple[ast.expr, str]]:
    """Where K is a global batch size over that of one rank, in a program of several."""
    if not index.is_distributed:
        return
    told = _told_to_be_global(index)
    for node in every(index.tree, ast.Assign):
        if not isinstance(node, ast.Assign) or not names_k(terminal(node.targets[0])):
            continue
        quotient = next((part for part in walk(node.value) if _is_quotient(part, told)), None)
        if isinstance(quotient, ast.BinOp):
            yield quotient, terminal(node.targets[0])


def _told_to_be_global(index: Index) -> frozenset[str]:
    """The options whose help says that they are the batch of all ranks."""
    found: set[str] = set()
    for call in every(index.tree, ast.Call):
        if isinstance(call, ast.Call) and terminal(call.func) == "add_argument":
            helps = (one.value for one in call.keywords if one.arg == "help")
            flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if any(isinstance(one, ast.Constant) and GLOBAL_HELP.search(str(one.value)) for one in helps):
                found |= {flag.lstrip("-").replace("-", "_") for flag in flags}
    return frozenset(found)


def _is_quotient(node: ast.AST, told: frozenset[str]) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, (ast.Div, ast.FloorDiv))
        and (bool(GLOBAL_BATCH.search(terminal(node.left))) or terminal(node.left) in told)
        and any(SIZE.search(terminal(part)) for part in walk(node.right) if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)))
    )
