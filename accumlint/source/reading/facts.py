"""Facts about a module that can be had by looking: its functions and classes, what is assigned, imported and compared."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

from accumlint.source.reading.kept_targets import leaves_some
from accumlint.source.reading.nodes import every, stands_in, walk
from accumlint.source.reading.targets import find_ignored_targets
from accumlint.source.reading.words import DDP_NAMES, FSDP_NAMES, found_in
from accumlint.trace import FILE_LINES, Kind, Place, Role

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
T = TypeVar("T")
LAUNCHES = frozenset({"init_process_group", "init_distributed_mode", "DistributedSampler", "hvd"})
EXCHANGES = frozenset({"all_reduce", "all_gather", "get_world_size", "get_rank"})
Loop = ast.For | ast.AsyncFor | ast.While
TELLING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.AugAssign, ast.Assign, ast.Import, ast.ImportFrom, ast.alias),
    *(ast.For, ast.AsyncFor, ast.comprehension),
)  # what says what names mean

SCHEDULER_NAME = re.compile(r"sched|(^|_)lr(_|$)|warmup|lr_?policy|anneal", re.IGNORECASE)
OPTIMIZER_NAME = re.compile(r"optim|(^|_)opts?(_|\d|$)|^sgd$|^adam", re.IGNORECASE)
SCALER_NAME = re.compile(r"scaler", re.IGNORECASE)
ACCUMULATION_NAME = re.compile(
    r"accum|grad_acc|update_freq|iter_size|subdivision|batch_chunk|batch_split|micro_?batches|n_?micro|num_micro|micro_?steps?_per"
    r"|micro_per|virtual_batch|update_interval|update_every|step_every|iters_to_acc|(^|_)gas$|cumulative_iters|(^|_)acc_?steps?$",
    re.IGNORECASE,
)
IN_NAMES_OF_K = ("acc", "update_", "iter_size", "subdivision", "batch_", "micro", "virtual_batch", "step_every", "gas", "cumulative_iters")
names_k = found_in(ACCUMULATION_NAME)


def mentions_k(text: str) -> bool:
    """Whether a name of K stands in a text, which may be long: plain words are found sooner than patterns."""
    lowered = text.lower()
    return any(word in lowered for word in IN_NAMES_OF_K) and ACCUMULATION_NAME.search(text) is not None


CLASS_NAME = re.compile(r"[A-Z]\w*[a-z]")
BACKWARD_NAMES = frozenset({"backward", "manual_backward", "backward_step"})
CLIP_NAMES = frozenset(
    """
    clip_grad_norm_ clip_grad_norm clip_grad_value_ clip_grads_with_norm_ clip_grad_value clip_gradients clip_gradient
    clip_master_grads clip_main_grads dispatch_clip_grad clip_grads
    """.split()
)
CLIPPER_NAME = re.compile(r"grad\w*_?clip|clip\w*_?grad", re.IGNORECASE)
LOSS_WORDS = re.compile(r"loss|cross_entropy|criterion|nll|mse|bce|\bkl_div|perplexity|entropy", re.IGNORECASE)
TRACKED = frozenset(
    """
    no_sync GradScaler DistributedDataParallel DDP DistributedDataParallelCPU FullyShardedDataParallel FSDP fully_shard replicate
    require_backward_grad_sync set_requires_gradient_sync nullcontext no_backward_sync register_post_accumulate_grad_hook
    all_reduce scale_loss all_reduce_gradients requires_grad_ requires_grad register_comm_hook
    """.split()
)


def terminal(node: ast.AST) -> str:
    """The last identifier of a name, an attribute, a subscript by string, or a call of those."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            return node.slice.value
        return terminal(node.value)
    if isinstance(node, ast.Call):
        return terminal(node.func)
    return ""


UNASKED: Any = object()


def names_class(node: ast.expr) -> bool:
    """Whether what is called is spelled like a class, taken from a table of classes, or a class's own `from_…`: that makes a model."""
    if isinstance(node, ast.Subscript):
        table = terminal(node.value)
        return table == "__dict__" or table.isupper()
    if isinstance(node, ast.Attribute) and node.attr.startswith("from_"):
        return True
    of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return not of_self and CLASS_NAME.match(terminal(node)) is not None


class Facts:
    """What stands in one module."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions: dict[str, list[FunctionNode]] = defaultdict(list)
        self.methods: dict[str, list[FunctionNode]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.owner: dict[FunctionNode, ast.ClassDef] = {}
        self.usage: dict[str, set[str]] = defaultdict(set)
        self.augmented: set[str] = set()
        self.assigned: dict[tuple[int, str], int] = defaultdict(int)  # by file and name
        self.given: dict[tuple[int, str], list[ast.expr]] = defaultdict(list)  # what is assigned to a name, by file
        self.made: set[str] = set()  # attributes that are given what a call makes of other things than a function of this name
        self.identifiers: set[str] = set()
        self.imported: set[str] = set()
        self.packages: set[str] = set()  # that are imported, by their first name
        self.words: dict[str, frozenset[Kind]] = {}  # calls of frameworks that bring about events
        self.loop_words: frozenset[str] = frozenset()
        self.launch_words: frozenset[str] = frozenset()
        self.tracked: frozenset[str] = TRACKED
        self.renamed: dict[str, str] = {}  # what imports call otherwise
        self._kinds: dict[int, frozenset[Kind]] = {}
        self._loops: dict[int, bool] = {}
        self.texts: dict[int, str] = {}
        self.places: dict[int, Place] = {}
        self.constants: dict[int, Any] = {}  # what the constants in place are to a rehearsal, by their nodes
        self.roles: dict[str, Role | None] = {}  # of objects, by the names that they go by
        self._memo: dict[tuple[Hashable, int], Any] = {}
        self._collect(tree)

    def learn_words(
        self, kinds: Mapping[str, frozenset[Kind]], loops: frozenset[str], tracked: frozenset[str], launchers: frozenset[str] = frozenset()
    ) -> None:
        """Takes over which calls of frameworks bring about events, run loops and matter; before anything of the kind is asked."""
        self.words = dict(kinds)
        self.loop_words = loops
        self.launch_words = launchers
        self.tracked = TRACKED | tracked

    def once(self, question: Hashable, node: ast.AST, answer: Callable[[ast.AST], T]) -> T:
        """Asks a question about a node at most once; many rehearsals of the same code ask the same."""
        key = (question, id(node))
        found: T = self._memo.get(key, UNASKED)
        if found is UNASKED:
            found = self._memo[key] = answer(node)
        return found

    def holds(self, node: ast.AST, *types: type[ast.AST]) -> bool:
        """Whether a node of one of these types stands inside."""
        return self.once(types, node, lambda one: stands_in(one, types))

    def has_modulo(self, node: ast.AST) -> bool:
        return self.once(
            "modulo", node, lambda one: any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) for part in walk(one))
        )

    def size(self, node: ast.AST) -> int:
        """The number of statements in a node."""
        return self.once("size", node, lambda one: sum(isinstance(part, ast.stmt) for part in walk(one)))

    def is_generator(self, node: ast.AST) -> bool:
        """Whether a function itself yields (its nested functions do not count)."""
        return self.once("generator", node, _yields)

    def _collect(self, tree: ast.Module) -> None:
        self.identifiers.update(node.id for node in every(tree, ast.Name) if isinstance(node, ast.Name))
        for node in every(tree, ast.Attribute):
            if isinstance(node, ast.Attribute):
                self.identifiers.add(node.attr)
                name = terminal(node.value)
                if name:
                    self.usage[name].add(node.attr)
        for node in every(tree, *TELLING):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions[node.name].append(node)
            elif isinstance(node, ast.ClassDef):
                known = self.classes.get(node.name)
                if known is None or _file_of(known) == _file_of(node):  # of classes of the same name the file's own counts
                    self.classes[node.name] = node
                for member in node.body:
                    if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        self.methods[member.name].append(member)
                        self.owner[member] = node
            elif isinstance(node, ast.AugAssign):
                self.augmented.add(terminal(node.target))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.Import):
                self.packages.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                self.packages.add((node.module or "").split(".")[0] if not node.level else "")
            elif isinstance(node, ast.alias):
                self.identifiers.update((node.name.rsplit(".", 1)[-1], node.asname or ""))
                self.imported.add(node.asname or node.name.split(".")[0])
                if node.asname:
                    self.renamed[node.asname] = node.name.rsplit(".", 1)[-1]
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                self.augmented.update(part.id for part in walk(node.target) if isinstance(part, ast.Name))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = (
                value.elts
                if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
                else [value] * len(target.elts)
            )
            for one, its in zip(target.elts, values, strict=False):
                self._assign(one, its)
            return
        name = terminal(target)
        self.assigned[_file_of(target), name] += 1
        if isinstance(target, ast.Name):
            self.given[_file_of(target), name].append(value)
        if isinstance(target, ast.Attribute) and isinstance(value, ast.Call) and all(terminal(part) != name for part in walk(value)):
            self.made.add(name)
        if stands_in(value, (ast.BinOp,)) and any(terminal(part) == name for part in walk(value)):
            self.augmented.add(name)

    @cached_property
    def ignored_targets(self) -> tuple[ast.AST, ...]:
        """Where the module writes the index that the loss ignores into its targets."""
        return tuple(find_ignored_targets(self.tree))

    @property
    def ignores_targets(self) -> bool:
        return bool(self.ignored_targets)

    @cached_property
    def only_pads(self) -> bool:
        """Whether the index that the loss ignores is only ever filled in beside the targets of a sample, which has some of its own."""
        return bool(self.ignored_targets) and leaves_some(self.tree, self.ignored_targets)

    @cached_property
    def keeps_a_target(self) -> bool:
        """Whether some position of a mask or of labels is set by hand, so that at least one target stays."""
        for node in every(self.tree, ast.Assign):
            if isinstance(node, ast.Assign) and not any(isinstance(part, ast.UnaryOp) for part in walk(node.value)):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and any(
                        isinstance(part, ast.Constant) and part.value in {0, -1} for part in walk(target.slice)
                    ):
                        return True
        return False

    @cached_property
    def tested_names(self) -> frozenset[str]:
        """Names that are compared, taken modulo something, or divided by: what a counter is for."""
        found: set[str] = set()
        for node in every(self.tree, ast.Compare, ast.BinOp, ast.Call):
            if isinstance(node, ast.Compare):
                found.update(terminal(part) for part in (node.left, *node.comparators))
                found.update(terminal(part) for part in walk(node.left) if isinstance(part, (ast.Name, ast.Attribute)))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.Div)):
                found.update(
                    terminal(part) for side in (node.left, node.right) for part in walk(side) if isinstance(part, (ast.Name, ast.Attribute))
                )
            elif isinstance(node, ast.Call) and terminal(node.func) in {"div_", "max"}:
                found.update(terminal(part) for arg in node.args for part in walk(arg) if isinstance(part, (ast.Name, ast.Attribute)))
        return frozenset(found)

    @cached_property
    def uses_fsdp(self) -> bool:
        return bool(self.identifiers & (FSDP_NAMES | {"fully_shard", "deepspeed", "FullyShardedDDP"}))

    @cached_property
    def uses_ddp(self) -> bool:
        return bool(self.identifiers & (DDP_NAMES | {"DistributedDataParallelCPU", "require_backward_grad_sync"}))

    @cached_property
    def is_distributed(self) -> bool:
        """Whether it starts several ranks, or itself talks to others: that a followed library could proves nothing."""
        if self.uses_ddp or self.uses_fsdp or self.identifiers & LAUNCHES:
            return True
        return bool(self.identifiers & EXCHANGES) and any(
            _file_of(node) == 0 and name in EXCHANGES for node, name in self._named_nodes() if name
        )

    def _named_nodes(self) -> Iterator[tuple[ast.AST, str]]:
        for node in every(self.tree, ast.Name, ast.Attribute, ast.ImportFrom):
            if isinstance(node, ast.ImportFrom):
                yield from ((node, alias.name) for alias in node.names)
            else:
                yield node, terminal(node)

    @cached_property
    def written_names(self) -> frozenset[str]:
        """The methods of the file whose names stand as strings in it."""
        texts = {node.value for node in every(self.tree, ast.Constant) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return frozenset(texts & self.methods.keys())

    @cached_property
    def instances(self) -> dict[str, set[str]]:
        """The classes of the file of which a name is given an object, for names that are given any."""
        found: dict[str, set[str]] = defaultdict(set)
        for node in every(self.tree, ast.Assign):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and terminal(node.value.func) in self.classes:
                for target in node.targets:
                    found[terminal(target)].add(terminal(node.value.func))
        return found

    @cached_property
    def bases(self) -> frozenset[str]:
        """The names of the classes that some class derives from, also where an import renames them."""
        named = {terminal(base) for node in every(self.tree, ast.ClassDef) if isinstance(node, ast.ClassDef) for base in node.bases}
        return frozenset(named | {self.renamed[name] for name in named if name in self.renamed})

    def class_methods(self, node: ast.ClassDef) -> Iterator[FunctionNode]:
        for member in node.body:
            if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield member

    @cached_property
    def called(self) -> frozenset[str]:
        """The names of what is called, by their last parts."""
        return frozenset(terminal(node.func) for node in every(self.tree, ast.Call) if isinstance(node, ast.Call))

    @cached_property
    def nested(self) -> frozenset[int]:
        """The ids of the functions that are defined inside others."""
        found: set[int] = set()
        for functions in self.functions.values():
            for function in functions:
                if id(function) not in found:
                    inner = every(function, ast.FunctionDef, ast.AsyncFunctionDef)
                    found.update(id(part) for part in inner if part is not function)
        return frozenset(found)

    def may_be_called(self, function: FunctionNode, call: ast.Call) -> bool:
        """Whether a call by a bare name can mean a function of that name: one inside another is seen in its own file only, if at all."""
        return id(function) not in self.nested or (_file_of(function) == _file_of(call) and not hasattr(builtins, function.name))

    def is_foreign(self, name: str, call: ast.Call) -> bool:
        """Whether a name is only ever given what other projects' modules hold or return: `f = interpolate.interp2d(x, y)`."""
        values = self.given.get((_file_of(call), name), ())
        return bool(values) and all(self._comes_from_elsewhere(value) for value in values)

    def _comes_from_elsewhere(self, value: ast.expr) -> bool:
        made = value.func if isinstance(value, ast.Call) else value
        if not isinstance(made, ast.Attribute) or made.attr in self.classes:
            return False
        if any(id(function) not in self.nested for function in self.functions.get(made.attr, ())):
            return False
        while isinstance(made, ast.Attribute):
            made = made.value
        return isinstance(made, ast.Name) and made.id in self.imported

    def is_own_name(self, name: str) -> bool:
        """Whether the file defines a function, method or class of that name."""
        return name in self.functions or name in self.classes

    def mentions_loss(self, node: ast.AST) -> bool:
        """Whether a function forms a loss, so that following it can tell the weight."""
        return self.once("loss", node, names_loss)

    def is_open_constant(self, name: str, at: ast.AST) -> bool:
        """Whether a name is only ever given plain values: a setting, not a counter."""
        return name not in self.augmented and self.assigned.get((_file_of(at), name), 0) <= 1


def _file_of(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 0)
    return line // FILE_LINES


def in_one_file(one: ast.AST, other: ast.AST) -> bool:
    """Whether two nodes of a program stand in the same file."""
    return _file_of(one) == _file_of(other)


def names_loss(node: ast.AST) -> bool:
    """Whether something is called a loss, or reduced as one is."""
    return any(
        (isinstance(part, ast.Name) and LOSS_WORDS.search(part.id))
        or (isinstance(part, ast.Attribute) and (LOSS_WORDS.search(part.attr) or part.attr in {"mean", "sum"}))
        for part in walk(node)
    )


def _yields(node: ast.AST) -> bool:
    if not stands_in(node, (ast.Yield, ast.YieldFrom)):
        return False
    body = getattr(node, "body", None)
    pending: list[ast.AST] = list(body) if isinstance(body, list) else []
    while pending:
        part = pending.pop()
        if isinstance(part, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(part))
    return False
