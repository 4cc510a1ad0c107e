"""In which unit a number counts: how often K is in an expression, through the names that it is made of."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import copy

from accumlint.source.reading.facts import names_k, terminal
from accumlint.source.reading.nodes import every, walk

DEEPEST = 8
SHARES = re.compile(r"batch|(^|_)b(s|sz)$|world|gpu|rank|replica|proc|worker|device|node|chips", re.IGNORECASE)
PASSING = frozenset({"int", "float", "round", "ceil", "floor", "max", "min", "abs", "str", "replace"})
Test = Callable[[ast.expr], bool]


class Units:
    """The degree of K in the numbers of one module: 0 for `len(loader)`, -1 for `len(loader) // K`."""

    def __init__(self, tree: ast.AST, is_k: Callable[[str], bool] = names_k) -> None:
        self.is_k = is_k
        self.definitions: dict[str, list[ast.expr]] = defaultdict(list)
        self.returned: dict[str, list[ast.expr]] = defaultdict(list)  # what functions give, by their names
        functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        for node in every(tree, ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.AugAssign):
            if isinstance(node, ast.FunctionDef):
                self.returned[node.name] += _returns(node)
                functions[node.name].append(node)
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._define(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._define(node.target, node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
                self._define(node.target, ast.copy_location(ast.BinOp(_read(node.target), node.op, node.value), node))

        calls = [node for node in every(tree, ast.Call) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        called = Counter(terminal(node.func) for node in calls)
        for node in calls:
            name = terminal(node.func)
            if called[name] == len(functions[name]) == 1:
                self._define_parameters(functions[name][0], node)

    def asking(self, is_k: Callable[[str], bool]) -> Units:
        """The same numbers, with other names of K."""
        made = copy(self)
        made.is_k = is_k
        return made

    def _define(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                for one, its in zip(target.elts, value.elts, strict=True):
                    self._define(one, its)
            return
        self.definitions[terminal(target)].append(value)

    def _define_parameters(self, function: ast.FunctionDef, call: ast.Call) -> None:
        """The parameters of a function that is called in one place are what they are given there."""
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        given = [*zip(names, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
        for name, value in given:
            if name is not None and not isinstance(value, (ast.Starred, ast.Constant)) and terminal(value) != name:
                self.definitions[name].append(value)

    def degree(self, node: ast.expr, base: Test, seen: frozenset[str] = frozenset()) -> int | None:
        """The degree of K in the term that a base is in; None where there is no base, or nobody can tell."""
        if base(node):
            return 0
        if len(seen) > DEEPEST:
            return None
        match node:
            case ast.BinOp():
                return self._of_operation(node, base, seen)
            case ast.UnaryOp():
                return self.degree(node.operand, base, seen)
            case ast.IfExp():
                return self._agreed((node.body, node.orelse), base, seen)
            case ast.BoolOp():
                return self._agreed(node.values, base, seen)
            case ast.Call() if terminal(node.func) in PASSING:
                receiver = (node.func.value,) if isinstance(node.func, ast.Attribute) and terminal(node.func) == "replace" else ()
                return self._agreed((*receiver, *node.args), base, seen)
            case ast.Call(func=ast.Name(id=name)) if len(self.returned.get(name, ())) == 1 and name not in seen:
                return self.degree(self.returned[name][0], base, seen | {name})
            case ast.Name() | ast.Attribute() | ast.Subscript():
                name = terminal(node)
                made = self.definitions.get(name, ())
                if name in seen or any(self._rescales(name, each) for each in made):
                    return None
                return self._agreed(made, base, seen | {name})
        return None

    def origin(self, node: ast.expr) -> ast.expr:
        """Where a number is made: in the function that is called for it, where its name is set, else where it stands."""
        called = node
        seen: set[str] = set()
        while isinstance(called, ast.Name) and called.id not in seen and len(self.definitions.get(called.id, ())) == 1:
            seen.add(called.id)
            called = self.definitions[called.id][0]
        if isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and len(self.returned.get(called.func.id, ())) == 1:
            return self.returned[called.func.id][0]
        return called if isinstance(called, (ast.BinOp, ast.Call)) else node

    def _rescales(self, name: str, value: ast.expr) -> bool:
        """Whether a number is made of itself and K: `total = total // K`, before which it is another one."""
        own = any(isinstance(part, (ast.Name, ast.Attribute)) and terminal(part) == name for part in walk(value))
        return own and any(isinstance(part, (ast.Name, ast.Attribute)) and self.is_k(terminal(part)) for part in walk(value))

    def _agreed(self, nodes: Iterator[ast.expr] | tuple[ast.expr, ...] | list[ast.expr], base: Test, seen: frozenset[str]) -> int | None:
        found = {self.degree(each, base, seen) for each in nodes} - {None}
        return found.pop() if len(found) == 1 else None

    def _of_operation(self, node: ast.BinOp, base: Test, seen: frozenset[str]) -> int | None:
        left, right = self.degree(node.left, base, seen), self.degree(node.right, base, seen)
        match node.op:
            case ast.Mult() if (left is None) is not (right is None):
                return left + self.power(node.right) if left is not None else (right or 0) + self.power(node.left)
            case ast.Div() | ast.FloorDiv() if left is not None and right is None:
                power = self.power(node.right)
                return left - power if power or isinstance(node.right, ast.Constant) or _shares_data(node.right) else None
            case ast.Mod() if left is not None:
                return left
            case ast.Add() | ast.Sub() if left is None or right is None or left == right:
                return right if left is None else left
        return None

    def power(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> int:
        """How often K is a factor of a number."""
        match node:
            case ast.UnaryOp():
                return self.power(node.operand, seen)
            case ast.BinOp(op=ast.Mult()):
                return self.power(node.left, seen) + self.power(node.right, seen)
            case ast.BinOp(op=ast.Div() | ast.FloorDiv()):
                return self.power(node.left, seen) - self.power(node.right, seen)
            case ast.Call() if terminal(node.func) in PASSING and node.args:
                return max((self.power(each, seen) for each in node.args), key=abs)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                name = terminal(node)
                if self.is_k(name):
                    return 1
                if name not in seen and len(seen) < DEEPEST and len(self.definitions.get(name, ())) == 1:
                    return self.power(self.definitions[name][0], seen | {name})
        return 0

    def mentions(self, node: ast.expr, wanted: Callable[[str], object], seen: frozenset[str] = frozenset()) -> bool:
        """Whether a name of some kind stands in an expression or in what its names are made of."""
        for part in walk(node):
            if not isinstance(part, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
                continue
            name = terminal(part)
            if wanted(name):
                return True
            deeper = self.definitions.get(name, ()) if name not in seen and len(seen) < DEEPEST else ()
            if any(self.mentions(each, wanted, seen | {name}) for each in deeper):
                return True
        return False


def _shares_data(node: ast.expr) -> bool:
    """Whether a divisor is a batch size or a number of ranks; any other setting may be K by another name."""
    return any(isinstance(part, (ast.Name, ast.Attribute, ast.Call)) and SHARES.search(terminal(part)) is not None for part in walk(node))


def _returns(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function gives; the functions inside it have their own."""
    pending: list[ast.AST] = list(function.body)
    found: list[ast.expr] = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node.value)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.expr)):
            pending.extend(ast.iter_child_nodes(node))
    return found


def _read(target: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Name(terminal(target), ast.Load()), target)
