"""torch: what happens to a tensor on its way from the model to the loss, as far as its weight goes."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.arithmetic import LENGTH_MASK, OF_ROWS, SAME_SHAPE, SELECTED, identity, is_tensor, scale
from accumlint.source.rehearsal.counts import BY_INDEX, count, counts_of_parts, guard, last_part, selects, shifts
from accumlint.source.rehearsal.holding import is_object
from accumlint.source.rehearsal.unclear import may_divide
from accumlint.source.rehearsal.values import NONE, Items, Known, Opaque, Phi, Stream, Thing, Value, key_of
from accumlint.source.vocabulary.base import Handler, receiver_of, role_of
from accumlint.source.vocabulary.dimensions import has_dimension, is_over_samples
from accumlint.trace import Kind
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

LOSS_FUNCTIONS = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "ctc_loss",
    "poisson_nll_loss",
    "margin_ranking_loss",
    "triplet_margin_loss",
    "cosine_embedding_loss",
    "multi_margin_loss",
    "soft_margin_loss",
    "gaussian_nll_loss",
    "multilabel_soft_margin_loss",
    "hinge_embedding_loss",
    "multilabel_margin_loss",
    "sigmoid_focal_loss",
)
CRITERION_NAME = re.compile(r"criterion|(^|_)(loss|ce|mse|bce|nll)(_?fn|_?func(tion)?|_fct)?$|^(cross_entropy|loss)", re.IGNORECASE)
LIKE_ANOTHER = frozenset({"type_as", "expand_as", "view_as", "reshape_as", "to"})  # of another tensor they take the shape or the type
MAKES_MASK = re.compile(r"(^|_)(len(gth)?s?|seq(uence)?|pad(ding)?)_(to_)?mask|mask_?from_\w*len|get_mask_from_len", re.IGNORECASE)
names_criterion, makes_mask = found_in(CRITERION_NAME), found_in(MAKES_MASK)
MAKERS = (
    "rand",
    "randn",
    "randint",
    "zeros",
    "ones",
    "arange",
    "linspace",
    "full",
    "empty",
    "normal",
    "randperm",
    "eye",
)
LENGTHS = re.compile(r"(^|_)(lens|lengths)$")  # of the sequences of a batch
INPUT_NAMES = re.compile(r"attention_mask|input_ids|inputs?_|padding_mask")


def loss(state: Machine, call: Call) -> Value | None:
    """A loss function: `mean` gives each of its n targets 1/n."""
    parts = call.values
    reduction = call.keywords.get("reduction")
    chosen = state.force(reduction) if reduction is not None else None
    kind = chosen.value if isinstance(chosen, Known) else "mean" if chosen is None else None
    averages = state.force(call.keywords.get("size_average", Known(None)))
    if isinstance(averages, Known) and averages.value is False:
        kind = "sum"
    made = state.opaque(
        ("call", call.name, *state.key(*parts)),
        state.recorder.text(call.node),
        *(part for part in parts if isinstance(part, Opaque)),
        attached=True,
    )
    made.weight, made.reduced = weight_of_reduction(
        state, call.node, kind, call.name if call.name in LOSS_FUNCTIONS else call.path.rsplit(".", 1)[-1]
    )
    made.weight = _of_what_is_left(made, made.weight)
    made.causes = (made.causes - {SELECTED}) | {"loss"}
    if state.no_grad == 0:
        state.recorder.emit(Kind.LOSS, call.node, weight=made.weight, options=shifts(made))
    else:
        made.forwards, made.attached = frozenset(), False
    return made


def _of_what_is_left(made: Opaque, weight: Weight) -> Weight:
    """The weight of a loss; a mean over what a mask leaves is one over a different number each time."""
    if SELECTED not in made.causes:
        return weight
    if BY_INDEX in made.causes:
        return replace(weight, factors=tuple(replace(factor, root="ignoring") for factor in weight.factors))
    return _uneven(weight)


def _uneven(weight: Weight) -> Weight:
    return replace(weight, factors=tuple(replace(factor, uneven=True) for factor in weight.factors))


def selected(state: Machine, call: Call) -> Value | None:
    """`x.masked_select(mask)`: as many as the mask leaves, where it is one of lengths or was compared."""
    value = _operand(state, call)
    mask = state.force(call.args[-1]) if call.args else None
    if value is None or mask is value or not isinstance(mask, Opaque):
        return None
    made = state.opaque(
        ("selected", value.key, mask.key), state.recorder.text(call.node), value, mask, attached=value.attached, scaler=value.scaler
    )
    if "compared" in mask.causes or LENGTH_MASK.search(mask.text):
        made.causes |= {SELECTED}
    return made


def compared(state: Machine, call: Call) -> Value | None:
    """`labels.ne(pad)`: what `labels != pad` is."""
    value = _operand(state, call)
    other = state.force(call.args[-1]) if call.args else None
    if value is None or other is None or other is value or not (is_tensor(value) or "data" in value.causes):
        return None
    made = _derived(state, value, call)
    made.forwards, made.attached = frozenset(), False
    if value.born or "data" in value.causes:
        made.causes |= selects(state, value, other, call.node.args[-1]) - {"filtered"}  # of padding most often, which leaves some
    return made


def weight_of_reduction(state: Machine, node: ast.AST, kind: object, name: str) -> tuple[Weight, bool]:
    if kind == "mean":
        return mean_weight(state, node, name), True
    if kind in {"sum", "batchmean"}:
        return Weight(), True
    if kind == "none":
        return Weight(), False
    return Weight(known=False), True


def mean_weight(state: Machine, node: ast.AST, root: str = "mean") -> Weight:
    """The weight of a mean; `root` names the function that takes it."""
    return Weight((Factor(Quantity.UNITS, -1, None, state.recorder.text(node), state.recorder.place(node), implicit=True, root=root),))


def mean(state: Machine, call: Call) -> Value | None:
    value = _operand(state, call)
    if value is None or not is_tensor(value):
        return None
    made = _derived(state, value, call)
    made.attached = value.attached or bool(value.forwards)
    if has_dimension(call) and not value.reduced and not (is_over_samples(call) and value.forwards):
        made.weight, made.reduced = value.weight, False
        return made
    if value.reduced:  # the mean over the replicas of DataParallel
        made.weight, made.reduced = value.weight, True
        return made
    if value.forwards or value.weight is not None:
        inner = value.weight or Weight()
        made.weight = inner.times(*_of_what_is_left(value, mean_weight(state, call.node)).factors)
        made.reduced = True
        made.causes = (made.causes - {SELECTED}) | {"loss"}
        if value.forwards:
            state.recorder.emit(Kind.LOSS, call.node, weight=made.weight)
    return made


def of_each(state: Machine, call: Call) -> Value | None:
    """`F.logsigmoid(margins)`: a loss of each sample, as preference losses have it."""
    value = _operand(state, call)
    if value is None or value.reduced or not value.forwards:
        return None
    made = _derived(state, value, call)
    made.weight, made.attached = Weight(), True
    return made


def total(state: Machine, call: Call) -> Value | None:
    """`.sum()`: of a loss, each unit counts one; of a mask, it is a count, and so it is of lengths."""
    value = _operand(state, call)
    if value is None:
        return None
    lengths = LENGTHS.search(last_part(value.text)) is not None and not (value.forwards or has_dimension(call))
    if not (lengths or is_tensor(value)):
        return None
    if value.forwards:
        made = _derived(state, value, call)
        made.weight, made.reduced, made.attached = value.weight or Weight(), not has_dimension(call), True
        if any(factor.implicit and factor.root == "model" for factor in made.weight.factors):
            made.weight = replace(made.weight, known=False)  # summed, so the model gave a vector and no mean
        made.causes |= {"loss"}
        return made
    if value.quantity is not None:
        return value
    if lengths:
        made = counted(state, Quantity.UNITS, ("sum", value.key), call, value)
        made.weight = _uneven(made.weight) if made.weight is not None else None
        return made
    quantity = Quantity.INPUTS if INPUT_NAMES.search(value.text) else Quantity.UNITS
    return counted(state, quantity, ("sum", value.key), call, value)


def counted(state: Machine, quantity: Quantity, key: tuple[object, ...], call: Call, value: Opaque) -> Opaque:
    own = identity(state, value) if call.name == "sum" else ""
    made = count(state, quantity, key, call.node, value, of=own)
    made.causes |= {OF_ROWS} if has_dimension(call) else set()
    state.recorder.emit(Kind.COUNT, call.node, weight=made.weight, options=shifts(made))
    return made


def size(state: Machine, call: Call) -> Value | None:
    value = _operand(state, call)
    if value is None or role_of(state, value) is not None or value.path:
        return None
    if call.name == "size" and not call.args:
        return state.opaque(("size", value.key), state.recorder.text(call.node), value)
    if not (is_tensor(value) or "data" in value.causes):
        return None
    if call.name in {"numel", "nelement"}:
        if value.reduced:
            return Known(1)
        quantity = Quantity.INPUTS if state.index.ignores_targets or INPUT_NAMES.search(value.text) else Quantity.UNITS
        return counted(state, quantity, (call.name, value.key), call, value)
    made = count(state, Quantity.INPUTS, (call.name, value.key, *state.key(*call.args)), call.node, value)
    first = state.force(call.args[0]) if call.args else None
    made.agreed = made.agreed or (
        isinstance(first, Known) and first.value == 0
    )  # a distributed sampler gives all ranks batches of one size
    return made


def detached(state: Machine, call: Call) -> Value | None:
    value = _operand(state, call)
    if value is None or not (is_tensor(value) or value.causes):
        return None
    made = _derived(state, value, call)
    made.causes |= {"loss"} if value.forwards else set()
    made.forwards, made.attached, made.weight, made.reduced = frozenset(), False, value.weight if value.quantity else None, value.reduced
    made.quantity, made.guarded = value.quantity, value.guarded
    if call.name == "detach_" and isinstance(value, Opaque):
        value.forwards, value.attached = frozenset(), False
    return made


def clamp(state: Machine, call: Call) -> Value | None:
    value = _operand(state, call)
    if value is None or value.forwards or (value.quantity is None and value.weight is None):
        return None
    made = guard(state, value, call.node)
    if call.name.endswith("_"):
        value.guarded, value.weight = True, made.weight
        return value
    return made


def scaled_by(state: Machine, call: Call) -> Value | None:
    """`.mul(x)`, `.div(x)` and their in-place forms on a loss."""
    value = _operand(state, call)
    others = [part for part in call.args if part is not value]
    if value is None or not is_tensor(value) or not others:
        return None
    op = ast.Mult if call.name.startswith("mul") else ast.Div
    made = scale(state, op, value, others[0], call.node)
    if call.name.endswith("_") and isinstance(made, Opaque):
        value.weight = made.weight
        return value
    return made


def chunks(state: Machine, call: Call) -> Value | None:
    """`batch.split(n)`, `torch.chunk(batch, k)`: micro-batches of one batch."""
    value = _operand(state, call)
    if value is None or value.forwards or not (value.born or "data" in value.causes or call.path.startswith("torch.")):
        return None
    pieces = call.argument(1 if value is not call.receiver else 0, "chunks", "sections") if call.name in {"chunk", "tensor_split"} else None
    number = state.number(pieces, role="bound") if pieces is not None else None
    return Stream(
        "chunks",
        (value,),
        stop=number if number is not None and isinstance(number.value, int) else None,
        text=state.recorder.text(call.node),
    )


def made_tensor(state: Machine, call: Call) -> Value | None:
    """`torch.randn(…)`: data made in place, new each time unless it takes the shape of other data."""
    if call.path and not call.path.startswith("torch."):
        return None
    made = state.opaque(("made", call.node.lineno, state.steps), state.recorder.text(call.node))
    made.born = state.take(call.node) if state.recorder.turns and state.forward is None else frozenset({state.uid()})
    made.causes = frozenset({"data", "positions"}) if call.name == "arange" else frozenset({"data"})
    return made


def wrapped_number(state: Machine, call: Call) -> Value | None:
    """`torch.tensor(x)`: the same number or data."""
    value = state.force(call.args[0]) if call.args else None
    if isinstance(value, Opaque):
        made = _derived(state, value, call)
        made.quantity, made.weight, made.guarded, made.reduced = value.quantity, value.weight, value.guarded, value.reduced
        made.forwards = frozenset()
        return made
    if isinstance(value, Items):
        items = [state.force(item) for item in value.items]
        counted = next((item for item in items if isinstance(item, Opaque) and item.quantity is not None), None)
        made = state.opaque(("tensor", state.steps), state.recorder.text(call.node), *items)
        if counted is not None:
            made.quantity, made.weight = counted.quantity, counted.weight
        return (counts_of_parts(state, call.node, items, value.open) if len(items) > 1 or value.open else None) or made
    return state.opaque(("tensor", state.steps), state.recorder.text(call.node)) if isinstance(value, Known) else None


def _of_single_samples(weight: Weight) -> Weight:
    """The mean of each sample in a list of them: what follows is a mean over samples, of which there are as many each time."""
    return replace(weight, factors=tuple(replace(one, root="sample") if one.implicit else one for one in weight.factors))


def joined(state: Machine, call: Call) -> Value | None:
    """`torch.stack(losses)`, `torch.cat(…)`: a tensor of all of them."""
    source = state.force(call.args[0]) if call.args else None
    if not isinstance(source, Items):
        return None
    items = [state.force(item) for item in source.items]
    made = state.opaque(("joined", call.node.lineno, state.steps), state.recorder.text(call.node), *items)
    made.attached = any(isinstance(item, Opaque) and item.attached for item in items)
    weights = [item.weight for item in items if isinstance(item, Opaque) and item.weight is not None and item.forwards]
    if weights:
        made.weight = _of_single_samples(weights[0]) if source.open else weights[0]
        made.reduced = False
    return counts_of_parts(state, call.node, items, source.open) or made


def new_like(state: Machine, call: Call) -> Value | None:
    value = _operand(state, call)
    if value is None:
        return None
    made = state.opaque((call.name, value.key, state.steps), state.recorder.text(call.node), value)
    made.forwards, made.attached = frozenset(), False
    return made


def fallback(state: Machine, call: Call) -> Value | None:
    """Any other method of a tensor, and calls of criteria that are known by name only."""
    owner = receiver_of(call)
    if isinstance(owner, Opaque) and is_tensor(owner) and not owner.path and not any(is_object(state.force(part)) for part in call.values):
        if call.name == "register_hook":
            may_divide(state, call)
        made = _derived(state, owner, call)
        made.attached = owner.attached
        if call.name in SAME_SHAPE:
            made.weight, made.reduced, made.quantity, made.guarded = owner.weight, owner.reduced, owner.quantity, owner.guarded
            made.scaler, made.born = owner.scaler, owner.born
        for part in call.args if call.name not in LIKE_ANOTHER else ():
            part = state.force(part)
            if isinstance(part, Opaque):
                made.forwards |= part.forwards
                made.attached = made.attached or part.attached
        return made
    return _named_criterion(state, call) or _mask_of_lengths(state, call)


def _mask_of_lengths(state: Machine, call: Call) -> Value | None:
    """`lens_to_mask(lengths)`, `make_pad_mask(lengths)` that nobody followed: what they leave differs from batch to batch."""
    if not makes_mask(call.name) or not call.values:
        return None
    parts = [state.force(value) for value in call.values]
    if not any(isinstance(part, Opaque) and (part.born or "data" in part.causes) for part in parts):
        return None
    made = state.opaque(("mask", call.name, *state.key(*parts)), state.recorder.text(call.node), *parts)
    made.forwards, made.attached = frozenset(), False
    made.causes |= {"compared"}
    return made


def _named_criterion(state: Machine, call: Call) -> Value | None:
    values = [state.force(value) if value.__class__ is Phi else value for value in call.values]
    tensors = [value for value in values if value.__class__ is Opaque and (value.forwards or value.attached)]
    nested = [
        part
        for value in values
        if isinstance(value, Items)
        for part in map(state.force, value.items)
        if isinstance(part, Opaque) and part.forwards
    ]
    tensors += nested
    if not tensors or isinstance(call.function, Thing):
        return None
    if call.receiver is not None and role_of(state, call.receiver) is not None:
        return None
    name = call.name or (call.function.text if isinstance(call.function, Opaque) else "")
    if not names_criterion(name):
        return None
    if call.name in LOSS_FUNCTIONS and not call.path:
        return loss(state, call)  # `F` came with a star, or with a cell that was not seen
    made = state.opaque(("call", name, *state.key(*values)), state.recorder.text(call.node), *tensors, attached=True)
    known = (not call.path or call.path.startswith("torch.")) and not _is_imported_object(call.function)
    if state.no_grad:
        made.forwards, made.attached = frozenset(), False
        return made
    kind = _told_reduction(state, call)
    weight, made.reduced = (
        weight_of_reduction(state, call.node, kind, "criterion") if kind else (mean_weight(state, call.node, "criterion"), True)
    )
    made.weight = _of_what_is_left(made, replace(weight, known=known))
    made.causes = (made.causes - {SELECTED}) | {"loss"}
    state.recorder.emit(Kind.LOSS, call.node, weight=made.weight, options=shifts(made))
    return made


def _told_reduction(state: Machine, call: Call) -> object:
    """`criterion(x, y, reduction="sum")`; None where nothing is said."""
    told = state.force(call.keywords.get("reduction", NONE))
    return told.value if isinstance(told, Known) else "unknown"


def _is_imported_object(function: Value) -> bool:
    """Whether a criterion is an object of a class that comes from elsewhere, other than from torch."""
    if (
        not isinstance(function, Opaque)
        or function.key[0] != "call"
        or not isinstance(function.key[1], tuple)
        or function.key[1][0] != "import"
    ):
        return False
    return not str(function.key[1][1]).startswith("torch.")


def _operand(state: Machine, call: Call) -> Opaque | None:
    """The tensor a method is called on, or the first argument of the function form."""
    owner = state.force(call.receiver) if call.receiver is not None else None
    if isinstance(owner, Opaque) and not owner.path:
        return owner
    first = state.force(call.args[0]) if call.args else None
    return first if isinstance(first, Opaque) and (call.path.startswith("torch.") or owner is None) else None


def _derived(state: Machine, value: Opaque, call: Call) -> Opaque:
    made = state.opaque(("method", value.key, call.name, *map(key_of, call.values)), state.recorder.text(call.node), value)
    made.scaler = value.scaler
    return made


FUNCTIONS: dict[str, Handler] = {
    **dict.fromkeys(LOSS_FUNCTIONS, loss),
    **dict.fromkeys(MAKERS, made_tensor),
    "logsigmoid": of_each,
    "mean": mean,
    "sum": total,
    "masked_select": selected,
    "split": chunks,
    "chunk": chunks,
    "tensor_split": chunks,
    "tensor": wrapped_number,
    "as_tensor": wrapped_number,
    "stack": joined,
    "cat": joined,
    "clamp": clamp,
    "numel": size,
    "FloatTensor": wrapped_number,
    "LongTensor": wrapped_number,
}
METHODS: dict[str, Handler] = {
    **dict.fromkeys(("eq", "ne", "gt", "lt", "ge", "le"), compared),
    "mean": mean,
    "sum": total,
    "numel": size,
    "nelement": size,
    "size": size,
    "detach": detached,
    "item": detached,
    "tolist": detached,
    "detach_": detached,
    "numpy": detached,
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_": clamp,
    "clip": clamp,
    "masked_select": selected,
    "split": chunks,
    "chunk": chunks,
    "tensor_split": chunks,
    "mul": scaled_by,
    "mul_": scaled_by,
    "div": scaled_by,
    "div_": scaled_by,
    "count_nonzero": total,
    "new_zeros": new_like,
    "new_tensor": new_like,
}
