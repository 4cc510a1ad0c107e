"""What a window's gradients are divided by: the arithmetic that the rules on normalisation share.

Every backward of a window contributes with its loss's weight times whatever scales `.grad` between it and the step. For a
mean loss the divisions by K must leave 1 when they are summed over the window; a loss that is divided by the targets of
the window must not be divided by K as well.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from accumlint.findings import Confidence
from accumlint.rules._boundary import Boundaries
from accumlint.trace import Event, Evidence, Kind, Place, Trace, Window, Wrapper
from accumlint.weight import Factor, Quantity, Weight

AVERAGING = frozenset({Wrapper.DDP, Wrapper.APEX_DDP, Wrapper.FSDP1, Wrapper.FSDP2, Wrapper.ZERO})
TRUSTED = "trusted"  # of a backward: the framework takes the loss as normalised over the window, and divides it by nothing
OWN_REDUCTION = frozenset({"no-averaging", "comm-hook"})  # options of a wrapper whose reduction is not the plain average


class Normalised(enum.Enum):
    """By which count of targets a loss is divided."""

    NOT = "not"  # a sum
    MICRO_BATCH = "micro-batch"  # a mean
    LOCAL_WINDOW = "local window"
    GLOBAL_WINDOW = "global window"
    TWICE = "twice"  # a mean, and by the targets of the window again
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One backward and the product of all factors on its way to the step.

    `micro_batches` is how many of them one backward spans (several, where a sum of losses is backpropagated once).
    """

    backward: Event
    weight: Weight
    micro_batches: int = 1

    @property
    def normalised(self) -> Normalised:
        return normalised(self.weight)

    @property
    def divisions(self) -> tuple[Factor, ...]:
        """The divisions by K, in order."""
        return tuple(factor for factor in self.weight.of(Quantity.ACCUMULATION) if factor.power < 0)


def normalised(weight: Weight) -> Normalised:
    if not weight.known or weight.of(Quantity.UNKNOWN, Quantity.INPUTS):
        return Normalised.UNCLEAR
    powers = tuple(weight.power(count) for count in (Quantity.UNITS, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS))
    plain = {
        (0, 0, 0): Normalised.NOT,
        (-1, 0, 0): Normalised.MICRO_BATCH,
        (0, -1, 0): Normalised.LOCAL_WINDOW,
        (0, 0, -1): Normalised.GLOBAL_WINDOW,
    }
    if powers in plain:
        return plain[powers]
    # A mean written out by hand may run over the tokens of one sequence, and the window's count over its sequences.
    own_mean = any(factor.implicit and factor.power < 0 for factor in weight.of(Quantity.UNITS))
    return Normalised.TWICE if own_mean and powers in {(-1, -1, 0), (-1, 0, -1)} else Normalised.UNCLEAR


def without_term_weights(weight: Weight) -> Weight:
    """Less the settings that the loss is multiplied or divided by: any number, but the same one for every micro-batch."""
    kept = tuple(factor for factor in weight.factors if not (factor.quantity is Quantity.UNKNOWN and factor.root == "setting"))
    return replace(weight, factors=kept)


def without_multipliers(weight: Weight) -> Weight:
    """Less the numbers that one term of a sum is multiplied by: those are its own."""
    return replace(weight, factors=tuple(one for one in weight.factors if one.quantity is not Quantity.UNKNOWN or one.power < 0))


def accumulating(trace: Trace) -> Iterator[tuple[Window, tuple[Contribution, ...]]]:
    """The complete windows of two or more micro-batches, with what they contribute."""
    for window, found in stepping(trace):
        if len({each.backward.micro_batch for each in found}) >= 2 or any(each.micro_batches >= 2 for each in found):
            yield window, found


def stepping(trace: Trace) -> Iterator[tuple[Window, tuple[Contribution, ...]]]:
    """The complete windows whose step uses some backward, with what they contribute; not those zeroed in between."""
    return iter(Boundaries.of(trace).once(_stepping))


def _stepping(boundaries: Boundaries) -> tuple[tuple[Window, tuple[Contribution, ...]], ...]:
    found: list[tuple[Window, tuple[Contribution, ...]]] = []
    for window in boundaries.trace.all_windows():
        backwards = boundaries.own(window)
        if not backwards or _zeroed_inside(window, backwards[0]):
            continue
        later = [event for event in _scalings(window) if _before_step(event, window) and boundaries.may_act_on(event, window.optimizer)]
        found.append((window, tuple(_contribution(event, window, later) for event in backwards)))
    return tuple(found)


def _scalings(window: Window) -> Iterator[Event]:
    """What scales `.grad`: a statement in a loop over the parameters scales each of them once, so it counts once."""
    seen: set[Place] = set()
    for event in window.of(Kind.BACKWARD, Kind.NORMALIZE):
        if event.kind is Kind.BACKWARD:
            seen.clear()
        elif event.place not in seen:
            seen.add(event.place)
            yield event


def _contribution(backward: Event, window: Window, scalings: list[Event]) -> Contribution:
    weight = backward.weight or Weight(known=False)
    for event in scalings:
        if event.index > backward.index:
            weight = weight.times(*event.weight.factors) if event.weight is not None else replace(weight, known=False)
    return Contribution(backward, weight, _span(backward, window))


def _before_step(event: Event, window: Window) -> bool:
    return window.step is None or event.index < window.step.index


def _zeroed_inside(window: Window, first: Event) -> bool:
    zeros = window.of(Kind.ZERO)
    return any(event.index > first.index and _before_step(event, window) and event.concerns(window.optimizer) for event in zeros)


def _span(backward: Event, window: Window) -> int:
    """Micro-batches with a loss of their own behind this backward: a joint loss over several batches counts once."""
    behind = {event.micro_batch for event in window.of(Kind.FORWARD) if event.index in backward.forwards}
    return max(
        1, len({event.micro_batch for event in window.of(Kind.LOSS) if event.micro_batch in behind and event.index < backward.index})
    )


IGNORING = frozenset({"cross_entropy", "nll_loss", "criterion", "model", "ignoring"})


def varies(trace: Trace, weight: Weight) -> Evidence | None:
    """What says that the mean's n differs between micro-batches.

    Targets that are set to the ignored index change the n of a loss function that ignores them, not that of a plain `.mean()`.
    """
    found = uneven(trace, weight)
    if found is not None:
        return found
    ignores = any(factor.implicit and factor.root in IGNORING for factor in weight.of(Quantity.UNITS))
    return trace.fact("ignored-targets") if ignores else None


def uneven(trace: Trace, weight: Weight) -> Evidence | None:
    """What says that the numbers of targets differ: the count that divides is of a selection, or the data varies in length."""
    counts = weight.of(Quantity.UNITS, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS)
    selected = next((factor for factor in counts if factor.uneven and factor.place is not None), None)
    if selected is not None and selected.place is not None:
        says = "is a mean over" if selected.implicit else "counts"
        return Evidence(selected.place, f"`{selected.text}` {says} the targets that are left")
    return trace.fact("varying-units")


def divides_once(contribution: Contribution) -> Factor | None:
    """The division by K, where there is exactly one, written by hand, and nothing multiplies it away."""
    factors = contribution.weight.of(Quantity.ACCUMULATION)
    if len(factors) != 1 or factors[0].power != -1 or factors[0].implicit:
        return None
    return factors[0]


def moves_in_window(contribution: Contribution, window: Iterable[Contribution]) -> Factor | None:
    """The division whose number changes from one micro-batch to the next: `loss / (micro_step + 1)`."""
    factor = divides_once(contribution)
    same = [each for each in map(divides_once, window) if each is not None and factor is not None and each.place == factor.place]
    return factor if len({each.value for each in same} - {None}) > 1 else None


def place_of(factor: Factor, event: Event) -> Place:
    return factor.place or event.place


def written(weight: Weight, *quantities: Quantity) -> tuple[Factor, ...]:
    """The divisions by these quantities that stand in the source."""
    return tuple(factor for factor in weight.of(*quantities) if factor.power < 0 and not factor.implicit)


def averages(trace: Trace, window: Window) -> bool:
    """Whether a wrapper averages the gradients of this window over the ranks, and nothing else reduces them."""
    forwards = [event for event in window.of(Kind.FORWARD) if event.model is not None]
    if trace.fact("manual-reduce") or window.of(Kind.REDUCE) or any(event.bypass for event in forwards):
        return False
    models = [event.model for event in forwards if event.model is not None]
    return any(model.wrapper in AVERAGING for model in models) and not any(model.options & OWN_REDUCTION for model in models)


def confidence(trace: Trace, window: Window) -> Confidence:
    """MEDIUM where an unknown call between the first backward and the step could have scaled the gradients."""
    first = window.backwards[0].index
    hidden = any(event.index > first and _before_step(event, window) for event in window.of(Kind.OPAQUE))
    return Confidence.MEDIUM if hidden or not trace.followed else Confidence.HIGH


def setting(trace: Trace) -> str:
    """K as the source spells it."""
    return trace.accumulation.text if trace.accumulation is not None and trace.accumulation.text else "K"


def ends_its_loader(trace: Trace, backward: Event) -> bool:
    """Whether the backward belongs to the last micro-batch of a pass over the data."""
    taken = [event for event in trace.of(Kind.DATA) if event.micro_batch == backward.micro_batch]
    turns = taken[0].turns if taken else backward.turns
    return bool(turns) and turns[-1].last and not turns[-1].endless


def number(value: Fraction) -> str:
    """A share as people write it."""
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
