"""The rules of the window, ACC301 to ACC306, on traces written by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accumlint.findings import Confidence
from accumlint.rule import Rule
from accumlint.rules._boundary import Boundaries
from accumlint.rules.acc301_step_per_micro_batch import check as acc301
from accumlint.rules.acc302_zero_grad_inside_window import check as acc302
from accumlint.rules.acc303_zero_grad_missing import check as acc303
from accumlint.rules.acc304_clip_per_micro_batch import check as acc304
from accumlint.rules.acc305_schedule_per_micro_batch import check as acc305
from accumlint.rules.acc306_wrong_boundary import check as acc306
from accumlint.trace import Actor, Guard, Kind, Role, Trace, Turn, Wrapper
from accumlint.weight import Factor, Quantity, Weight

sys.path.insert(0, str(Path(__file__).parent))

from build import Builder, codes, lines, over_k, place

ALL = (acc301, acc302, acc303, acc304, acc305, acc306)
Turns = Callable[[Builder, int, int], None]


def gate(line: int = 30) -> tuple[Guard, ...]:
    return (Guard(place(line), "(i + 1) % K == 0", "gate"),)


def epochs(turn: Turns, *, batches: int = 7, count: int = 2, k: int = 3, builder: Builder | None = None) -> Builder:
    """Calls `turn(builder, i, epoch)` for every micro-batch of a loader loop inside an epoch loop."""
    builder = builder or Builder()
    for epoch in range(count):
        outer = Turn(4, epoch, last=epoch == count - 1)
        for i in range(batches):
            builder.turns = (outer, Turn(5, i, epoch, last=i == batches - 1))
            turn(builder, i, epoch)
        builder.turns = ()
    return builder


class Loop:
    """The usual loop: forward, backward, and an update where `ends` says so; hooks put more events in."""

    def __init__(self, *, k: int = 3, share: int | None = 3) -> None:
        self.build = Builder()
        self.k = k
        self.model = self.build.model()
        self.optimizer = self.build.optimizer(self.model)
        self.weight = Weight((over_k(share),)) if share else Weight()
        self.ends: Callable[[int], bool] = lambda i: (i + 1) % k == 0
        self.first: Callable[[int], object] = lambda i: None
        self.after: Callable[[int], object] = lambda i: None
        self.close: Callable[[int], object] = lambda i: None
        self.zeroes = True

    def turn(self, build: Builder, i: int, epoch: int) -> None:
        build.data()
        self.first(i)
        forward = build.forward(self.model)
        build.backward(forward, weight=self.weight, reaches={self.model.uid})
        self.after(i)
        if self.ends(i):
            build.step(self.optimizer, guards=gate())
            if self.zeroes:
                build.zero(self.optimizer, 40)
        self.close(i)

    def run(self, *, batches: int = 7) -> Trace:
        epochs(self.turn, batches=batches, builder=self.build)
        return self.build.trace(k=self.k)


def always(_: int) -> bool:
    return True


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("tail", [0, 1])
def test_a_right_loop_has_nothing(k: int, tail: int) -> None:
    trace = Loop(k=k, share=k).run(batches=2 * k + tail)
    assert all(not codes(rule, trace) for rule in ALL)


@pytest.mark.parametrize("rule", ALL)
def test_an_empty_trace_has_nothing(rule: Rule) -> None:
    assert not codes(rule, Builder().trace())


# ACC301


def test_a_step_in_every_micro_batch_of_a_divided_loss() -> None:
    loop = Loop()
    loop.ends = always
    loop.build.fact("means-to-accumulate")
    (finding,) = codes(acc301, loop.run())
    assert finding.place.line == place_of(finding.trace, Kind.STEP)
    assert "`K`" in finding.message


def place_of(trace: Trace | None, kind: Kind) -> int:
    assert trace is not None
    return trace.of(kind)[0].place.line


def test_a_step_in_every_micro_batch_of_a_whole_loss_is_plain_training() -> None:
    loop = Loop(share=None)
    loop.ends = always
    loop.build.fact("means-to-accumulate")
    assert not codes(acc301, loop.run())


def test_a_flag_that_toggles_means_to_accumulate() -> None:
    build = Builder()
    build.fact("means-to-accumulate")
    model = build.model()
    optimizer = build.optimizer(model)
    for i in range(6):
        build.data()
        build.backward(build.forward(model), sync=i % 3 == 2)
        build.step(optimizer, 33)
        build.zero(optimizer)
    assert lines(acc301, build.trace()) == [33]
    build.add(Kind.AVERAGE)
    assert not codes(acc301, build.trace())


@pytest.mark.parametrize("options", ["hook", "gated"])
def test_a_step_that_others_judge(options: str) -> None:
    build = Builder()
    build.fact("means-to-accumulate")
    model = build.model()
    optimizer = build.optimizer(model)
    for _ in range(4):
        build.data()
        build.backward(build.forward(model), weight=Weight((over_k(),)))
        build.step(optimizer, options=options)
        build.zero(optimizer)
    assert not codes(acc301, build.trace())


def test_one_backward_through_the_summed_losses() -> None:
    build = Builder()
    build.fact("means-to-accumulate")
    model = build.model()
    optimizer = build.optimizer(model)
    for _ in range(3):
        forwards = []
        for _ in range(3):
            build.data()
            forwards.append(build.forward(model))
        build.backward(*forwards, weight=Weight((over_k(),)))
        build.step(optimizer)
        build.zero(optimizer)
    assert not codes(acc301, build.trace())


def test_several_losses_that_share_a_division_are_one_micro_batch() -> None:
    build = Builder()
    build.fact("means-to-accumulate")
    model = build.model()
    optimizer = build.optimizer(model)
    for _ in range(4):
        build.data()
        for _ in range(3):
            build.backward(build.forward(model), weight=Weight((over_k(),)))
        build.step(optimizer)
        build.zero(optimizer)
    assert not codes(acc301, build.trace())


def test_one_task_steps_on_a_single_micro_batch() -> None:
    build = Builder()
    model = build.model()
    optimizer = build.optimizer(model)
    for i in range(6):
        build.data()
        for task in range(2):
            build.backward(build.forward(model), line=20 + task, weight=Weight((over_k(),)))
            if i % 3 == 2:
                build.step(optimizer, 30 + task)
                build.zero(optimizer)
    assert lines(acc301, build.trace()) == [31]


def test_the_second_accumulate_entry_of_a_micro_batch() -> None:
    build = Builder()
    build.fact("means-to-accumulate")
    for _ in range(3):
        build.data()
        build.sync_off(None, 20, options="context accumulate")
        build.sync_on(None, 20, options="context accumulate")
        build.sync_off(None, 25, options="context accumulate")
    assert lines(acc301, build.trace()) == [25]


def test_an_engines_own_division_is_named() -> None:
    loop = Loop()
    loop.weight = Weight((replace(over_k(), implicit=True, text="gradient_accumulation_steps"),))
    loop.ends = always
    loop.build.fact("means-to-accumulate")
    (finding,) = codes(acc301, loop.run())
    assert "the backward divides" in finding.message


def test_a_tail_divided_by_its_own_size_is_no_step_per_micro_batch() -> None:
    loop = Loop(share=None)
    loop.weight = Weight((over_k(1), Factor(Quantity.UNITS, -1)))
    loop.ends = always
    loop.build.fact("means-to-accumulate")
    assert not codes(acc301, loop.run())


# ACC302


def test_zero_at_the_top_of_every_micro_batch() -> None:
    loop = Loop()
    loop.zeroes = False
    loop.first = lambda i: loop.build.zero(loop.optimizer, 50)
    assert lines(acc302, loop.run(batches=6)) == [50]
    assert not codes(acc303, loop.build.trace())


def test_zero_in_the_last_micro_batch_only() -> None:
    loop = Loop()
    loop.first = lambda i: (i + 1) % 3 or loop.build.zero(loop.optimizer, 50)
    assert lines(acc302, loop.run()) == [50]


def test_zero_between_the_last_backward_and_the_step() -> None:
    loop = Loop()
    loop.zeroes = False
    loop.after = lambda i: (i + 1) % 3 or loop.build.zero(loop.optimizer, 50)
    (finding,) = codes(acc302, loop.run())
    assert finding.place.line == 50
    assert "between the backward and the step" in finding.message


def test_zero_that_opens_the_window() -> None:
    loop = Loop()
    loop.zeroes = False
    loop.first = lambda i: i % 3 or loop.build.zero(loop.optimizer, 50)
    trace = loop.run()
    assert not codes(acc302, trace)
    assert not codes(acc303, trace)


def test_zero_of_an_epochs_leftovers() -> None:
    loop = Loop()
    loop.zeroes = False
    loop.first = lambda i: i % 3 or loop.build.zero(loop.optimizer, 50)
    assert not codes(acc302, loop.run(batches=8))


def test_zero_in_the_micro_loop_and_before_it() -> None:
    def run(inside: bool) -> Trace:
        build = Builder()
        model = build.model()
        optimizer = build.optimizer(model)
        for outer in range(2):
            build.turns = (Turn(4, outer),)
            if not inside:
                build.zero(optimizer, 50)
            for micro in range(3):
                build.turns = (Turn(4, outer), Turn(5, micro, outer, last=micro == 2))
                build.data()
                if inside:
                    build.zero(optimizer, 50)
                build.backward(build.forward(model))
            build.turns = (Turn(4, outer),)
            build.step(optimizer)
        return build.trace()

    assert lines(acc302, run(inside=True)) == [50]
    assert not codes(acc302, run(inside=False))


def test_a_probe_on_the_same_micro_batch_is_meant() -> None:
    loop = Loop()

    def probe(i: int) -> None:
        if i % 3 == 0:
            loop.build.backward(loop.build.forward(loop.model), line=60)
            loop.build.zero(loop.optimizer, 61)

    loop.first = probe
    assert not codes(acc302, loop.run())


def test_a_probe_on_data_of_its_own_is_meant() -> None:
    loop = Loop()

    def probe(i: int) -> None:
        if i % 3 == 0:
            loop.build.backward(loop.build.forward(loop.model), line=60)
            loop.build.zero(loop.optimizer, 61)
            loop.build.data()

    loop.first = probe
    assert not codes(acc302, loop.run())


def test_two_bodies_of_which_one_is_always_cleared() -> None:
    loop = Loop()
    loop.first = lambda i: loop.build.zero(loop.optimizer, 50)
    epochs(loop.turn, builder=loop.build)
    trace = loop.build.trace()
    events = tuple(
        replace(one, place=place(80)) if one.kind is Kind.BACKWARD and one.turns[-1].index % 3 == 2 else one for one in trace.events
    )
    assert lines(acc302, replace(trace, events=events)) == [50]


def test_an_attack_clears_between_its_passes() -> None:
    loop = Loop()

    def attack(i: int) -> None:
        outer = loop.build.turns
        for turn in range(2):
            loop.build.turns = (*outer, Turn(70, turn, i))
            loop.build.zero(loop.optimizer, 71)
            loop.build.backward(loop.build.forward(loop.model), line=72)
        loop.build.turns = outer

    loop.after = attack
    assert not codes(acc302, loop.run())


def test_two_losses_with_a_zero_between_them() -> None:
    loop = Loop()

    def second(i: int) -> None:
        loop.build.zero(loop.optimizer, 71)
        loop.build.backward(loop.build.forward(loop.model), line=72)

    loop.after = second
    assert lines(acc302, loop.run()) == [71]


@pytest.mark.parametrize("option", ["gated", "copied"])
def test_a_zero_without_loss_is_silent(option: str) -> None:
    loop = Loop()
    loop.first = lambda i: loop.build.add(Kind.ZERO, 50, targets=(loop.optimizer,), options=frozenset({option}))
    assert not codes(acc302, loop.run())


def test_a_zero_on_bad_data_is_silent() -> None:
    loop = Loop()
    bad = (Guard(place(49), "loss.isnan()", "data"),)
    loop.after = lambda i: loop.build.add(Kind.ZERO, 50, targets=(loop.optimizer,), guards=bad)
    assert not codes(acc302, loop.run())


def test_an_unknown_call_that_may_step_lowers_the_confidence() -> None:
    loop = Loop()

    def after(i: int) -> None:
        loop.build.add(Kind.OPAQUE, 51, targets=(loop.optimizer,))
        loop.build.zero(loop.optimizer, 52)

    loop.after = after
    (finding,) = codes(acc302, loop.run())
    assert finding.confidence is Confidence.MEDIUM


# Two optimizers


def adversarial(*, detached: bool, unknown: bool = False) -> Trace:
    """A discriminator and a generator that step in every turn, without accumulation."""
    build = Builder()
    generator, critic = build.model("generator"), build.model("critic")
    opt_g, opt_d = build.optimizer(generator, "opt_g"), build.optimizer(critic, "opt_d")

    def turn(build: Builder, i: int, epoch: int) -> None:
        build.data()
        build.zero(opt_d, 20)
        build.backward(build.forward(critic), line=21, reaches=() if unknown else {critic.uid})
        build.clip(critic, 22) if not unknown else build.add(Kind.CLIP, 22)
        build.step(opt_d, 23)
        build.zero(opt_g, 24)
        both = {generator.uid} if detached else {generator.uid, critic.uid}
        build.backward(build.forward(generator), line=25, reaches=() if unknown else both)
        build.clip(generator, 26) if not unknown else build.add(Kind.CLIP, 26)
        build.step(opt_g, 27)
        build.add(Kind.SCHEDULE, 28, text="sched_d.step()")

    epochs(turn, builder=build)
    build.fact("means-to-accumulate")
    return build.trace()


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("unknown", [True, False])
@pytest.mark.parametrize("rule", ALL)
def test_two_models_that_take_turns_have_nothing(rule: Rule, detached: bool, unknown: bool) -> None:
    assert not codes(rule, adversarial(detached=detached, unknown=unknown))


def test_each_backward_belongs_to_its_own_step() -> None:
    build = Builder()
    first, second = build.model("a"), build.model("b")
    opt_a, opt_b = build.optimizer(first, "opt_a"), build.optimizer(second, "opt_b")
    for i in range(6):
        build.data()
        build.backward(build.forward(first), line=20)
        if i % 3 == 2:
            build.step(opt_a, 21)
        build.backward(build.forward(second), line=22)
        if i % 3 == 2:
            build.step(opt_b, 23)
    trace = build.trace()
    view = Boundaries(trace)
    for optimizer, line in ((opt_a, 20), (opt_b, 22)):
        for window in trace.windows(optimizer):
            assert {one.place.line for one in view.own(window)} == {line}
            assert view.size(window) == 3


def test_a_backward_through_a_wrapper_reaches_the_optimizer_of_the_raw_module() -> None:
    build = Builder()
    model = build.model(wrapper=Wrapper.DDP)
    optimizer = build.optimizer(model)
    build.data()
    backward = build.backward(build.forward(model), reaches={model.uid})
    zero = build.zero(model)
    build.step(optimizer)
    view = Boundaries(build.trace())
    assert view.reaches(backward, optimizer)
    assert view.acts_on(zero, optimizer)


# ACC303


def without_zero(build: Builder, optimizer: Actor, model: Actor, *, options: str = "", zero: Actor | None = None) -> Trace:
    if zero is not None:
        build.zero(zero, 8)
    for _ in range(3):
        build.data()
        build.backward(build.forward(model))
        build.step(optimizer, 33, options=options)
    return build.trace(k=None)


def test_no_zero_in_a_loop_without_accumulation() -> None:
    build = Builder()
    model = build.model()
    assert lines(acc303, without_zero(build, build.optimizer(model), model)) == [33]


@pytest.mark.parametrize("options", ["engine", "zeroes", "dist-autograd"])
def test_a_step_that_clears_by_itself(options: str) -> None:
    build = Builder()
    model = build.model()
    assert not codes(acc303, without_zero(build, build.optimizer(model), model, options=options))


def test_a_step_that_says_zero_grad() -> None:
    build = Builder()
    model = build.model()
    optimizer = build.optimizer(model, "optimizer.second_step(zero_grad=True)")
    assert not codes(acc303, without_zero(build, optimizer, model))


def test_an_optimizer_known_by_name_only() -> None:
    build = Builder()
    model = build.model()
    unseen = replace(build.optimizer(model), known=False)
    (finding,) = codes(acc303, without_zero(build, unseen, model))
    assert finding.confidence is Confidence.MEDIUM
    build = Builder()
    (finding,) = codes(acc303, without_zero(build, unseen, model, zero=unseen))
    assert finding.confidence is Confidence.HIGH


def test_an_unknown_call_that_may_clear() -> None:
    loop = Loop()
    loop.zeroes = False
    loop.close = lambda i: loop.build.add(Kind.OPAQUE, 51, targets=(loop.optimizer,))
    (finding,) = codes(acc303, loop.run())
    assert finding.confidence is Confidence.MEDIUM


def test_a_zero_of_the_model_counts() -> None:
    loop = Loop()
    loop.zeroes = False
    loop.first = lambda i: i % 3 or loop.build.zero(loop.model, 50)
    assert not codes(acc303, loop.run(batches=6))


# ACC304


@pytest.mark.parametrize("target", ["model", "optimizer", "unknown"])
def test_a_clip_in_every_micro_batch(target: str) -> None:
    loop = Loop()

    def after(i: int) -> None:
        targets = {"model": (loop.model,), "optimizer": (loop.optimizer,), "unknown": ()}[target]
        loop.build.add(Kind.CLIP, 50, targets=targets, text="clip_grad_norm_(model.parameters(), 1.0)")

    loop.after = after
    assert lines(acc304, loop.run()) == [50]


def test_a_clip_at_the_boundary() -> None:
    loop = Loop()
    loop.after = lambda i: (i + 1) % 3 or loop.build.clip(loop.model, 50)
    assert not codes(acc304, loop.run())


def test_a_clip_before_the_last_backward() -> None:
    loop = Loop()
    loop.first = lambda i: (i + 1) % 3 or loop.build.clip(loop.model, 50)
    assert lines(acc304, loop.run()) == [50]


@pytest.mark.parametrize("option", ["delay-unscale", "norm-only", "gated"])
def test_a_harmless_clip(option: str) -> None:
    loop = Loop()
    loop.after = lambda i: loop.build.add(Kind.CLIP, 50, targets=(loop.model,), options=frozenset({option}))
    assert not codes(acc304, loop.run())


def test_a_clip_of_gradients_that_are_cleared_at_once() -> None:
    loop = Loop()

    def after(i: int) -> None:
        loop.build.clip(loop.model, 50)
        if (i + 1) % 3:
            loop.build.zero(loop.optimizer, 51)

    loop.after = after
    assert not codes(acc304, loop.run())


def test_a_clip_of_another_model() -> None:
    loop = Loop()
    other = loop.build.model("critic")
    loop.after = lambda i: loop.build.clip(other, 50)
    assert not codes(acc304, loop.run())


# ACC305


def schedule(loop: Loop, *, options: str = "", targets: tuple[Actor, ...] = ()) -> None:
    loop.build.add(Kind.SCHEDULE, 60, text="scheduler.step()", options=frozenset(options.split()), targets=targets)


@pytest.mark.parametrize("k", [2, 3])
def test_a_schedule_that_advances_in_every_micro_batch(k: int) -> None:
    loop = Loop(k=k, share=k)
    loop.close = lambda i: schedule(loop)
    assert lines(acc305, loop.run()) == [60]


def test_a_schedule_at_the_boundary_several_times() -> None:
    loop = Loop()
    loop.close = lambda i: (i + 1) % 3 or [schedule(loop) for _ in range(3)]
    assert not codes(acc305, loop.run())


@pytest.mark.parametrize("options", ["absolute", "prepared", "gated", "horizon-in-micro-batches"])
def test_a_schedule_that_is_right_in_every_micro_batch(options: str) -> None:
    loop = Loop()
    loop.close = lambda i: schedule(loop, options=options)
    assert not codes(acc305, loop.run())


def test_a_schedule_beside_plain_training() -> None:
    loop = Loop()
    loop.ends = always
    loop.build.fact("means-to-accumulate")
    loop.close = lambda i: schedule(loop)
    assert not codes(acc305, loop.run())


def test_a_schedule_of_another_optimizer() -> None:
    loop = Loop()
    other = loop.build.model("critic")
    opt_d = loop.build.optimizer(other, "opt_d")

    def first(i: int) -> None:
        loop.build.backward(loop.build.forward(other), line=70, reaches={other.uid})
        loop.build.step(opt_d, 71)
        loop.build.zero(opt_d, 72)
        schedule(loop)

    loop.first = first
    assert not codes(acc305, loop.run())


def test_a_schedule_once_an_epoch_over_windows_longer_than_epochs() -> None:
    build = Builder()
    model = build.model()
    optimizer = build.optimizer(model)
    for epoch in range(6):
        for i in range(2):
            build.turns = (Turn(4, epoch), Turn(5, i, epoch))
            build.data()
            build.backward(build.forward(model))
            if (2 * epoch + i + 1) % 6 == 0:
                build.step(optimizer)
        build.turns = (Turn(4, epoch),)
        build.add(Kind.SCHEDULE, 60, text="scheduler.step()")
    assert not codes(acc305, build.trace())


def test_a_scheduler_whose_construction_was_not_seen() -> None:
    loop = Loop()
    unseen = loop.build.actor("scheduler", Role.SCHEDULER, known=False)
    loop.close = lambda i: schedule(loop, targets=(unseen,))
    (finding,) = codes(acc305, loop.run())
    assert finding.confidence is Confidence.MEDIUM


# ACC306


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_test_on_the_wrong_counter(k: int, shift: int) -> None:
    """`i % K` from zero, and `(i + 1) % K` on a counter from one (the same where K is 2)."""
    loop = Loop(k=k, share=k)
    loop.ends = (lambda i: i % k == 0) if shift == 0 else (lambda i: (i + 2) % k == 0)
    assert lines(acc306, loop.run(batches=2 * k + 1)) == [30]


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("tail", [0, 1])
def test_an_inverted_test(k: int, tail: int) -> None:
    loop = Loop(k=k, share=k)
    loop.ends = lambda i: (i + 1) % k != 0
    (finding,) = codes(acc306, loop.run(batches=2 * k + tail))
    assert finding.place.line == 30
    assert k == 2 or "inverted" in finding.message


def test_a_counter_that_only_its_own_test_advances() -> None:
    loop = Loop()
    loop.build.fact("means-to-accumulate")
    once = iter([True])
    loop.ends = lambda i: next(once, False)
    (finding,) = codes(acc306, loop.run())
    assert "never again" in finding.message


def test_a_window_that_grows_over_a_warm_up() -> None:
    loop = Loop()
    loop.ends = lambda i: i in {0, 2, 5, 8}
    assert not codes(acc306, loop.run(batches=9))


def test_a_flushed_tail_is_not_a_wrong_start() -> None:
    loop = Loop()
    loop.ends = lambda i: (i + 1) % 3 == 0 or i == 6
    assert not codes(acc306, loop.run())


def test_a_step_before_any_backward() -> None:
    loop = Loop()
    loop.ends = lambda i: False

    def first(i: int) -> None:
        if i % 3 == 0:
            loop.build.step(loop.optimizer, 33)
            loop.build.zero(loop.optimizer)

    loop.first = first
    assert not codes(acc306, loop.run())


def test_an_optimizer_that_never_stepped_and_is_made_anew_leaves_nothing() -> None:
    build = Builder()
    model = build.model()
    build.fact("means-to-accumulate")
    for steps in (False, True):
        optimizer = build.optimizer(model)
        for _ in range(3):
            build.data()
            build.zero(optimizer, 40)
            build.backward(build.forward(model))
            build.clip(model)
            if steps:
                build.step(optimizer)
    trace = build.trace(k=None)
    assert not list(acc304.check(trace))
    assert [len(window.backwards) for window in trace.windows(optimizer)] == [1, 1, 1]
