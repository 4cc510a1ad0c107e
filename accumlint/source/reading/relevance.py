"""Which statements can matter to the rehearsal of a training loop; the others are passed over.

A statement matters if it can bring about an event, leaves its block, or sets a name that such a statement needs, directly or
through other names. Names are compared by identifier, over the whole module: coarse, but never too little.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk

TALK = re.compile(
    r"^(print|log\w*|info|debug|warning|warn|error|add_scalar\w*|add_image\w*|set_description\w*|set_postfix\w*|write|flush|close|display|track|report"
    r"|makedirs|mkdir|empty_cache|collect|manual_seed\w*|seed|barrier|synchronize)$"
)
TALKERS = re.compile(
    r"log(ger|ging)?$|writer|wandb|pbar|progress|tqdm|tensorboard|meter|stats|history|timer|profiler|^os$|^warnings$|^sys$", re.IGNORECASE
)
KEPT = (
    ast.Return,
    ast.Raise,
    ast.Break,
    ast.Continue,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
    ast.Assert,
)
READING = (
    *(ast.If, ast.While, ast.IfExp, ast.For, ast.AsyncFor, ast.comprehension, ast.With, ast.AsyncWith),
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Assert, ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign),
)
MAKING = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.If, ast.While, ast.keyword, ast.Call)
HOLDERS = (ast.Call, ast.Dict, ast.List, ast.Tuple)
COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


TRAINS = re.compile(r"(^|_)(model|net|network|optim(izer)?|opt|scaler|parameters|params)s?(_|$)|[a-z](Model|Net|Optimizer)$")
USED_TO_TRAIN = frozenset({"parameters", "named_parameters", "zero_grad", "no_sync", "unscale_", "param_groups"})
NOTHING: frozenset[str] = frozenset()
PLAIN_BASES = frozenset(
    """
    Module object ABC Dataset IterableDataset Sampler Optimizer Enum NamedTuple TypedDict Protocol Exception
    """.split()
)


class Relevance:
    """Answers, for one module, which statements may be passed over."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.known: dict[int, bool] = {}  # whether statements are idle, as far as that was asked
        self.holding = frozenset(self._made_of_what_trains())
        self.needed = self._close(self._start())

    def idle(self, node: ast.stmt) -> bool:
        """Whether a statement can neither bring about an event nor set anything that matters."""
        known = self.known.get(id(node))
        if known is None:
            known = self.known[id(node)] = self._is_idle(node)
        return known

    def _is_idle(self, node: ast.stmt) -> bool:
        if isinstance(node, KEPT) or self.index.kinds(node) or self.index.holds(node, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Await):
            return False
        if self.index.keeps_books(node):
            return False
        if isinstance(node, COMPOUND):
            return not self.index.holds(node, *KEPT) and all(self.idle(inner) for inner in _statements(node))
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and not _is_number(node.value):
            return False  # a running sum may keep graphs alive
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return not any(_names(target) & self.needed for target in targets) and not self._calls_matter(node)
        if isinstance(node, ast.Expr):
            return not self._calls_matter(node)
        return isinstance(node, (ast.Pass, ast.Delete))

    def _calls_matter(self, node: ast.stmt) -> bool:
        """Whether a call in the statement may change something that matters: what it is given or called on."""
        for part in every(node, ast.Call):
            if not isinstance(part, ast.Call):
                continue
            name = terminal(part.func)
            receiver = terminal(part.func.value) if isinstance(part.func, ast.Attribute) else ""
            if TALK.match(name) or (receiver and TALKERS.search(receiver)) or name in TRACKED_QUIET:
                continue
            if _declares_option(node, part) and not self.index.callees(part):
                continue
            touched = {terminal(arg) for arg in part.args} | {receiver} if isinstance(node, ast.Expr) else set()
            if "self" in touched and (receiver != "self" or self.derives) and not self.index.callees(part):
                return True  # what a base class does that is not there, or who is handed the object
            if (
                touched & self.needed
                or name in self.index.tracked
                or name == "enter_context"
                or (isinstance(node, ast.Expr) and self.index.callees(part))
            ):
                return True
        return False

    @cached_property
    def derives(self) -> bool:
        """Whether a class derives from one that is not in these files."""
        bases = (terminal(base) for cls in every(self.index.tree, ast.ClassDef) if isinstance(cls, ast.ClassDef) for base in cls.bases)
        return any(base not in self.index.classes and base not in PLAIN_BASES for base in bases)

    def _made_of_what_trains(self) -> Iterator[str]:
        """The names of objects that are made of models, optimizers and scalers, and that are used in calls made for what they do."""
        said = [node.value for node in every(self.index.tree, ast.Expr) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
        used = {terminal(call.func.value) for call in said if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)}
        used |= {arg.id for call in said if isinstance(call, ast.Call) for arg in call.args if isinstance(arg, ast.Name)}
        for node in every(self.index.tree, ast.Assign):
            if isinstance(node, ast.Assign) and isinstance(node.value, HOLDERS) and self._holds(node.value):
                yield from (used & {terminal(target) for target in node.targets}) - {"self"}

    def _holds(self, made: ast.expr) -> bool:
        if isinstance(made, ast.Call):
            parts = [] if self.index.callees(made) else [*made.args, *(keyword.value for keyword in made.keywords)]
        else:
            parts = list(made.values) if isinstance(made, ast.Dict) else getattr(made, "elts", [])
        given = map(terminal, parts)
        return any(name == "self" or TRAINS.search(name) or self.index.usage.get(name, NOTHING) & USED_TO_TRAIN for name in given)

    def _start(self) -> set[str]:
        """The names that event-bearing statements and what guards them read."""
        found: set[str] = set(self.holding)
        for node in every(self.index.tree, *READING):
            if isinstance(node, (ast.If, ast.While, ast.IfExp)):
                if (
                    isinstance(node, ast.IfExp)
                    or self.index.kinds(node)
                    or self.index.keeps_books(node)
                    or self.index.holds(node, ast.Continue, ast.Break, ast.Return, ast.Raise)
                ):
                    found |= _names(node.test)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                found |= _names(node.iter)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    found |= _names(item.context_expr)
            elif isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom, ast.Assert)):
                found |= {name for part in ast.iter_child_nodes(node) for name in _names(part)}
            elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)) and (
                self.index.kinds(node) or self.index.keeps_books(node) or self._tracks(node)
            ):
                found |= _names(node)
        return found

    def _tracks(self, node: ast.stmt) -> bool:
        tracked = self.index.tracked
        return any(
            (isinstance(part, ast.Attribute) and part.attr in tracked) or (isinstance(part, ast.Name) and part.id in tracked)
            for part in walk(node)
        )

    def _close(self, needed: set[str]) -> frozenset[str]:
        """Adds what the needed names are made of."""
        sources: dict[str, set[str]] = defaultdict(set)
        for node in every(self.index.tree, *MAKING):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for name in _names(target):
                        sources[name] |= _names(node.value)
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                for name in _names(node.target):
                    sources[name] |= _names(node.value)
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                for name in _names(node.target):
                    sources[name] |= _names(node.iter)
            elif isinstance(node, (ast.If, ast.While)):
                tested = _names(node.test)
                for name in _assigned(node):
                    sources[name] |= tested
            elif isinstance(node, ast.keyword) and node.arg is not None:
                sources[node.arg] |= _names(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLS:
                sources[terminal(node.func.value)] |= {name for arg in node.args for name in _names(arg)}
        pending = list(needed)
        while pending:
            for name in sources.get(pending.pop(), ()):
                if name not in needed:
                    needed.add(name)
                    pending.append(name)
        needed.discard("self")
        return frozenset(needed)


FILLS = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put"})
TRACKED_QUIET = frozenset(
    """
    item detach tolist cpu numpy format join time perf_counter
    """.split()
)


def _declares_option(node: ast.stmt, call: ast.Call) -> bool:
    """`parser.add_argument("--lr", type=float)` as a statement: what the option is, nobody knows before the arguments are parsed."""
    if not isinstance(node, ast.Expr) or node.value is not call or not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr == "add_argument" and isinstance(call.func.value, ast.Name)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Call) and terminal(node.func) in {"item", "len", "time"})


def _names(node: ast.AST) -> set[str]:
    """Every identifier in an expression: names, attributes, string keys."""
    found: set[str] = set()
    for part in walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) and isinstance(part.slice.value, str):
            found.add(part.slice.value)
    return found


def _assigned(branch: ast.stmt) -> set[str]:
    """What statements of a branch set."""
    found: set[str] = set()
    for part in every(branch, ast.Assign, ast.AugAssign, ast.AnnAssign):
        if isinstance(part, ast.Assign):
            found.update(*map(_names, part.targets))
        elif isinstance(part, (ast.AugAssign, ast.AnnAssign)):
            found |= _names(part.target)
    return found


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        yield from getattr(node, name, ())
    for handler in getattr(node, "handlers", ()):
        yield from handler.body
    for case in getattr(node, "cases", ()):
        yield from case.body
