"""What can be seen of a module without rehearsing it: functions, classes, calls, and where the training words stand.

The rehearsal asks it which statements can hold events, directly or through the functions of the file that they call, so
that everything else may be passed over.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar

from accumlint.source.reading.nodes import walk
from accumlint.source.reading.targets import find_ignored_targets
from accumlint.trace import Kind

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
T = TypeVar("T")
Loop = ast.For | ast.AsyncFor | ast.While

SCHEDULER_NAME = re.compile(r"sched|(^|_)lr(_|$)|warmup|lr_?policy|anneal", re.IGNORECASE)
OPTIMIZER_NAME = re.compile(r"optim|(^|_)opts?(_|\d|$)|^sgd$|^adam", re.IGNORECASE)
SCALER_NAME = re.compile(r"scaler", re.IGNORECASE)
ACCUMULATION_NAME = re.compile(
    r"accum|grad_acc|update_freq|iter_size|subdivision|batch_chunk|batch_split|micro_?batches|n_?micro|num_micro|micro_?steps?_per"
    r"|micro_per|virtual_batch|update_interval|update_every|step_every|iters_to_acc|(^|_)gas$|cumulative_iters|(^|_)acc_?steps?$",
    re.IGNORECASE,
)

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
    no_sync GradScaler DistributedDataParallel DDP DistributedDataParallelCPU FullyShardedDataParallel FSDP fully_shard
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


class Index:
    """Static facts about one module."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions: dict[str, list[FunctionNode]] = defaultdict(list)
        self.methods: dict[str, list[FunctionNode]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.owner: dict[FunctionNode, ast.ClassDef] = {}
        self.usage: dict[str, set[str]] = defaultdict(set)
        self.augmented: set[str] = set()
        self.assigned: dict[str, int] = defaultdict(int)
        self.identifiers: set[str] = set()
        self.imported: set[str] = set()
        self._kinds: dict[int, frozenset[Kind]] = {}
        self._loops: dict[int, bool] = {}
        self.texts: dict[int, str] = {}
        self._memo: dict[tuple[str, int], Any] = {}
        self._collect(tree)

    def once(self, question: str, node: ast.AST, answer: Callable[[ast.AST], T]) -> T:
        """Asks a question about a node at most once; many rehearsals of the same code ask the same."""
        key = (question, id(node))
        if key not in self._memo:
            self._memo[key] = answer(node)
        found: T = self._memo[key]
        return found

    def holds(self, node: ast.AST, *types: type[ast.AST]) -> bool:
        """Whether a node of one of these types stands inside."""
        return self.once("/".join(each.__name__ for each in types), node, lambda one: any(isinstance(part, types) for part in walk(one)))

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
        for node in walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions[node.name].append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                for member in node.body:
                    if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        self.methods[member.name].append(member)
                        self.owner[member] = node
            elif isinstance(node, ast.Attribute):
                self.identifiers.add(node.attr)
                name = terminal(node.value)
                if name:
                    self.usage[name].add(node.attr)
            elif isinstance(node, ast.Name):
                self.identifiers.add(node.id)
            elif isinstance(node, ast.AugAssign):
                self.augmented.add(terminal(node.target))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.alias):
                self.identifiers.update((node.name.rsplit(".", 1)[-1], node.asname or ""))
                self.imported.add(node.asname or node.name.split(".")[0])
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
        self.assigned[name] += 1
        if any(isinstance(part, ast.BinOp) for part in walk(value)) and any(terminal(part) == name for part in walk(value)):
            self.augmented.add(name)

    @cached_property
    def ignored_targets(self) -> tuple[ast.AST, ...]:
        """Where the module writes the index that the loss ignores into its targets."""
        return tuple(find_ignored_targets(self.tree))

    @property
    def ignores_targets(self) -> bool:
        return bool(self.ignored_targets)

    @cached_property
    def keeps_a_target(self) -> bool:
        """Whether some position of a mask or of labels is set by hand, so that at least one target stays."""
        for node in walk(self.tree):
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
        for node in walk(self.tree):
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
        return bool(self.identifiers & {"FullyShardedDataParallel", "FSDP", "fully_shard", "deepspeed", "FullyShardedDDP"})

    @cached_property
    def uses_ddp(self) -> bool:
        return bool(self.identifiers & {"DistributedDataParallel", "DDP", "DistributedDataParallelCPU", "require_backward_grad_sync"})

    @cached_property
    def is_distributed(self) -> bool:
        words = {
            "init_process_group",
            "all_reduce",
            "get_world_size",
            "all_gather",
            "DistributedSampler",
            "get_rank",
            "hvd",
            "init_distributed_mode",
        }
        return self.uses_ddp or self.uses_fsdp or bool(self.identifiers & words)

    def callees(self, node: ast.Call) -> list[FunctionNode]:
        """The functions of this file that a call can mean, by name."""
        name = terminal(node.func)
        if isinstance(node.func, ast.Name):
            found: list[FunctionNode] = [function for function in self.functions.get(name, []) if function not in self.owner]
            if name in self.classes:
                found += [member for member in self.class_methods(self.classes[name]) if member.name == "__init__"]
            elif not found and name in self.aliases:
                found += self.aliases[name]
            elif not found and name not in self.imported and not hasattr(builtins, name):
                found += self._called_instances(name, guess=True)
            return found
        if isinstance(node.func, ast.Attribute):
            own = list(self.methods.get(name, ())) + [function for function in self.functions.get(name, ()) if function not in self.owner]
            return own or self.aliases.get(name) or self._called_instances(name, guess=False)
        if isinstance(node.func, ast.Call) and terminal(node.func.func) == "getattr" and len(node.func.args) > 1:
            return self._methods_named(node.func.args[1])
        if isinstance(node.func, ast.Subscript):
            return self.aliases.get(terminal(node.func.value)) or list(self.methods.get("forward", ()))
        return []

    def _called_instances(self, name: str, *, guess: bool) -> list[FunctionNode]:
        """The `__call__` methods that calling an object of this name can mean; those of all classes where nothing tells."""
        known = self.instances.get(name)
        if known is None:
            return list(self.methods.get("__call__", ())) if guess else []
        return [member for cls in known for member in self.class_methods(self.classes[cls]) if member.name == "__call__"]

    def _methods_named(self, name: ast.expr) -> list[FunctionNode]:
        """The methods that `getattr(hook, name)` may give: where the name is not in place, those whose names are written out somewhere."""
        names = {name.value} if isinstance(name, ast.Constant) else self.written_names
        return [method for each in names if isinstance(each, str) for method in self.methods.get(each, ())]

    @cached_property
    def written_names(self) -> frozenset[str]:
        """The methods of the file whose names stand as strings in it."""
        texts = {node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return frozenset(texts & self.methods.keys())

    @cached_property
    def aliases(self) -> dict[str, list[FunctionNode]]:
        """Other names of the file's functions: `step = partial(f, …)`, a parameter that is given one, a table of them."""
        from accumlint.source.reading.aliases import find_aliases  # which is about an Index

        return find_aliases(self)

    @cached_property
    def instances(self) -> dict[str, set[str]]:
        """The classes of the file of which a name is given an object, for names that are given any."""
        found: dict[str, set[str]] = defaultdict(set)
        for node in walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and terminal(node.value.func) in self.classes:
                for target in node.targets:
                    found[terminal(target)].add(terminal(node.value.func))
        return found

    def class_methods(self, node: ast.ClassDef) -> Iterator[FunctionNode]:
        for member in node.body:
            if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield member

    def is_own_name(self, name: str) -> bool:
        """Whether the file defines a function, method or class of that name."""
        return name in self.functions or name in self.classes

    def kinds(self, node: ast.AST | Iterable[ast.stmt]) -> frozenset[Kind]:
        """The kinds of event that a statement, or the functions it calls, can bring about."""
        if not isinstance(node, ast.AST):
            found: frozenset[Kind] = frozenset()
            for one in node:
                found |= self.kinds(one)
            return found
        known = self._kinds.get(id(node))
        if known is None:
            direct, callees = self._direct(node)
            known = direct.union(*(self._closure[id(callee)] for callee in callees))
            self._kinds[id(node)] = known
        return known

    def calls_of(self, node: ast.AST) -> tuple[FunctionNode, ...]:
        """The functions of the file that a node calls."""
        return self._direct(node)[1]

    def is_backward(self, call: ast.Call) -> bool:
        return Kind.BACKWARD in self._call_kinds(call)

    def _direct(self, node: ast.AST) -> tuple[frozenset[Kind], tuple[FunctionNode, ...]]:
        """The kinds that stand in a node itself, and the functions of the file that it calls."""
        return self.once("direct", node, self._find_direct)

    def _find_direct(self, node: ast.AST) -> tuple[frozenset[Kind], tuple[FunctionNode, ...]]:
        found: set[Kind] = set()
        callees: dict[FunctionNode, None] = {}
        for part in walk(node):
            if isinstance(part, ast.Call):
                found |= self._call_kinds(part)
                callees.update(dict.fromkeys(self.callees(part)))
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                if part.attr in {"require_backward_grad_sync", "require_forward_param_sync"}:
                    found.add(Kind.SYNC_OFF)
                elif part.attr == "grad" or (part.attr == "data" and terminal(part.value) == "grad"):
                    found.add(Kind.ZERO)
            elif isinstance(part, ast.AugAssign) and _touches_grad(part.target):
                found.add(Kind.NORMALIZE)
        return frozenset(found), tuple(callees)

    @cached_property
    def _closure(self) -> dict[int, frozenset[Kind]]:
        """For each function the kinds that running it can bring about, through whatever it calls."""
        every = {
            id(function): function
            for functions in (*self.functions.values(), *self.methods.values(), *self.aliases.values())
            for function in functions
        }
        kinds = {number: self._direct(function)[0] for number, function in every.items()}
        callers: dict[int, list[int]] = defaultdict(list)
        for number, function in every.items():
            for callee in self._direct(function)[1]:
                callers[id(callee)].append(number)
        pending = [number for number, found in kinds.items() if found]
        while pending:
            number = pending.pop()
            for caller in callers[number]:
                more = kinds[caller] | kinds[number]
                if more != kinds[caller]:
                    kinds[caller] = more
                    pending.append(caller)
        return kinds

    def _call_kinds(self, call: ast.Call) -> set[Kind]:
        name = terminal(call.func)
        receiver = terminal(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if name in BACKWARD_NAMES:
            return {Kind.BACKWARD}
        if name == "step" and isinstance(call.func, ast.Attribute) and not self._is_clipper(receiver):
            return self._step_kinds(receiver, call)
        if name in {"step", "clip"} and self._is_clipper(receiver):
            return {Kind.CLIP}
        if name == "zero_grad":
            return {Kind.ZERO}
        if name in {"unscale_", "unscale_gradients"}:
            return {Kind.UNSCALE}
        if name in CLIP_NAMES:
            return {Kind.CLIP}
        if name == "update" and SCALER_NAME.search(receiver):
            return {Kind.SCALER_UPDATE}
        if name in {"no_sync", "set_requires_gradient_sync", "no_backward_sync"}:
            return {Kind.SYNC_OFF}
        if name in {"mul_", "div_"} and isinstance(call.func, ast.Attribute) and _touches_grad(call.func.value):
            return {Kind.NORMALIZE}
        if name == "loss_scaler" and len(call.args) + len(call.keywords) >= 2:
            return {Kind.BACKWARD, Kind.STEP}
        return set()

    def _is_clipper(self, name: str) -> bool:
        """Whether an object clips gradients, by its name or by that of its class."""
        return any(CLIPPER_NAME.search(one) for one in (name, *self.instances.get(name, ())))

    def _step_kinds(self, receiver: str, call: ast.Call) -> set[Kind]:
        """`x.step()` is an update if x looks like an optimizer or a scaler, by name or by use."""
        if SCHEDULER_NAME.search(receiver) and not OPTIMIZER_NAME.search(receiver):
            return {Kind.SCHEDULE}
        used = self.usage.get(receiver, set())
        looks = (
            OPTIMIZER_NAME.search(receiver)
            or SCALER_NAME.search(receiver)
            or used & {"zero_grad", "param_groups", "unscale_", "update", "scale", "backward"}
        )
        given = any(OPTIMIZER_NAME.search(terminal(arg)) for arg in call.args)
        return {Kind.STEP} if looks or given else set()

    def reaches_backward_in_loop(self, node: ast.AST) -> bool:
        """Whether running this node runs a loop with a backward in it."""
        known = self._loops.get(id(node))
        if known is not None:
            return known
        self._loops[id(node)] = False
        found = False
        for part in walk(node):
            if isinstance(part, (ast.For, ast.AsyncFor, ast.While)):
                found = Kind.BACKWARD in self.kinds(part) and not self.only_dispatches(part)
            elif isinstance(part, ast.Call):
                found = any(self.reaches_backward_in_loop(callee) for callee in self.callees(part))
            if found:
                break
        self._loops[id(node)] = found
        return found

    def only_dispatches(self, loop: Loop) -> bool:
        """Whether a loop goes over objects (hooks, callbacks, phases) and only a method of each reaches the backward."""
        return self.once("dispatches", loop, lambda _: self._dispatches(loop))

    def _dispatches(self, loop: Loop) -> bool:
        if isinstance(loop, ast.While) or not isinstance(loop.target, ast.Name):
            return False
        calls = [part for statement in loop.body for part in walk(statement) if isinstance(part, ast.Call)]
        reaching = [
            call
            for call in calls
            if Kind.BACKWARD in self._call_kinds(call) or any(Kind.BACKWARD in self.kinds(callee) for callee in self.callees(call))
        ]
        return bool(reaching) and all(self.callees(call) and _receiver(call) == loop.target.id for call in reaching)

    def has_inner_backward_loop(self, loop: Loop) -> bool:
        """Whether a turn of the loop runs another loop with a backward in it."""
        return any(self.reaches_backward_in_loop(statement) for statement in loop.body)

    def gates_outside_inner_loops(self, loop: Loop) -> bool:
        """Whether a condition in the loop's body, outside its inner loops, guards a step: then this loop makes the window."""
        return self.once("gates", loop, lambda _: self._gates_outside(loop))

    def _gates_outside(self, loop: Loop) -> bool:
        pending: list[ast.stmt] = list(loop.body)
        while pending:
            statement = pending.pop()
            if isinstance(statement, ast.If):
                if Kind.STEP in self.kinds(statement) and Kind.BACKWARD not in self.kinds(statement):
                    return True
                if self.holds(statement, ast.Continue) and self._tests_modulus(statement.test, loop):
                    return True
                if self.counts_collected(statement.test) and (
                    Kind.BACKWARD in self.kinds(statement) or self.holds(statement, ast.Continue)
                ):
                    return True
                pending += statement.body + statement.orelse
            elif isinstance(statement, (ast.With, ast.AsyncWith, ast.Try)):
                pending += statement.body
        return False

    def counts_collected(self, test: ast.expr) -> bool:
        """Whether a condition is about the length of a list that the file appends to: `len(buffer) == k`."""
        lengths = (part for part in walk(test) if isinstance(part, ast.Call) and terminal(part.func) == "len" and part.args)
        return any(terminal(part.args[0]) in self.collected for part in lengths)

    @cached_property
    def collected(self) -> frozenset[str]:
        """The names of lists that are appended to."""
        calls = (
            node
            for node in walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
        )
        return frozenset(terminal(call.func.value) for call in calls if isinstance(call.func, ast.Attribute))

    def _tests_modulus(self, test: ast.expr, loop: Loop) -> bool:
        """Whether a condition is about a remainder, itself or through a flag that the loop's body sets."""
        if self.has_modulo(test):
            return True
        names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
        flags = (each for each in loop.body if isinstance(each, ast.Assign) and self.has_modulo(each.value))
        return any(terminal(target) in names for flag in flags for target in flag.targets)

    def following(self, node: ast.stmt) -> list[ast.stmt]:
        """What comes after a statement in the same turn of the innermost loop, or in the same call."""
        return self.once("following", node, lambda _: self._find_following(node))

    def _find_following(self, node: ast.AST) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        while id(node) in self._homes:
            block, at, node = self._homes[id(node)]
            found += block[at + 1 :]
            if isinstance(node, (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                break
        return found

    @cached_property
    def _homes(self) -> dict[int, tuple[list[ast.stmt], int, ast.AST]]:
        """For each statement the block that it stands in, its place there, and the node that the block belongs to."""
        homes: dict[int, tuple[list[ast.stmt], int, ast.AST]] = {}
        for parent in walk(self.tree):
            for name in ("body", "orelse", "finalbody"):
                block: list[ast.stmt] = getattr(parent, name, None) or []
                for at, statement in enumerate(block if isinstance(block, list) else ()):
                    homes[id(statement)] = (block, at, parent)
            for part in (*getattr(parent, "handlers", ()), *getattr(parent, "cases", ())):
                homes[id(part)] = ([], 0, parent)
        return homes

    def mentions_loss(self, node: ast.AST) -> bool:
        """Whether a function forms a loss, so that following it can tell the weight."""
        return self.once("loss", node, _names_loss)

    def is_open_constant(self, name: str) -> bool:
        """Whether a name is only ever given plain values: a setting, not a counter."""
        return name not in self.augmented and self.assigned.get(name, 0) <= 1


def _receiver(call: ast.Call) -> str:
    """The name that a method is called on, also through `getattr`."""
    if isinstance(call.func, ast.Call) and terminal(call.func.func) == "getattr" and call.func.args:
        return terminal(call.func.args[0])
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        return call.func.value.id
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _names_loss(node: ast.AST) -> bool:
    return any(
        (isinstance(part, ast.Name) and LOSS_WORDS.search(part.id))
        or (isinstance(part, ast.Attribute) and (LOSS_WORDS.search(part.attr) or part.attr in {"mean", "sum"}))
        for part in walk(node)
    )


def _yields(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    pending: list[ast.AST] = list(body) if isinstance(body, list) else []
    while pending:
        part = pending.pop()
        if isinstance(part, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(part))
    return False


def _touches_grad(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in walk(node))
