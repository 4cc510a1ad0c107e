"""What can be seen of a module without rehearsing it: functions, classes, calls, and where the training words stand.

The rehearsal asks it which statements can hold events, directly or through the functions of the file that they call, so
that everything else may be passed over.
"""

from __future__ import annotations

import ast
import builtins
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from accumlint.source.reading.aliases import find_aliases, functions_in
from accumlint.source.reading.books import BOOKKEEPING, book_kinds
from accumlint.source.reading.facts import (
    BACKWARD_NAMES,
    CLIP_NAMES,
    CLIPPER_NAME,
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    Facts,
    FunctionNode,
    Loop,
    in_one_file,
    terminal,
)
from accumlint.source.reading.nodes import every, places_of, remember, stretch_of, walk
from accumlint.source.reading.steppers import schedulers, steppers
from accumlint.trace import Kind

CALLS_BACK = frozenset({"step", "register_post_accumulate_grad_hook"})  # methods that call what they are given
MODES = frozenset({"train", "eval"})  # that a module is put into
MOST_SCHEDULE_ARGUMENTS = 2  # an epoch and a metric; `scheduler.step(noise, t, latents)` is a sampler's


HOLDERS = (
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith),
    *(ast.Try, getattr(ast, "TryStar", ast.Try), ast.Match, ast.ExceptHandler, ast.match_case),
)  # of blocks
NO_KINDS: frozenset[Kind] = frozenset()
MARKED = (ast.Call, ast.Attribute, ast.AugAssign)  # what may bring something about


Mark = tuple[int, set[Kind], list[FunctionNode]]  # where a node stands among others, what it brings about itself, and what it calls


class Index(Facts):
    """Static facts about one module."""

    def __init__(self, tree: ast.Module) -> None:
        remember(tree)
        super().__init__(tree)
        self._callees: dict[int, list[FunctionNode]] = {}
        self._block_kinds: dict[tuple[int, int, int], frozenset[Kind]] = {}
        self._training_kinds: dict[int, frozenset[Kind]] = {}
        self._own_kinds: dict[int, set[Kind]] = {}
        self._marks: dict[int, tuple[list[int], list[Mark]]] = {}  # of the lists of nodes that statements at the top level hold
        self.recognisers: list[Callable[[Index, ast.Call], frozenset[Kind]]] = []  # of calls whose names alone do not tell

    def callees(self, node: ast.Call) -> list[FunctionNode]:
        """The functions of this file that a call can mean, by name."""
        known = self._callees.get(id(node))
        if known is None:
            known = self._callees[id(node)] = self._find_callees(node)
        return known

    def _find_callees(self, node: ast.Call) -> list[FunctionNode]:
        name = terminal(node.func)
        called_otherwise = name in self.renamed and name not in self.functions and name not in self.classes
        if called_otherwise:
            name = self.renamed[name]
        given = functions_in(self, node.args[0]) if name in self.launch_words and node.args else []
        if given:
            return given
        if isinstance(node.func, ast.Name):
            found: list[FunctionNode] = [
                each
                for each in self.functions.get(name, [])
                if each not in self.owner and self.may_be_called(each, node) and not (called_otherwise and in_one_file(each, node))
            ]
            if name in self.classes:
                found += [member for member in self.class_methods(self.classes[name]) if member.name == "__init__"]
            elif found or hasattr(builtins, name):
                pass
            elif name in self.aliases:
                found += self.aliases[name]
            elif name not in self.imported and not self.is_foreign(name, node):
                found += self._called_instances(name, guess=True)
            return found
        if isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Call) and terminal(node.func.value.func) == "super":
                return [method for method in self.methods.get(name, ()) if self.owner[method].name in self.bases]
            if name in MODES and not isinstance(node.func.value, ast.Call) and terminal(node.func.value) in self.called:
                return []  # `self.model.train()`, of a model that is called
            plain = [function for function in self.functions.get(name, ()) if function not in self.owner]
            if plain and name in self.made and terminal(node.func.value) == "self":  # `self.main = nn.Linear(…)` is not the module's `main`
                plain = [function for function in plain if function not in self.tree.body]
            closures = functions_in(self, node.args[0]) if name in CALLS_BACK and node.args else []
            own = closures + list(self.methods.get(name, ())) + [function for function in plain if _suffices(node, function)]
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
    def steppers(self) -> frozenset[str]:
        """The names of optimizers that only their making tells."""
        return steppers(self.tree)

    @cached_property
    def schedulers(self) -> frozenset[str]:
        """The same of schedulers."""
        return schedulers(self.tree)

    @cached_property
    def aliases(self) -> dict[str, list[FunctionNode]]:
        """Other names of the file's functions: `step = partial(f, …)`, a parameter that is given one, a table of them."""
        return find_aliases(self)

    def kinds(self, node: ast.AST | Iterable[ast.stmt]) -> frozenset[Kind]:
        """The kinds of event of the training itself that a statement, or the functions it calls, can bring about."""
        if node.__class__ is not list and isinstance(node, ast.AST):
            known = self._training_kinds.get(id(node))
            if known is None:
                known = self._training_kinds[id(node)] = self._all_kinds(node) - BOOKKEEPING
            return known
        statements: Sequence[ast.stmt] = node if isinstance(node, (list, tuple)) else list(node)
        if not statements:
            return NO_KINDS
        stretch = (id(statements[0]), id(statements[-1]), len(statements))  # of one block
        block = self._block_kinds.get(stretch)
        if block is None:
            block = self._block_kinds[stretch] = NO_KINDS.union(*map(self.kinds, statements))
        return block

    def keeps_books(self, node: ast.AST | Iterable[ast.stmt]) -> bool:
        """Whether a statement, or a function it calls, saves or averages: what no choice of a way through the code rests on."""
        if isinstance(node, ast.AST):
            return not BOOKKEEPING.isdisjoint(self._kinds.get(id(node)) or self._all_kinds(node))
        return any(map(self.keeps_books, node))

    def _all_kinds(self, node: ast.AST | Iterable[ast.stmt]) -> frozenset[Kind]:
        if not isinstance(node, ast.AST):
            found: frozenset[Kind] = frozenset()
            for one in node:
                found |= self._all_kinds(one)
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
        for _, kinds, functions in self._marks_in(node):
            found |= kinds
            callees.update(dict.fromkeys(functions))
        return frozenset(found), tuple(callees)

    def _marks_in(self, node: ast.AST) -> Iterable[Mark]:
        """What stands in a node; a remembered tree is gone through once, for a node and all that it stands in."""
        inside = stretch_of(node)
        if inside is None:
            return self._marks_of(enumerate(walk(node)))
        nodes, first, last = inside
        known = self._marks.get(id(nodes))
        if known is None:
            marks = list(self._marks_of((at, nodes[at]) for at in places_of(nodes, 0, len(nodes), *MARKED)))
            known = self._marks[id(nodes)] = ([at for at, _, _ in marks], marks)
        places, marks = known
        return marks[bisect_left(places, first) : bisect_left(places, last)]

    def _marks_of(self, nodes: Iterable[tuple[int, ast.AST]]) -> Iterator[Mark]:
        for at, part in nodes:
            if isinstance(part, ast.Call):
                kinds, callees = self._call_kinds(part), self.callees(part)
                if kinds or callees:
                    yield at, kinds, callees
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                if part.attr in {"require_backward_grad_sync", "require_forward_param_sync"}:
                    yield at, {Kind.SYNC_OFF}, []
                elif part.attr == "grad" or (part.attr == "data" and terminal(part.value) == "grad"):
                    yield at, {Kind.ZERO}, []
            elif isinstance(part, ast.AugAssign) and _touches_grad(part.target):
                yield at, {Kind.NORMALIZE}, []

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
        known = self._own_kinds.get(id(call))
        if known is None:
            known = self._own_kinds[id(call)] = self._find_call_kinds(call)
        return known

    def _find_call_kinds(self, call: ast.Call) -> set[Kind]:
        name = terminal(call.func)
        receiver = terminal(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        for recognise in self.recognisers:
            own = recognise(self, call)
            if own:
                return set(own)
        if name in self.words and (name not in self.functions or (receiver and name not in self.methods)):
            return set(self.words[name])
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
        return book_kinds(name, receiver, call)

    def _is_clipper(self, name: str) -> bool:
        """Whether an object clips gradients, by its name or by that of its class."""
        return any(CLIPPER_NAME.search(one) for one in (name, *self.instances.get(name, ())))

    def _step_kinds(self, receiver: str, call: ast.Call) -> set[Kind]:
        """`x.step()` is an update if x looks like an optimizer or a scaler, by name or by use."""
        if SCHEDULER_NAME.search(receiver) and not OPTIMIZER_NAME.search(receiver):
            return set() if len(call.args) > MOST_SCHEDULE_ARGUMENTS else {Kind.SCHEDULE}
        used = self.usage.get(receiver, set())
        looks = (
            OPTIMIZER_NAME.search(receiver)
            or SCALER_NAME.search(receiver)
            or used & {"zero_grad", "param_groups", "unscale_", "update", "scale", "backward"}
            or receiver in self.steppers
        )
        given = any(OPTIMIZER_NAME.search(terminal(arg)) for arg in call.args)
        if not looks and not given and receiver in self.schedulers:
            return set() if len(call.args) > MOST_SCHEDULE_ARGUMENTS else {Kind.SCHEDULE}
        return {Kind.STEP} if looks or given else set()

    def reaches_backward_in_loop(self, node: ast.AST) -> bool:
        """Whether running this node runs a loop with a backward in it."""
        known = self._loops.get(id(node))
        if known is not None:
            return known
        self._loops[id(node)] = False
        found = False
        for part in every(node, ast.For, ast.AsyncFor, ast.While, ast.Call):
            if isinstance(part, (ast.For, ast.AsyncFor, ast.While)):
                found = Kind.BACKWARD in self.kinds(part) and not self.only_dispatches(part)
            elif isinstance(part, ast.Call) and terminal(part.func) in self.loop_words:
                found = True
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
        calls = [part for statement in loop.body for part in every(statement, ast.Call) if isinstance(part, ast.Call)]
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
            for node in every(self.tree, ast.Call)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
        )
        return frozenset(terminal(call.func.value) for call in calls if isinstance(call.func, ast.Attribute))

    def _tests_modulus(self, test: ast.expr, loop: Loop) -> bool:
        """Whether a condition is about a remainder, itself or through a flag that the loop's body sets."""
        if self.has_modulo(test):
            return True
        names = {part.id for part in walk(test) if isinstance(part, ast.Name)}
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

    def ends_a_turn(self, node: ast.stmt) -> bool:
        """Whether a `return` here ends no more than the turn of a loop around the call: no caller asks what came back."""
        return self.once("ends a turn", node, lambda _: self._finds_no_answer(node))

    def _finds_no_answer(self, node: ast.AST) -> bool:
        while id(node) in self._homes and not isinstance(node, (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)):
            node = self._homes[id(node)][2]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        calls = [call for call in every(self.tree, ast.Call) if isinstance(call, ast.Call) and terminal(call.func) == node.name]
        ignored = sum(self._is_ignored(one) for one in every(self.tree, ast.Expr, ast.Assign, ast.AugAssign) if one.value in calls)  # type: ignore[attr-defined]
        return bool(calls) and ignored == len(calls)

    def _is_ignored(self, node: ast.AST) -> bool:
        """Whether what a call gives is thrown away, or kept under a name that no condition asks for."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        names = {terminal(part) for target in targets for part in walk(target) if isinstance(part, (ast.Name, ast.Attribute))}
        tests = (one.test for one in every(self.tree, ast.If, ast.While, ast.IfExp))  # type: ignore[attr-defined]
        return not any(terminal(part) in names for test in tests for part in walk(test) if isinstance(part, (ast.Name, ast.Attribute)))

    @cached_property
    def _homes(self) -> dict[int, tuple[list[ast.stmt], int, ast.AST]]:
        """For each statement the block that it stands in, its place there, and the node that the block belongs to."""
        homes: dict[int, tuple[list[ast.stmt], int, ast.AST]] = {}
        for parent in every(self.tree, *HOLDERS):
            for name in ("body", "orelse", "finalbody"):
                block: list[ast.stmt] = getattr(parent, name, None) or []
                for at, statement in enumerate(block if isinstance(block, list) else ()):
                    homes[id(statement)] = (block, at, parent)
            for part in (*getattr(parent, "handlers", ()), *getattr(parent, "cases", ())):
                homes[id(part)] = ([], 0, parent)
        return homes


def _receiver(call: ast.Call) -> str:
    """The name that a method is called on, also through `getattr`."""
    if isinstance(call.func, ast.Call) and terminal(call.func.func) == "getattr" and call.func.args:
        return terminal(call.func.args[0])
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        return call.func.value.id
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _touches_grad(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in every(node, ast.Attribute))


def _suffices(call: ast.Call, function: FunctionNode) -> bool:
    """Whether a call gives a function all that it needs: `model.train()` does not mean this module's `train(args, model)`."""
    if any(isinstance(arg, ast.Starred) for arg in call.args) or any(word.arg is None for word in call.keywords):
        return True
    parameters = function.args.posonlyargs + function.args.args
    needed = {one.arg for one in parameters[: len(parameters) - len(function.args.defaults)]}
    named = needed & {word.arg for word in call.keywords}
    return len(needed) - len(named) <= len(call.args)
