"""The rules on tails, order of update events, graphs, data and skips, on traces written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import pytest

from accumlint.findings import Confidence, Severity
from accumlint.rule import Rule
from accumlint.rules.acc307_tail_lost import check as acc307
from accumlint.rules.acc308_clip_before_normalise import check as acc308
from accumlint.rules.acc309_graph_retained import check as acc309
from accumlint.rules.acc312_same_batch_reused import check as acc312
from accumlint.rules.acc313_skipped_window_not_cleared import check as acc313
from accumlint.rules.acc314_cross_optimizer_leak import check as acc314
from accumlint.rules.acc315_optimizer_in_backward import check as acc315
from accumlint.rules.acc319_skip_shrinks_window import check as acc319
from accumlint.trace import Accumulation, Event, Guard, Kind, Trace, Turn
from accumlint.weight import Factor, Quantity, Weight
from tests.rules.build import MEAN, Builder, codes, lines, over_k, place

RULES: tuple[Rule, ...] = (acc307, acc308, acc309, acc312, acc313, acc314, acc315, acc319)
EPOCHS, LOADER, TEST = 3, 5, 8
DIVIDED = Weight((MEAN, over_k()))
GATE = Guard(place(TEST), "(i + 1) % K == 0", "gate")


def found(trace: Trace) -> dict[str, list[int]]:
    """The lines of this file's rules that say something."""
    return {rule.code: at for rule in RULES if (at := lines(rule, trace))}


def epoch_loop(
    k: int = 3,
    *,
    batches: int | None = None,
    zero: str = "after step",
    counter: str = "index",
    flush: str = "never",
    endless: str = "no",
) -> Builder:
    """Two epochs over a loader, with the spellings of the boundary that matter for the tail."""
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    total = 2 * k + 1 if batches is None else batches
    count = 0
    for epoch in range(2):
        outer = Turn(EPOCHS, epoch, 0, last=epoch == 1)
        b.turns = (outer,)
        if zero == "before loop":
            b.zero(optimizer, 4)
        for i in range(total):
            b.turns = (outer, Turn(LOADER, i, epoch, last=i == total - 1, endless=endless == "yes"))
            b.data()
            forward = b.forward(model)
            b.backward(forward, weight=Weight((MEAN, over_k(k))), reaches={model.uid})
            count += 1
            done = (i + 1 if counter == "index" else count) % k == 0
            if done or (flush == "last" and i == total - 1):
                b.step(optimizer, guards=(GATE,))
                b.zero(optimizer)
        b.turns = (outer,)
        if zero == "after loop":
            b.zero(optimizer, 30)
    return b


@pytest.mark.parametrize("k", [2, 3])
def test_tail_that_the_next_epoch_takes_in(k: int) -> None:
    [finding] = codes(acc307, epoch_loop(k).trace(k=k))
    assert finding.place.line == TEST
    assert "full window on top" in finding.message
    assert "`(i + 1) % K == 0`" in finding.message


@pytest.mark.parametrize("k", [2, 3])
def test_tail_that_the_next_epoch_zeroes(k: int) -> None:
    [finding] = codes(acc307, epoch_loop(k, zero="before loop").trace(k=k))
    assert finding.place.line == TEST
    assert "in line 4 discards" in finding.message


@pytest.mark.parametrize(
    "loop",
    [
        {"flush": "last"},
        {"batches": 6},
        {"counter": "global"},
        {"zero": "after loop"},
        {"endless": "yes"},
    ],
    ids=str,
)
def test_tail_is_fine(loop: dict[str, object]) -> None:
    assert found(epoch_loop(**loop).trace()) == {}  # type: ignore[arg-type]


def test_no_tail_is_judged_where_the_trace_says_so() -> None:
    assert lines(acc307, replace(epoch_loop().trace(), judges_tail=False)) == []


def test_inverted_boundary_is_another_mistake() -> None:
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    for epoch in range(2):
        for i in range(6):
            b.turns = (Turn(EPOCHS, epoch, 0), Turn(LOADER, i, epoch, last=i == 5))
            b.data()
            b.backward(b.forward(model), weight=DIVIDED)
            if (i + 1) % 3 != 0:
                b.step(optimizer, guards=(GATE,))
                b.zero(optimizer)
    assert lines(acc307, b.trace()) == []


def test_zeroed_though_the_counter_runs_on() -> None:
    assert lines(acc307, epoch_loop(counter="global", zero="before loop").trace()) == [TEST]


def test_unknown_call_after_the_epoch_lowers_the_confidence() -> None:
    trace = epoch_loop().trace()
    last = next(at for at, event in enumerate(trace.events) if event.kind is Kind.BACKWARD and event.turns[1].last)
    events = list(trace.events)
    opaque = Event(last + 1, Kind.OPAQUE, place(40), 6, targets=trace.optimizers)
    events.insert(last + 1, opaque)
    renumbered = tuple(replace(event, index=at, forwards=tuple(i + (i > last) for i in event.forwards)) for at, event in enumerate(events))
    [finding] = codes(acc307, replace(trace, events=renumbered))
    assert finding.confidence is Confidence.MEDIUM


def windows_of(k: int = 3, count: int = 2) -> Iterable[tuple[int, int]]:
    return ((window, turn) for window in range(count) for turn in range(k))


def normalised(order: str, factor: Factor, clip: str = "clip_grad_norm_(model.parameters(), 1.0)") -> Trace:
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    for _, turn in windows_of():
        b.data()
        b.backward(b.forward(model), weight=Weight(()))
        if turn == 2:
            if order == "clip first":
                b.clip(model, text=clip)
            b.normalize(model, factor)
            if order == "clip last":
                b.clip(model, text=clip)
            b.step(optimizer)
            b.zero(optimizer)
    return b.trace()


BY_TOKENS = Factor(Quantity.WINDOW_UNITS, -1, None, "max(num_tokens, 1)")


def test_clip_before_the_division() -> None:
    [finding] = codes(acc308, normalised("clip first", BY_TOKENS))
    assert finding.place.line == 10 + list(Kind).index(Kind.CLIP)
    assert len(finding.guilty) == 2


@pytest.mark.parametrize(
    ("order", "factor", "clip"),
    [
        ("clip last", BY_TOKENS, "clip_grad_norm_(ps, 1.0)"),
        ("clip first", Factor(Quantity.CONSTANT, -1, Fraction(2), "2"), "clip_grad_norm_(ps, 1.0)"),
        ("clip first", Factor(Quantity.ACCUMULATION, -1, Fraction(1), "K"), "clip_grad_norm_(ps, 1.0)"),
        ("clip first", BY_TOKENS, "clip_grad_norm_(ps, max_norm * num_tokens)"),
        ("clip first", BY_TOKENS, "clip_grad_norm_(ps, float('inf'))"),
    ],
)
def test_clip_is_fine(order: str, factor: Factor, clip: str) -> None:
    assert lines(acc308, normalised(order, factor, clip)) == []


def test_clip_before_an_unknown_scaling_is_not_sure() -> None:
    [finding] = codes(acc308, normalised("clip first", Factor(Quantity.UNKNOWN, 1, None, "factor")))
    assert finding.confidence is Confidence.MEDIUM


def summed(*, retain: str, joint: str = "no") -> Trace:
    b = Builder()
    b.fact("means-to-accumulate")
    model = b.model()
    optimizer = b.optimizer(model)
    for _ in range(2):
        forwards = []
        for _ in range(3):
            b.data()
            forwards.append(b.forward(model))
            if joint == "no":
                b.add(Kind.LOSS)
            if retain == "yes":
                b.add(Kind.RETAIN, 30, text="total += loss", forwards=(forwards[-1].index,))
        if joint == "yes":
            b.add(Kind.LOSS)
        b.backward(*forwards, line=31)
        b.step(optimizer)
        b.zero(optimizer)
    return b.trace()


def test_sum_backpropagated_once() -> None:
    assert lines(acc309, summed(retain="yes")) == [30]


def test_list_of_losses_backpropagated_once() -> None:
    assert lines(acc309, summed(retain="no")) == [31]


def test_features_of_one_joint_loss() -> None:
    assert lines(acc309, summed(retain="no", joint="yes")) == []


def running_sum(kind: str) -> Trace:
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    for _, turn in windows_of():
        b.data()
        forward = b.forward(model)
        if kind == "own":
            b.add(Kind.RETAIN, 30, text="running += loss", forwards=(forward.index,))
        b.backward(forward)
        if kind == "never":
            extra = b.forward(model, 33)
            b.add(Kind.RETAIN, 34, text="total_aux += aux", forwards=(extra.index,))
        if turn == 2:
            b.step(optimizer)
            b.zero(optimizer)
    return b.trace()


def test_sum_that_no_backward_frees() -> None:
    [finding] = codes(acc309, running_sum("never"))
    assert (finding.place.line, finding.severity) == (34, Severity.WARNING)


def test_sum_of_losses_with_their_own_backward_is_info() -> None:
    [finding] = acc309.check(running_sum("own"))
    assert (finding.place.line, finding.severity) == (30, Severity.INFO)


@pytest.mark.parametrize(("carried", "expected"), [("yes", [31]), ("no", [])])
def test_retain_graph(carried: str, expected: list[int]) -> None:
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    for _ in range(2):
        forwards: list[Event] = []
        for _ in range(3):
            b.data()
            forwards = [*(forwards if carried == "yes" else []), b.forward(model)]
            b.add(Kind.LOSS)
            indices = tuple(forward.index for forward in forwards)
            b.add(Kind.BACKWARD, 31, forwards=indices, retains_graph=True, text="total.backward(retain_graph=True)")
        b.step(optimizer)
        b.zero(optimizer)
    assert lines(acc309, b.trace()) == expected


def fetched(how: str, k_name: str = "K") -> Trace:
    """`islice` and `fresh` start an iterator a window or a micro-batch, `outside` fetches once a window, `fixed` once a run."""
    texts = {"islice": "islice(loader, K)", "fresh": "next(iter(loader))", "source": "islice(source, K)"}
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    number = 0
    if how == "fixed":
        b.data(6)
    for window in range(3):
        outer = Turn(4, window)
        b.turns = (outer,)
        if how == "outside":
            b.add(Kind.DATA, 6, text="next(batches)", micro_batch=window, data=(window + 900,))
            b.micro_batch = window
        for turn in range(3):
            b.turns = (outer, Turn(7, turn, window, last=turn == 2))
            if how not in {"outside", "fixed"}:
                b.micro_batch += 1
                b.add(Kind.DATA, 7, text=texts.get(how, "batches"), micro_batch=b.micro_batch)
            number += 1
            if how in {"outside", "fixed"}:
                b.micro_batch = number  # a turn of the loop over K is a micro-batch, whatever data it takes
            data = {"outside": window, "fixed": 0, "fresh": 0, "islice": turn, "epochs": turn}.get(how, number)
            forward = b.add(Kind.FORWARD, model=model, data=(data + 900,))
            b.backward(forward, weight=DIVIDED)
        b.turns = (outer,)
        b.step(optimizer)
        b.zero(optimizer)
    b.fact("means-to-accumulate")
    return replace(b.trace(), accumulation=Accumulation(k_name, 3))


@pytest.mark.parametrize(("how", "line"), [("outside", 6), ("islice", 7), ("fresh", 7)])
def test_same_batch(how: str, line: int) -> None:
    assert lines(acc312, fetched(how)) == [line]


@pytest.mark.parametrize("how", ["fixed", "epochs", "source"])
def test_batches_are_fine(how: str) -> None:
    assert found(fetched(how)) == {}


def test_passes_on_purpose() -> None:
    assert lines(acc312, fetched("outside", "adv_steps")) == []


def skipped_step(*skipped: Kind, leaves: str = "branch", zero: str = "after", cause: str = "data") -> Trace:
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    guard = Guard(place(30), "not isfinite(norm)", cause)
    for window, turn in windows_of():
        b.turns = (Turn(5, 3 * window + turn),)
        b.data()
        if turn == 0 and zero == "top":
            b.zero(optimizer)
        b.backward(b.forward(model))
        if turn == 2:
            b.clip(model)
            b.skip("not isfinite(norm)", 30, *skipped, leaves=leaves, cause=cause)
            b.add(Kind.STEP, targets=(optimizer,), text="optimizer.step()", guards=(guard,))
            if zero in {"after", "both"}:
                b.add(Kind.ZERO, targets=(optimizer,), guards=(guard,))
            if zero == "both":
                b.zero(optimizer)
    return b.trace()


def test_skipped_window_is_not_cleared() -> None:
    assert lines(acc313, skipped_step(Kind.STEP, Kind.ZERO)) == [30]
    assert lines(acc313, skipped_step(Kind.STEP, Kind.ZERO, leaves="continue")) == [30]


@pytest.mark.parametrize(
    "trace",
    [
        skipped_step(Kind.STEP),
        skipped_step(Kind.STEP, Kind.ZERO, leaves="raise"),
        skipped_step(Kind.STEP, Kind.ZERO, leaves="break"),
        skipped_step(Kind.STEP, Kind.ZERO, zero="both"),
        skipped_step(Kind.STEP, Kind.ZERO, zero="top", leaves="continue"),
        skipped_step(Kind.STEP, Kind.ZERO, zero="never"),
        skipped_step(Kind.STEP, Kind.ZERO, cause="setting"),
    ],
)
def test_skipped_window_is_fine(trace: Trace) -> None:
    assert lines(acc313, trace) == []


def adversarial(
    order: str,
    *,
    zero_d: str = "end",
    cut: str = "no",
    names: tuple[str, str] = ("G", "netD"),
    text: str = "g_loss.backward()",
    fact: str = "",
) -> Trace:
    """`joint` steps both at the end of the window, `in turn` steps each right after its own backward on the boundary."""
    b = Builder()
    g, d = b.model(names[0]), b.model(names[1])
    opt_g, opt_d = b.optimizer(g, "opt_1"), b.optimizer(d, "opt_2")
    if fact:
        b.fact(fact)
    both = {g.uid} if cut == "yes" else {g.uid, d.uid}
    for _, turn in windows_of():
        last = turn == 2
        b.data()
        b.backward(b.forward(g), b.forward(d), line=40, reaches=both, text=text)
        if order == "in turn" and last:
            b.step(opt_g)
            b.zero(opt_g)
        if zero_d == "before own":
            b.zero(opt_d)
        b.backward(b.forward(d, 46), line=41, reaches={d.uid}, text="d_loss.backward()")
        if last:
            if order == "joint":
                b.step(opt_g)
                b.zero(opt_g)
            b.step(opt_d)
            b.zero(opt_d)
    return b.trace()


@pytest.mark.parametrize("order", ["joint", "in turn"])
def test_generator_leaks_into_the_discriminator(order: str) -> None:
    [finding] = codes(acc314, adversarial(order))
    assert finding.place.line == 40
    assert finding.confidence is Confidence.HIGH


@pytest.mark.parametrize(
    "trace",
    [
        adversarial("joint", cut="yes"),
        adversarial("in turn", cut="yes"),
        adversarial("in turn", zero_d="before own"),
        adversarial("joint", names=("encoder", "decoder")),
        adversarial("joint", text="g_loss.backward(inputs=list(G.parameters()))"),
    ],
)
def test_no_leak(trace: Trace) -> None:
    assert lines(acc314, trace) == []


def test_leak_is_not_sure_where_requires_grad_is_switched() -> None:
    [finding] = codes(acc314, adversarial("joint", fact="freezes"))
    assert finding.confidence is Confidence.MEDIUM


@pytest.mark.parametrize(("cleared", "expected"), [("no", [40]), ("yes", [])])
def test_optimizer_created_later(cleared: str, expected: list[int]) -> None:
    b = Builder()
    backbone, head = b.model("backbone"), b.model("head")
    first, second = b.optimizer(head, "opt_head"), b.optimizer(backbone, "opt_all")
    for phase, optimizer in enumerate((first, second)):
        if phase == 1 and cleared == "yes":
            b.zero(backbone)
        for _, turn in windows_of():
            b.data()
            b.backward(b.forward(backbone), line=40, reaches={backbone.uid, head.uid})
            if turn == 2:
                b.step(optimizer)
                b.zero(optimizer)
    found_ = codes(acc314, b.trace())
    assert [finding.place.line for finding in found_] == expected
    assert all(finding.confidence is Confidence.MEDIUM for finding in found_)


def hooked(*, gate: str = "no", options: str = "") -> Trace:
    b = Builder()
    b.fact("means-to-accumulate")
    model = b.model()
    optimizer = b.optimizer(model, "per_param[p]", options=options)
    for _, turn in windows_of():
        b.data()
        b.backward(b.forward(model), weight=DIVIDED)
        if gate == "no" or turn == 2:
            b.step(optimizer, 20, guards=(GATE,) if gate == "known" else (), options="hook")
            b.zero(optimizer, 21)
    return b.trace()


def test_boundary_that_was_not_understood() -> None:
    b = Builder()
    model = b.model()
    optimizer = b.optimizer(model)
    b.fact("means-to-accumulate")
    for _ in range(4):
        b.data()
        b.backward(b.forward(model))
        b.skip("self.every_n(runner)", 30, Kind.STEP, Kind.ZERO, leaves="branch")
        b.step(optimizer)
        b.zero(optimizer)
    assert lines(acc313, b.trace()) == []


def test_step_in_a_hook() -> None:
    assert lines(acc315, hooked()) == [20]


def test_step_in_a_hook_is_fine() -> None:
    assert lines(acc315, hooked(gate="known")) == []
    assert lines(acc315, hooked(gate="unseen")) == []
    assert lines(acc315, hooked(options="prepared")) == []
    assert lines(acc315, replace(hooked(), accumulation=Accumulation("K", 1))) == []


LOST = (Kind.BACKWARD, Kind.STEP, Kind.ZERO)


def skipping(
    *skipped: Kind,
    weight: Weight = DIVIDED,
    options: str = "",
    leaves: str = "continue",
    cause: str = "data",
    count: str = "no",
    level: str = "micro-batch",
    facts: tuple[str, ...] = (),
) -> Trace:
    b = Builder()
    for fact in facts:
        b.fact(fact)
    model = b.model()
    optimizer = b.optimizer(model)
    for window, turn in windows_of():
        b.turns = (Turn(4, window),)
        if level == "window" and turn == 0:
            b.skip("bad", 30, *skipped, leaves=leaves, cause=cause, options=options)
        b.turns = (Turn(4, window), Turn(5, turn, window))
        b.data()
        forward = b.forward(model)
        if count == "before":
            b.add(Kind.COUNT, 29)
        if level == "micro-batch":
            b.skip(
                "not isfinite(loss)",
                30,
                *(skipped if turn == 2 else (kind for kind in skipped if kind is not Kind.STEP)),
                leaves=leaves,
                cause=cause,
                options=options,
            )
        b.backward(forward, weight=weight)
        if turn == 2:
            b.step(optimizer)
            b.zero(optimizer)
    return b.trace()


def test_skip_with_a_fixed_divisor() -> None:
    [finding] = codes(acc319, skipping(*LOST))
    assert finding.place.line == 30
    assert "divided by `K`" in finding.message
    assert codes(acc319, skipping(Kind.BACKWARD, leaves="branch"))
    assert codes(acc319, skipping(Kind.BACKWARD, leaves="except", cause="memory"))


def test_skip_that_loses_the_step() -> None:
    [finding] = codes(acc319, skipping(*LOST, weight=Weight(())))
    assert "loses the step" in finding.message


def test_skip_after_the_count() -> None:
    weight = Weight((Factor(Quantity.GLOBAL_UNITS, -1, None, "total_tokens"),))
    [finding] = codes(acc319, skipping(Kind.BACKWARD, weight=weight, count="before"))
    assert "`total_tokens` still counts" in finding.message
    assert lines(acc319, skipping(Kind.BACKWARD, Kind.COUNT, weight=weight, count="before")) == []


@pytest.mark.parametrize(
    "trace",
    [
        skipping(*LOST, options="counted"),
        skipping(*LOST, options="cleared"),
        skipping(*LOST, leaves="raise"),
        skipping(*LOST, leaves="break"),
        skipping(*LOST, cause="rank"),
        skipping(*LOST, level="window"),
        skipping(Kind.STEP, Kind.ZERO),
    ],
)
def test_skip_is_fine(trace: Trace) -> None:
    assert lines(acc319, trace) == []


def test_restart_on_one_of_several_ranks_is_none() -> None:
    assert lines(acc319, skipping(*LOST, options="cleared", facts=("distributed",))) == [30]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_bare_events_do_no_harm(rule: Rule) -> None:
    events = tuple(Event(at, kind, place(at + 1), at // len(Kind)) for at, kind in enumerate([*Kind, *Kind]))
    assert list(rule.check(Trace("x.py", place(1), "f", events))) == []
