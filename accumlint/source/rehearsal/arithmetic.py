"""Arithmetic on what a rehearsal knows: counters and settings, tensors with their weight, counts of targets."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from accumlint.source.rehearsal.counts import (
    COUNTED,
    SINCE,
    WHOLE,
    counted,
    guarded_weight,
    is_epsilon,
    note_growth,
    span_of,
    spanned,
    sum_of_counts,
)
from accumlint.source.rehearsal.lengths import note_numbers
from accumlint.source.rehearsal.scaling import LARGEST_NUMBER, counts_ranks, number_factor
from accumlint.source.rehearsal.skips import HANGS
from accumlint.source.rehearsal.values import Data, Items, Known, Opaque, Phi, Root, Value, key_of, setting_keys
from accumlint.weight import Factor, Quantity, Term, Weight, add

if TYPE_CHECKING:
    from accumlint.source.rehearsal.state import State

MOST_KEYS = 40  # of what a value was computed from, in which a product is looked for
LONGEST_SEQUENCE = 10_000
ADDED = re.compile(r"loss|penalt|regulari|(^|_|\.|\s)(reg|aux|kl)(_|$|\()|entropy|diverg", re.IGNORECASE)  # what is added to a loss
SAME_SHAPE = frozenset(
    """
    view reshape to float half double bfloat16 contiguous squeeze unsqueeze flatten transpose permute cpu cuda clone type expand
    type_as nan_to_num long int requires_grad_ expand_as backward_hook
    """.split()
)
LENGTH_MASK = re.compile(
    r"(pad|length|lens?|loss|action|labels?|targets?|attn|attention|valid|completion|response|answer|src|tgt|trg|mel|seq|text|token|frame)"
    r"_?(pad(ding)?_?)?masks?",
    re.IGNORECASE,
)
TOLD_THE_COUNT = "window-count"  # cause of what a framework's count of the window's targets was given to
OF_EACH = "of-each"  # cause of what a model returns where that is the losses of single targets, whatever it is called
OF_ROWS = "of-rows"  # cause of the counts of each row of a mask
SELECTED = "selected"  # cause of what a mask left of some data: a different number each time

OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}


def combine(state: State, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
    """The value of `left op right`."""
    return note_numbers(state, _combined(state, op, left, right, node), left, right)


def _combined(state: State, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
    if left.__class__ is Phi:
        left = state.force(left)
    if right.__class__ is Phi:
        right = state.force(right)
    left, right = _settled(state, left), _settled(state, right)
    if op in {ast.Div, ast.FloorDiv} and isinstance(right, Known) and right.root is not None and right.root.kind == "length":
        state.batch_counts.update(setting_keys(left))
    if isinstance(left, Known) and isinstance(right, Known):
        return _known(state, op, left, right, node)
    if isinstance(left, Items) or isinstance(right, Items):
        return _sequence(state, op, left, right, node)
    if op is ast.Mod and isinstance(right, Opaque):
        return _modulo(state, left, right, node)
    if op is ast.Mod and isinstance(left, Opaque) and isinstance(right, Known) and right.root is not None:
        return state.opaque(("Mod", left.key, right.key), state.recorder.text(node), left, gates=frozenset({right.root}))
    if (
        op in {ast.FloorDiv, ast.Mod, ast.Add, ast.Sub, ast.Mult}
        and not is_tensor(left)
        and (not is_tensor(right) or (op is ast.FloorDiv and _is_setting(right)))
    ):
        numbers = _numbers(state, op, left, right, node)
        if numbers is not None:
            return numbers
    if op in {ast.Mult, ast.Div, ast.FloorDiv}:
        return scale(state, op, left, right, node)
    if op in {ast.Add, ast.Sub}:
        return _sum(state, op, left, right, node)
    made = state.opaque((op.__name__, key_of(left), key_of(right)), state.recorder.text(node), left, right, attached=_attached(left, right))
    if op is ast.Pow and isinstance(left, Opaque) and left.forwards and not left.reduced and isinstance(right, Known):
        made.weight = Weight()  # of squared errors each counts one
    return made


def _settled(state: State, value: Value) -> Value:
    """The number of a value that was found to be K, whatever it was computed from."""
    if value.__class__ is Opaque:
        accumulations = state.world.knowledge.accumulations
        if accumulations and value.key in accumulations and not (value.forwards or value.born):
            return state.number(value) or value
    return value


def is_tensor(value: Value) -> bool:
    return value.__class__ is Opaque and bool(value.born or value.forwards or value.attached or value.weight is not None)


def _is_setting(value: Value) -> bool:
    """A product of settings, the world size among them: `total // (micro * world_size)` is one number, not a tensor divided by W."""
    own = isinstance(value, Opaque) and value.quantity in {None, Quantity.WORLD}
    return isinstance(value, Opaque) and own and not (value.forwards or value.born or value.attached)


def _attached(*values: Value) -> bool:
    return any(isinstance(value, Opaque) and value.attached for value in values)


def _known(state: State, op: type[ast.operator], left: Known, right: Known, node: ast.AST) -> Value:
    roots = left.roots | right.roots
    gates = left.gates | right.gates
    if op is ast.Mod and isinstance(left.value, str):
        return state.opaque(("text", id(node)), "text")
    if op is ast.Mod and left.root is None and right.root is not None:
        right = _period(state, right)
    compute = OPERATIONS.get(op)
    if compute is None and op is ast.Pow and isinstance(right.value, int) and abs(right.value) <= 64:
        compute = operator.pow
    if compute is None or not _small(left.value) or not _small(right.value):
        return state.opaque((op.__name__, key_of(left), key_of(right)), state.recorder.text(node))
    try:
        if op is ast.Div and isinstance(left.value, int) and isinstance(right.value, int):
            value: Any = Fraction(left.value, right.value)
        elif op is ast.Mult and (isinstance(left.value, str) or isinstance(right.value, str)):
            value = ""
        else:
            value = compute(left.value, right.value)
    except Exception:  # whatever Python would raise here, the rehearsal only does not know
        return state.opaque((op.__name__, key_of(left), key_of(right)), state.recorder.text(node))
    if not _small(value):
        return state.opaque((op.__name__, key_of(left), key_of(right)), state.recorder.text(node))
    if op is ast.Mod and right.root is not None:
        gates |= {right.root}
    if (
        op in {ast.FloorDiv, ast.Div}
        and left.root is not None
        and type(value) is not bool
        and not state.world.knowledge.accumulations.keys() & {root.key for root in roots}
    ):
        return _quotient(state, left, right, value, node)
    return Known(value, roots, None, gates)


def _period(state: State, modulus: Known) -> Known:
    """A named constant that a counter is taken modulo of and that is not K: whole windows, if that is what the numbers in place say."""
    root, knowledge = modulus.root, state.world.knowledge
    if root is None or root.kind != "constant" or not root.default or root.key in knowledge.accumulations or root.key in knowledge.lengths:
        return modulus
    sizes = [one.default for one in knowledge.accumulations.values() if one.default]
    if not knowledge.accumulations or root.default < 2:
        return modulus
    whole = bool(sizes) and all(root.default % size == 0 for size in sizes)
    return replace(modulus, value=2 * state.world.k if whole else state.world.period)


def _quotient(state: State, left: Known, right: Known, value: Any, node: ast.AST) -> Known:
    """`total // micro` of two settings is a setting of its own: it may be K."""
    if (
        not isinstance(node, ast.BinOp)
        or not isinstance(node.op, ast.FloorDiv)
        or right.root is None
        or left.root is None
        or left.root.kind == "length"
    ):
        return Known(value, left.roots | right.roots)
    root = Root(("//", left.root.key, right.root.key), state.recorder.text(node), "constant", value if isinstance(value, int) else None)
    chosen = state.world.number(root)
    return Known(value if chosen is None else chosen, frozenset({root}), root)


def _small(value: Any) -> bool:
    if isinstance(value, (int, float, Fraction)):
        return bool(-LARGEST_NUMBER < value < LARGEST_NUMBER)
    return not isinstance(value, (str, bytes, list, tuple)) or len(value) < LONGEST_SEQUENCE


def _sequence(state: State, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
    if isinstance(left, Items) and isinstance(right, Items) and op is ast.Add:
        return Items(left.items + right.items, left.kind, open=left.open or right.open, data=left.data or right.data)
    if op is ast.Add and isinstance(left, Items) and left.kind == "tuple" and not left.open and isinstance(right, Opaque):
        return Items([*left.items, right], "tuple")  # `(loss,) + outputs[2:]`: what comes first is known
    items, count = (left, right) if isinstance(left, Items) else (right, left)
    number = state.number(count, role="bound")
    if op is ast.Mult and isinstance(items, Items) and number is not None and isinstance(number.value, int):
        return Items(items.items * max(0, min(number.value, 64)), items.kind, open=items.open, length=number.root)
    return state.opaque((op.__name__, key_of(left), key_of(right)), state.recorder.text(node), left, right)


def _modulo(state: State, left: Value, right: Opaque, node: ast.AST) -> Value:
    """A counter against a setting: the setting is K if this gates an update, a period of something else otherwise."""
    divisor = state.number(right, role="modulus")
    root = Root(right.key, right.text)
    if not isinstance(left, Known) or not isinstance(left.value, int) or right.forwards or right.born:
        return state.opaque(("Mod", key_of(left), right.key), state.recorder.text(node), left, right, gates=frozenset({root}))
    whole = right.weight is not None and right.weight.power(Quantity.ACCUMULATION) > 0  # `K * every`: a number of windows
    value = divisor.value if divisor is not None and divisor.value else 2 * state.world.k if whole else state.world.period
    return Known(left.value % int(value), left.roots | {root}, None, left.gates | {root})


def _numbers(state: State, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value | None:
    """Settings with numbers of their own; a quotient of two unknown settings is one setting."""
    first, second = state.number(left, role="bound"), state.number(right, role="bound")
    if first is not None and second is not None:
        return _known(state, op, first, second, node)
    if op is ast.FloorDiv:
        root = Root(("//", key_of(left), key_of(right)), state.recorder.text(node.target if isinstance(node, ast.AugAssign) else node))
        chosen = state.world.number(root)
        if chosen is not None:
            return Known(chosen, frozenset({root}), root)
        return state.opaque(root.key, root.text, left, right)
    return None


def scale(state: State, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
    """Multiplication and division, with the weight that results."""
    power = 1 if op is ast.Mult else -1
    base, other, other_power = left, right, power
    if op is ast.Mult and is_tensor(right) and not (is_tensor(left) and _loss_like(left)):
        base, other = right, left
    key = (op.__name__, key_of(left), key_of(right))
    text = state.recorder.text(node)
    other_node = _operand(node, base is left)
    if isinstance(base, Opaque) and (base.forwards or base.weight is not None or base.attached):
        if base.weight is None and not base.reduced and isinstance(other, Known) and _is_plain(other, other_node):
            made = state.opaque(key, text, base, other, scaler=base.scaler, attached=base.attached)
            made.quantity = base.quantity
            return made
        masked = _masked(state, base, other, op, other_node)
        factors = factors_of(state, other, other_power, other_node) if masked is None else masked
        if op is ast.Mult and base.reduced and _is_width(other):
            factors = (Factor(Quantity.CONSTANT, 1, None, text),)
        weight, factors = _mean_of_mask(state, base, factors)
        rows = isinstance(other, Opaque) and OF_ROWS in other.causes and not base.reduced and weight is not base.weight
        factors = () if rows else factors  # `(losses * mask).sum(1) / mask.sum(1)`: the mean of each sequence, which counts one
        made = state.opaque(key, text, base, other, reduced=base.reduced, scaler=base.scaler, attached=base.attached or _attached(other))
        made.weight = _with(weight, factors)
        if made.weight is not None and _undoes_mean(weight, factors):
            made.weight = replace(made.weight, known=True)
        if made.weight is not None and isinstance(other, Opaque) and other.forwards and base.forwards:
            made.weight = replace(made.weight, factors=base.weight.factors if base.weight is not None else ())
        made.quantity = base.quantity if all(factor.quantity is Quantity.CONSTANT for factor in factors) else None
        return made
    made = state.opaque(key, text, left, right, attached=_attached(left, right))
    if _is_plain(left, _operand(node, False)) and _is_plain(right, _operand(node, True)):
        return made
    factors = factors_of(state, left, 1, _operand(node, False)) + factors_of(state, right, power, _operand(node, True))
    if any(factor.quantity not in {Quantity.CONSTANT, Quantity.UNKNOWN} for factor in factors):
        made.weight = Weight(factors)
        made.reduced = True
    return made


def _is_plain(value: Value, node: ast.AST) -> bool:
    """Whether multiplying or dividing by a value surely says nothing of how targets count: a tensor, or a number in place."""
    if isinstance(value, Known):
        return isinstance(node, ast.Constant) and not value.roots
    return (
        isinstance(value, Opaque)
        and bool(value.born or value.attached)
        and not (value.forwards or value.weight or value.quantity or counts_ranks(value.text))
    )


def _masked(state: State, base: Opaque, mask: Value, op: type[ast.operator], node: ast.AST) -> tuple[Factor, ...] | None:
    """What multiplying the losses by a mask does: nothing by one of selected targets, and by any other until it is divided by its sum."""
    if op is not ast.Mult or base.reduced or not isinstance(mask, Opaque):
        return None
    if "compared" in mask.causes:
        return ()
    if mask.weight is not None or mask.forwards or not (mask.born or "data" in mask.causes):
        return None
    return (Factor(Quantity.UNKNOWN, 1, None, state.recorder.text(node), state.recorder.place(node), of=identity(state, mask)),)


def _undoes_mean(weight: Weight | None, factors: tuple[Factor, ...]) -> bool:
    """`loss * n / N`: that a loss which nobody could follow is multiplied by its own targets says that it is their mean."""
    taken = weight.of(Quantity.UNITS) if weight is not None else ()
    return len(taken) == 1 and taken[0].implicit and [(one.quantity, one.power) for one in factors] == [(Quantity.UNITS, 1)]


def _mean_of_mask(state: State, base: Opaque, factors: tuple[Factor, ...]) -> tuple[Weight | None, tuple[Factor, ...]]:
    """`(losses * mask).sum() / mask.sum()`: a mean over what the mask leaves, whatever it is a mask of."""
    if len(factors) != 1 or not factors[0].of or factors[0].power != -1:
        return base.weight, factors
    mask = state.identities[factors[0].of]
    if not _is_product_with(base.key, mask.key):
        return base.weight, factors
    kept = base.weight
    if kept is not None:
        kept = replace(kept, factors=tuple(one for one in kept.factors if one.of != factors[0].of))
    taken_from = mask.key[-1] if mask.key[0] in {"[]", "."} else ""
    uneven = factors[0].uneven or bool(LENGTH_MASK.search(f"{mask.text} {taken_from}"))
    return kept, (replace(factors[0], quantity=Quantity.UNITS, uneven=uneven),)


def _is_product_with(key: Any, mask: Any) -> bool:
    """Whether a value is the sum of what was multiplied by a mask, perhaps negated, moved or cast on the way."""
    pending: list[Any] = [key]
    seen: set[int] = set()
    while pending and len(seen) < MOST_KEYS:
        one = pending.pop()
        if not isinstance(one, tuple) or len(one) < 3 or id(one) in seen:
            continue
        seen.add(id(one))
        factors = one[1:3] if one[0] == "Mult" else one[1:2]
        if one[0] == "Mult" and any(_plain(factor) == mask for factor in factors):
            return True
        pending += factors
    return False


def _plain(key: Any) -> Any:
    """The key of a tensor's data, whatever its shape and type."""
    while isinstance(key, tuple) and len(key) >= 3 and key[0] == "method" and key[2] in SAME_SHAPE:
        key = key[1]
    return key


def identity(state: State, value: Opaque) -> str:
    """A name for the data of a tensor, whatever its shape and type."""
    key = _plain(value.key)
    name = state.names_of_data.setdefault(key, str(len(state.names_of_data) + 1))
    state.identities.setdefault(name, Data(key, value.text))
    return name


def _is_width(value: Value) -> bool:
    """`x.size(1)`: how many numbers a sample has, not how many samples; a mean times it still is a mean over samples."""
    return (
        isinstance(value, Opaque) and len(value.key) == 3 and value.key[0] == "size" and value.key[2] in {("known", "1"), ("known", "-1")}
    )


def _operand(node: ast.AST, right: bool) -> ast.AST:
    if isinstance(node, ast.BinOp):
        return node.right if right else node.left
    if isinstance(node, ast.AugAssign):
        return node.value if right else node.target
    if isinstance(node, ast.Call) and node.args:
        return node.args[0]
    return node


def _loss_like(value: Value) -> bool:
    return isinstance(value, Opaque) and value.weight is not None and bool(value.forwards)


def _with(weight: Weight | None, factors: tuple[Factor, ...]) -> Weight | None:
    if weight is None:
        if all(factor.quantity in {Quantity.CONSTANT, Quantity.UNKNOWN} for factor in factors):
            return None
        return Weight(factors, known=False)
    return weight.times(*factors)


def factors_of(state: State, value: Value, power: int, node: ast.AST) -> tuple[Factor, ...]:
    """What multiplying (power 1) or dividing (power -1) by a value does to a weight."""
    value = _settled(state, state.force(value))
    place, text = state.recorder.place(node), state.recorder.text(node)
    if isinstance(value, Known):
        return (number_factor(state, value, power, node, text, place),)
    if isinstance(value, Opaque):
        if power < 0 and value.quantity is not None and "compared" in value.causes:
            _note_selection(state, value, node)
        if value.weight is not None and not value.forwards:
            plain = len(value.weight.factors) == 1 and value.weight.factors[0].power == 1
            return tuple(
                replace(factor, power=factor.power * power, place=place if plain else factor.place or place, text=factor.text or text)
                for factor in (spanned(state, each) for each in value.weight.factors)
            )
        number = state.number(value, role="bound") if not is_tensor(value) else None
        if number is not None:
            return (number_factor(state, number, power, node, text, place),)
        if counts_ranks(value.text):
            return (Factor(Quantity.WORLD, power, None, text, place),)
        if value.quantity is not None:
            return (Factor(value.quantity, power, None, text, place, guarded=value.guarded),)
    fixed = isinstance(value, Opaque) and not (value.causes or value.gates or value.path or is_tensor(value))
    return (Factor(Quantity.UNKNOWN, power, None, text, place, root="setting" if fixed else ""),)


def _note_selection(state: State, value: Opaque, node: ast.AST) -> None:
    """Dividing by a count of selected targets may say that it can be zero."""
    if (
        "filtered" in value.causes
        and WHOLE not in value.causes
        and not value.guarded
        and not (state.index.keeps_a_target or state.index.only_pads)
    ):
        state.recorder.fact("may-lose-targets", node)


def _hanging(*values: Value) -> frozenset[str]:
    """The ways that leave values without a graph; a sum keeps one while any other term of it does."""
    return frozenset(cause for value in values if isinstance(value, Opaque) for cause in value.causes if cause.startswith(HANGS))


def _sum(state: State, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
    made = state.opaque((op.__name__, key_of(left), key_of(right)), state.recorder.text(node), left, right, attached=_attached(left, right))
    if op is ast.Sub and made.attached:
        state.recorder.compares(
            frozenset().union(*(side.causes for side in (left, right) if isinstance(side, Opaque) and not side.attached))
        )
    terms = [side for side in (left, right) if isinstance(side, Opaque) and (side.weight is not None or side.quantity is not None)]
    if not terms:
        return made
    losses = [term for term in terms if term.forwards and term.weight is not None]
    if losses:
        made.weight = _with_terms(state, add(term.weight for term in losses), (left, right), node)
        made.causes -= _hanging(left, right) - frozenset.intersection(*(_hanging(term) for term in losses))
        made.reduced = all(term.reduced for term in losses)
        made.scaler = next((term.scaler for term in losses if term.scaler is not None), None)
        return made
    counts = [term for term in terms if term.quantity in {Quantity.UNITS, Quantity.INPUTS, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS}]
    if op is ast.Sub:
        counts = counts[:1]  # what is left of a count
    if counts:
        made.quantity, made.weight = sum_of_counts(state, counts, left, right, node)
        if len({counted(count) for count in counts}) == 1:
            made.attributes[COUNTED] = Known(counted(counts[0]))
        made.attributes[SINCE] = Known(span_of(counts))
        note_growth(op, left, right, made)
        made.guarded = op is ast.Add and (is_epsilon(left) or is_epsilon(right))
        if made.guarded:
            made.weight = guarded_weight(made.weight)
        made.born = frozenset()
        made.reduced = True
    return made


def _with_terms(state: State, weight: Weight | None, sides: tuple[Value, Value], node: ast.AST) -> Weight | None:
    """The weight of a sum with its summands: the losses in it, and what is added to them without being followed."""
    terms: list[Term] = []
    for side, is_right in zip(sides, (False, True), strict=True):
        if not isinstance(side, Opaque):
            continue
        if side.weight is not None and side.weight.terms:
            terms.extend(side.weight.terms)
        elif (side.weight is not None and side.forwards) or ADDED.search(side.text):
            operand = _operand(node, is_right)
            hidden = side.weight is None or TOLD_THE_COUNT in side.causes
            own = replace(side.weight or Weight(), known=not hidden and side.weight is not None and side.weight.known)
            told = (Factor(Quantity.UNKNOWN, -1),) if TOLD_THE_COUNT in side.causes and not own.factors else ()
            terms.append(Term(own.times(*told), state.recorder.text(operand), state.recorder.place(operand)))
    return replace(weight, terms=tuple(terms)) if weight is not None and len(terms) > 1 else weight
