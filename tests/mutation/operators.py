"""Makes mistakes in correct training scripts: each operator yields the texts of its mutants."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from tests.mutation.script import Edit, Loop, Script, kind_of, last_name

KINDS = ("step", "zero", "clip", "unscale", "update", "schedule")
_BEFORE_GATE = {"clip", "unscale"}


class Mutant(NamedTuple):
    """A script with one mistake in it; `line` is where the original was changed."""

    operator: str
    line: int
    text: str


Operator = Callable[[Script], Iterator[tuple[int, str]]]


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a script, each text once."""
    script = Script(text)
    seen = {text}
    for name, operator in OPERATORS.items():
        for line, mutant in operator(script):
            if mutant in seen or not _compiles(mutant):
                continue
            seen.add(mutant)
            yield Mutant(name, line, mutant)


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _hoist(kind: str) -> Operator:
    """Out of the gate: what belongs to the update happens for each micro-batch."""

    def operator(script: Script) -> Iterator[tuple[int, str]]:
        for statement in script.statements(kind):
            gate = script.parents[statement]
            if not isinstance(gate, ast.If) or statement not in gate.body or gate.orelse or not _inside_micro_loop(script, gate):
                continue
            before, after = (gate, None) if kind in _BEFORE_GATE else (None, gate)
            copy = script.insertion(statement, before=before, after=after)
            yield statement.lineno, script.edited([script.removal(statement), copy])

    return operator


def _sink(kind: str) -> Operator:
    """Into the micro-loop: what follows the window's loop happens at each of its turns."""

    def operator(script: Script) -> Iterator[tuple[int, str]]:
        for statement in script.statements(kind):
            loop = _loop_before(script, statement)
            if loop is not None and script.alone(loop.body[-1]):
                yield statement.lineno, script.edited([script.removal(statement), script.insertion(statement, after=loop.body[-1])])

    return operator


def _inside_micro_loop(script: Script, node: ast.AST) -> bool:
    return any(each in script.micro_loops for each in script.ancestors(node))


def _loop_before(script: Script, statement: ast.stmt) -> Loop | None:
    """The micro-loop that ends before a statement of the same block."""
    block = script.block(statement)
    before = block[: block.index(statement)] if statement in block else []
    return next((each for each in reversed(before) if isinstance(each, (ast.For, ast.While)) and each in script.micro_loops), None)


def _drop(kind: str) -> Operator:
    def operator(script: Script) -> Iterator[tuple[int, str]]:
        for statement in script.statements(kind):
            yield statement.lineno, script.edited([script.removal(statement)])

    return operator


def drop_every_zero(script: Script) -> Iterator[tuple[int, str]]:
    statements = list(script.statements("zero"))
    if len(statements) > 1 and len({id(script.block(each)) for each in statements}) == len(statements):
        yield statements[0].lineno, script.edited([script.removal(each) for each in statements])


def zero_before_step(script: Script) -> Iterator[tuple[int, str]]:
    for zero in script.statements("zero"):
        block = script.block(zero)
        steps = [each for each in block[: block.index(zero)] if _is(each, "step")]
        if steps and script.alone(steps[-1]):
            yield zero.lineno, script.edited([script.removal(zero), script.insertion(zero, before=steps[-1])])


def zero_before_backward(script: Script) -> Iterator[tuple[int, str]]:
    """In front of the backward of every micro-batch."""
    for loop in script.micro_loops:
        inner = [script.statement_of(call) for call in script.backwards if loop in script.ancestors(call)]
        for zero in script.statements("zero"):
            if inner and script.alone(inner[0]) and zero not in script.block(inner[0]):
                yield zero.lineno, script.edited([script.removal(zero), script.insertion(zero, before=inner[0])])


def clip_before_unscale(script: Script) -> Iterator[tuple[int, str]]:
    for unscale in script.statements("unscale"):
        block = script.block(unscale)
        clips = [each for each in block[block.index(unscale) + 1 :] if _is(each, "clip")]
        if clips:
            yield unscale.lineno, script.edited([script.removal(unscale), script.insertion(unscale, after=clips[-1])])


def unscale_twice(script: Script) -> Iterator[tuple[int, str]]:
    for unscale in script.statements("unscale"):
        yield unscale.lineno, script.edited([script.insertion(unscale, after=unscale)])


def step_twice(script: Script) -> Iterator[tuple[int, str]]:
    """In the micro-loop as well as after it."""
    for step in script.statements("step"):
        loop = _loop_before(script, step)
        if loop is not None and script.alone(loop.body[-1]):
            yield step.lineno, script.edited([script.insertion(step, after=loop.body[-1])])


def _is(statement: ast.stmt, kind: str) -> bool:
    value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    return isinstance(value, ast.Call) and kind_of(value) == kind


def bypass_scaler_at_the_step(script: Script) -> Iterator[tuple[int, str]]:
    for call in script.calls:
        if kind_of(call) == "step" and len(call.args) == 1 and _owner(call).endswith("scaler"):
            yield call.lineno, script.replaced(call, f"{script.source(call.args[0])}.step()")


def bypass_scaler_at_the_backward(script: Script) -> Iterator[tuple[int, str]]:
    for call in script.calls:
        if last_name(call.func) == "scale" and len(call.args) == 1 and _owner(call).endswith("scaler"):
            yield call.lineno, script.replaced(call, f"({script.source(call.args[0])})")


def _owner(call: ast.Call) -> str:
    return last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def drop_division(script: Script) -> Iterator[tuple[int, str]]:
    """Of a mean; an undivided sum is a convention of its own, which the rules leave alone."""
    for node in _divisions(script):
        if _is_a_sum(script, node):
            continue
        if isinstance(node, ast.BinOp):
            yield node.lineno, script.replaced(node, _bracketed(script, node.left))
        elif script.alone(node):
            yield node.lineno, script.edited([script.removal(node)])


def double_division(script: Script) -> Iterator[tuple[int, str]]:
    for node in _divisions(script):
        if isinstance(node, ast.BinOp):
            yield node.lineno, script.replaced(node, f"{script.source(node)} / {_bracketed(script, node.right)}")
        elif script.alone(node):
            yield node.lineno, script.edited([script.insertion(node, after=node)])


def _is_a_sum(script: Script, division: ast.BinOp | ast.AugAssign) -> bool:
    divided = division.left if isinstance(division, ast.BinOp) else division.target
    names = {part.id for part in ast.walk(divided) if isinstance(part, ast.Name)}
    sources = [script.source(divided)]
    sources += [
        script.source(node.value)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and any(last_name(target) in names for target in node.targets)
    ]
    return any("sum" in source for source in sources)


def _bracketed(script: Script, node: ast.expr) -> str:
    text = script.source(node)
    return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript)) else f"({text})"


def _divisions(script: Script) -> Iterator[ast.BinOp | ast.AugAssign]:
    """Divisions of a loss on its way into a backward: in its argument or receiver, or in an assignment to the name that it takes."""
    names = {part.id for call in script.backwards for part in ast.walk(call) if isinstance(part, ast.Name) and "loss" in part.id.lower()}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and last_name(node.target) in names:
            yield node
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            statement = script.statement_of(node)
            assigned = isinstance(statement, ast.Assign) and any(last_name(target) in names for target in statement.targets)
            if assigned or any(each in script.backwards for each in script.ancestors(node)):
                yield node


def shift_boundary(script: Script) -> Iterator[tuple[int, str]]:
    """One micro-batch early or late, where the test is a remainder."""
    for test in _remainders(script):
        left = test.left.left
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add) and isinstance(left.right, ast.Constant) and left.right.value == 1:
            yield test.lineno, script.replaced(left, _bracketed(script, left.left))
        else:
            yield test.lineno, script.replaced(left, f"({script.source(left)} + 1)")


def invert_boundary(script: Script) -> Iterator[tuple[int, str]]:
    for test in _remainders(script):
        sign = {ast.Eq: "!=", ast.NotEq: "==", ast.Gt: "=="}.get(type(test.ops[0]))
        if sign:
            yield test.lineno, script.replaced(test, f"{script.source(test.left)} {sign} {script.source(test.comparators[0])}")


class Remainder(ast.Compare):
    """`counter % K == something`."""

    left: ast.BinOp


def _remainders(script: Script) -> Iterator[Remainder]:
    """Tests of a counter's remainder; not those of an assertion, nor arithmetic on data."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mod):
            calls = any(isinstance(part, ast.Call) for part in ast.walk(node))
            if not calls and not isinstance(script.statement_of(node), ast.Assert):
                yield cast("Remainder", node)


def narrow_no_sync(script: Script) -> Iterator[tuple[int, str]]:
    """The forward leaves the context, the backward stays."""
    for block in _contexts(script):
        inner = [each for each in block.body if any(call in script.backwards for call in ast.walk(each))]
        if not inner or block.body.index(inner[0]) == 0:
            continue
        moved = block.body[: block.body.index(inner[0])]
        if all(script.alone(each) for each in (block, *moved)):
            yield (
                block.lineno,
                script.edited([edit for each in moved for edit in (script.removal(each), script.insertion(each, before=block))]),
            )


def _contexts(script: Script) -> Iterator[ast.With]:
    """The `with` statements that may be no_sync: by their own words, or by the name of a variable that was assigned one."""
    held = {
        last_name(target)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and "no_sync" in script.source(node.value)
        for target in node.targets
    }
    for node in ast.walk(script.tree):
        if isinstance(node, ast.With):
            context = node.items[0].context_expr
            called = context.func if isinstance(context, ast.Call) else context
            if "no_sync" in script.source(context) or last_name(called) in held:
                yield node


def widen_no_sync(script: Script) -> Iterator[tuple[int, str]]:
    """The whole window without synchronisation."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.IfExp):
            for branch in (node.body, node.orelse):
                if "no_sync" in script.source(branch):
                    yield node.lineno, script.replaced(node, script.source(branch))
        elif isinstance(node, ast.Assign) and last_name(node.targets[0]) == "require_backward_grad_sync":
            yield node.lineno, script.replaced(node.value, "False")
        elif isinstance(node, ast.Call) and last_name(node.func) == "set_requires_gradient_sync" and node.args:
            yield node.lineno, script.replaced(node.args[0], "False")


def drop_no_sync(script: Script) -> Iterator[tuple[int, str]]:
    """Every micro-batch synchronised."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.IfExp):
            for branch, other in ((node.body, node.orelse), (node.orelse, node.body)):
                if "no_sync" in script.source(branch):
                    yield node.lineno, script.replaced(node, script.source(other))
        elif isinstance(node, ast.Assign) and last_name(node.targets[0]) == "require_backward_grad_sync":
            yield node.lineno, script.replaced(node.value, "True")
        elif isinstance(node, ast.Call) and last_name(node.func) == "set_requires_gradient_sync" and node.args:
            yield node.lineno, script.replaced(node.args[0], "True")


def bypass_wrapper(script: Script) -> Iterator[tuple[int, str]]:
    """The forward goes to the module inside of DDP."""
    wrapped = {
        script.source(target)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and last_name(node.value.func) in {"DDP", "DistributedDataParallel"}
        for target in node.targets
    }
    for call in script.calls:
        if script.source(call.func) in wrapped and call.args:
            yield call.lineno, script.edited([Edit(*script.span(call.func), f"{script.source(call.func)}.module")])


# What is a mistake also where every micro-batch is followed by its own update.
EVERY_LOOP = frozenset(
    {
        "drop zero", "drop every zero", "drop unscale", "clip before unscale", "unscale twice", "bypass scaler at the step",
        "bypass scaler at the backward", "bypass wrapper",
    }
)  # fmt: skip

OPERATORS: dict[str, Operator] = {
    **{f"hoist {kind}": _hoist(kind) for kind in KINDS},
    **{f"sink {kind}": _sink(kind) for kind in KINDS},
    "drop zero": _drop("zero"),
    "drop every zero": drop_every_zero,
    "drop unscale": _drop("unscale"),
    "zero before step": zero_before_step,
    "zero before backward": zero_before_backward,
    "clip before unscale": clip_before_unscale,
    "unscale twice": unscale_twice,
    "step twice": step_twice,
    "bypass scaler at the step": bypass_scaler_at_the_step,
    "bypass scaler at the backward": bypass_scaler_at_the_backward,
    "drop division": drop_division,
    "double division": double_division,
    "shift boundary": shift_boundary,
    "invert boundary": invert_boundary,
    "narrow no_sync": narrow_no_sync,
    "widen no_sync": widen_no_sync,
    "drop no_sync": drop_no_sync,
    "bypass wrapper": bypass_wrapper,
}
