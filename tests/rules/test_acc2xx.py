"""The rules on normalisation, on traces written by hand."""

from __future__ import annotations

import importlib.util
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

from accumlint.findings import Confidence, Severity
from accumlint.rule import Rule
from accumlint.rules.acc201_mean_of_means import check as acc201
from accumlint.rules.acc202_unnormalised_accumulation import check as acc202
from accumlint.rules.acc203_missing_world_size import check as acc203
from accumlint.rules.acc204_local_denominator import check as acc204
from accumlint.rules.acc205_tail_divided_by_k import check as acc205
from accumlint.rules.acc206_double_normalised import check as acc206
from accumlint.rules.acc207_counts_inputs import check as acc207
from accumlint.rules.acc208_unguarded_zero_denominator import check as acc208
from accumlint.rules.acc212_extra_world_size import check as acc212
from accumlint.rules.acc215_divisor_is_not_k import check as acc215
from accumlint.trace import Actor, Kind, Trace, Turn, Wrapper
from accumlint.weight import Factor, Quantity, Weight


def _sibling(name: str) -> ModuleType:
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"rules_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = _sibling("build")
Builder, MEAN, lines, codes, place = build.Builder, build.MEAN, build.lines, build.codes, build.place

RULES = (acc201, acc202, acc203, acc204, acc205, acc206, acc207, acc208, acc212, acc215)
BACKWARD, LOSS, STEP = 14, 12, 16


def factor(quantity: Quantity, power: int = -1, value: int | None = None, *, line: int = 0, text: str = "", **more: object) -> Factor:
    number = None if value is None else Fraction(value)
    where = place(line) if line else None
    return Factor(quantity, power, number, text, where, **more)  # type: ignore[arg-type]


def over_k(value: int = 3, *, line: int = 13, text: str = "args.accum", **more: object) -> Factor:
    return factor(Quantity.ACCUMULATION, -1, value, line=line, text=text, **more)


ENGINE = over_k(line=0, text="", implicit=True)
BY_MICRO = factor(Quantity.UNITS, line=13, text="n")
BY_RANK = factor(Quantity.WINDOW_UNITS, line=13, text="count")
BY_ALL = factor(Quantity.GLOBAL_UNITS, line=13, text="total")
BY_INPUTS = factor(Quantity.INPUTS, line=13, text="mask.sum()")
WORLD = factor(Quantity.WORLD, 1, line=13, text="world_size")
UNKNOWN = factor(Quantity.UNKNOWN, line=13, text="scale")


class Loop:
    """Plain windows; `sizes` are their numbers of micro-batches, each size a pass of its own over the data if `passes`."""

    def __init__(self, *weights: Weight, k: int = 3, wrapper: Wrapper = Wrapper.NONE, options: str = "") -> None:
        self.k = k
        self.builder = Builder()
        self.model: Actor = self.builder.model(wrapper=wrapper, options=options)
        self.optimizer: Actor = self.builder.optimizer(self.model)
        self.weights = weights

    def micro(self, *, last: bool = False, index: int = 0) -> None:
        self.builder.turns = (Turn(10, index, last=last),)
        self.builder.data(10)
        forward = self.builder.forward(self.model, 11)
        for at, weight in enumerate(self.weights):
            self.builder.add(Kind.LOSS, LOSS + 20 * at, text="cross_entropy(logits, y)")
            self.builder.backward(forward, line=BACKWARD + 20 * at, weight=weight)

    def update(self, *scalings: Factor) -> None:
        for each in scalings:
            self.builder.normalize(self.optimizer, each, 15)
        self.builder.step(self.optimizer, STEP)
        self.builder.zero(self.optimizer, 17)

    def windows(self, *sizes: int, scaling: Factor | None = None) -> Loop:
        for number, size in enumerate(sizes):
            for index in range(size):
                self.micro(last=number == len(sizes) - 1 and index == size - 1, index=index)
            self.update(*(() if scaling is None else (scaling,)))
        return self

    def trace(self, *facts: str) -> Trace:
        for fact in facts:
            self.builder.fact(fact, fact)
        trace: Trace = self.builder.trace(k=self.k)
        return trace


def plain(*factors: Factor, facts: tuple[str, ...] = (), wrapper: Wrapper = Wrapper.NONE, options: str = "", **more: bool) -> Trace:
    """Two windows of three micro-batches whose loss has these factors."""
    return Loop(Weight(factors, **more), wrapper=wrapper, options=options).windows(3, 3).trace(*facts)


ALL_FACTS = ("varying-units", "ignored-targets", "may-lose-targets")


@pytest.mark.parametrize(
    ("factors", "wrapper"),
    [
        pytest.param((BY_ALL, WORLD), Wrapper.DDP, id="sum times world over the targets of all ranks"),
        pytest.param((MEAN, factor(Quantity.UNITS, 1, text="n"), BY_RANK), Wrapper.NONE, id="mean times own count over the window's"),
    ],
)
def test_right_normalisations_are_silent(factors: tuple[Factor, ...], wrapper: Wrapper) -> None:
    trace = plain(*factors, facts=("varying-units", "ignored-targets"), wrapper=wrapper)
    assert [rule.code for rule in RULES if codes(rule, trace)] == []


@pytest.mark.parametrize("wrapper", [Wrapper.NONE, Wrapper.DDP, Wrapper.FSDP2])
def test_a_mean_over_k_is_right_where_the_count_is_fixed(wrapper: Wrapper) -> None:
    trace = plain(MEAN, over_k(), facts=("ignored-targets", "may-lose-targets"), wrapper=wrapper)
    assert [rule.code for rule in RULES if codes(rule, trace)] == []


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_said_of_a_weight_that_is_not_there(rule: Rule) -> None:
    loop = Loop(Weight()).windows(3, 3)
    for event in list(loop.builder.events):
        loop.builder.events[event.index] = build.replace(event, weight=None, turns=())
    assert codes(rule, loop.trace(*ALL_FACTS)) == []


class TestMeanOfMeans:
    def test_is_reported_at_the_division(self) -> None:
        assert lines(acc201, plain(MEAN, over_k(), facts=("varying-units",))) == [13]

    def test_of_a_masked_mean_by_hand(self) -> None:
        assert lines(acc201, plain(BY_MICRO, over_k(), facts=("varying-units",))) == [13]

    def test_is_reported_where_the_gradients_are_divided(self) -> None:
        loop = Loop(Weight((MEAN,))).windows(3, 3, scaling=over_k(line=15))
        assert lines(acc201, loop.trace("varying-units")) == [15]

    def test_of_an_engine_is_an_info_at_the_loss(self) -> None:
        found = list(acc201.check(plain(MEAN, ENGINE, facts=("varying-units",))))
        assert {(one.place.line, one.severity) for one in found} == {(LOSS, Severity.INFO)}

    @pytest.mark.parametrize(
        "trace",
        [
            pytest.param(plain(MEAN, over_k()), id="no evidence"),
            pytest.param(plain(MEAN, facts=("varying-units",)), id="undivided"),
            pytest.param(plain(over_k(), facts=("varying-units",)), id="a sum"),
            pytest.param(plain(BY_MICRO, MEAN, over_k(), facts=("varying-units",)), id="a mean for each sequence"),
            pytest.param(plain(MEAN, UNKNOWN, over_k(), facts=("varying-units",)), id="unknown factor"),
            pytest.param(plain(MEAN, over_k(), facts=("varying-units",), known=False), id="unfollowed loss"),
        ],
    )
    def test_is_silent(self, trace: Trace) -> None:
        assert codes(acc201, trace) == []


class TestUnnormalisedAccumulation:
    def test_is_reported_at_the_backward(self) -> None:
        assert lines(acc202, plain(MEAN)) == [BACKWARD]

    def test_the_size_of_a_scalar_divides_nothing(self) -> None:
        assert lines(acc202, plain(MEAN, over_k(1, text="loss.numel()"))) == [BACKWARD]

    @pytest.mark.parametrize(("of", "expected"), [("1", [BACKWARD]), ("", [])])
    def test_weights_that_come_with_the_data_are_no_division(self, of: str, expected: list[int]) -> None:
        assert lines(acc202, plain(factor(Quantity.UNKNOWN, 1, text="weights", of=of), MEAN)) == expected

    def test_of_the_second_loss_only(self) -> None:
        loop = Loop(Weight((MEAN, over_k())), Weight((MEAN,))).windows(3, 3)
        assert lines(acc202, loop.trace()) == [BACKWARD + 20]

    def test_of_a_sum_of_losses_with_one_backward(self) -> None:
        assert lines(acc202, _one_backward(losses=3)) == [40]

    def test_is_silent_for_one_joint_loss(self) -> None:
        assert codes(acc202, _one_backward(losses=1)) == []

    def test_is_less_sure_after_an_unknown_call(self) -> None:
        loop = Loop(Weight((MEAN,)))
        for index in range(3):
            loop.micro(index=index)
        loop.builder.add(Kind.OPAQUE, 15, targets=(loop.optimizer,))
        loop.update()
        assert [one.confidence for one in codes(acc202, loop.trace())] == [Confidence.MEDIUM]

    def test_is_silent_where_gradients_are_divided_later(self) -> None:
        loop = Loop(Weight((MEAN,))).windows(3, 3, scaling=over_k(line=15))
        assert codes(acc202, loop.trace()) == []

    def test_is_silent_where_gradients_are_zeroed_inside(self) -> None:
        loop = Loop(Weight((MEAN,)))
        for index in range(3):
            loop.builder.zero(loop.optimizer, 9)
            loop.micro(index=index)
        loop.update()
        assert codes(acc202, loop.trace()) == []

    @pytest.mark.parametrize(
        "trace",
        [
            pytest.param(plain(), id="a sum"),
            pytest.param(plain(MEAN, ENGINE), id="engine"),
            pytest.param(plain(MEAN, facts=("sum-convention",)), id="convention"),
            pytest.param(plain(MEAN, facts=("replays-features",)), id="replay"),
            pytest.param(plain(MEAN, known=False), id="unfollowed loss"),
            pytest.param(plain(MEAN, mixed=True), id="mixed terms"),
            pytest.param(plain(MEAN, factor(Quantity.CONSTANT, -1, 4)), id="divided by a number"),
            pytest.param(plain(MEAN, wrapper=Wrapper.DDP, options="comm-hook"), id="communication hook"),
        ],
    )
    def test_is_silent(self, trace: Trace) -> None:
        assert codes(acc202, trace) == []


def _one_backward(losses: int) -> Trace:
    builder = Builder()
    model = builder.model()
    optimizer = builder.optimizer(model)
    forwards = []
    for number in range(3):
        builder.data(10)
        forwards.append(builder.forward(model, 11))
        if number >= 3 - losses:
            builder.add(Kind.LOSS, 12)
    builder.backward(*forwards, line=40, weight=Weight((MEAN,)))
    builder.step(optimizer, 41)
    builder.fact("means-to-accumulate")
    trace: Trace = builder.trace()
    return trace


class TestRanks:
    """ACC203, ACC204 and ACC212: what the averaging of the ranks asks of the loss."""

    def test_a_global_count_needs_the_world_size(self) -> None:
        assert lines(acc203, plain(BY_ALL, wrapper=Wrapper.DDP)) == [13]

    def test_the_world_size_may_come_to_the_gradients(self) -> None:
        loop = Loop(Weight((BY_ALL,)), wrapper=Wrapper.FSDP2).windows(3, 3, scaling=WORLD)
        assert codes(acc203, loop.trace()) == []

    @pytest.mark.parametrize(
        "trace",
        [
            pytest.param(plain(BY_ALL), id="no wrapper"),
            pytest.param(plain(BY_ALL, wrapper=Wrapper.UNKNOWN), id="unknown wrapper"),
            pytest.param(plain(BY_ALL, wrapper=Wrapper.FSDP2, options="no-averaging"), id="averaging off"),
            pytest.param(plain(BY_ALL, wrapper=Wrapper.DDP, facts=("manual-reduce",)), id="reduced by hand"),
            pytest.param(plain(BY_ALL, WORLD, wrapper=Wrapper.DDP), id="right"),
            pytest.param(plain(MEAN, over_k(), wrapper=Wrapper.DDP), id="a mean"),
        ],
    )
    def test_203_is_silent(self, trace: Trace) -> None:
        assert codes(acc203, trace) == []

    def test_a_local_count_is_reported_where_it_divides(self) -> None:
        assert lines(acc204, plain(BY_RANK, wrapper=Wrapper.DDP, facts=("varying-units",))) == [13]

    def test_204_is_silent(self) -> None:
        assert codes(acc204, plain(BY_RANK, wrapper=Wrapper.DDP)) == []
        assert codes(acc204, plain(BY_RANK, facts=("varying-units",))) == []
        assert codes(acc204, plain(BY_ALL, WORLD, wrapper=Wrapper.DDP, facts=("varying-units",))) == []

    @pytest.mark.parametrize("power", [1, -1])
    def test_a_mean_needs_no_world_size(self, power: int) -> None:
        extra = factor(Quantity.WORLD, power, line=8, text="world")
        assert lines(acc212, plain(MEAN, over_k(), extra, wrapper=Wrapper.DDP)) == [8]

    def test_a_global_count_takes_it_once(self) -> None:
        second = factor(Quantity.WORLD, 1, line=9, text="world_size")
        assert lines(acc212, plain(BY_ALL, WORLD, second, wrapper=Wrapper.DDP)) == [9]

    @pytest.mark.parametrize(
        "trace",
        [
            pytest.param(plain(MEAN, over_k(), WORLD), id="no wrapper"),
            pytest.param(plain(WORLD, wrapper=Wrapper.DDP), id="a sum"),
            pytest.param(plain(MEAN, WORLD, wrapper=Wrapper.DDP, known=False), id="unfollowed loss"),
            pytest.param(plain(MEAN, WORLD, wrapper=Wrapper.DDP, mixed=True), id="mixed terms"),
            pytest.param(plain(BY_RANK, WORLD, wrapper=Wrapper.DDP, facts=("varying-units",)), id="ACC204 says it"),
            pytest.param(plain(MEAN, over_k(), WORLD, wrapper=Wrapper.DDP, facts=("manual-reduce",)), id="reduced by hand"),
        ],
    )
    def test_212_is_silent(self, trace: Trace) -> None:
        assert codes(acc212, trace) == []


class TestTail:
    @pytest.mark.parametrize("k", [2, 3])
    def test_a_short_last_window_is_reported_at_the_division(self, k: int) -> None:
        loop = Loop(Weight((MEAN, over_k(k))), k=k).windows(k, k, 1)
        assert lines(acc205, loop.trace()) == [13]

    def test_a_loss_that_was_not_followed_counts_as_a_mean(self) -> None:
        loop = Loop(Weight((over_k(),), known=False)).windows(3, 3, 1)
        assert lines(acc205, loop.trace()) == [13]

    def test_a_first_short_window_is_another_mistake(self) -> None:
        assert codes(acc205, Loop(Weight((MEAN, over_k()))).windows(1, 3, 3).trace()) == []

    def test_the_real_size_is_right(self) -> None:
        loop = Loop(Weight((MEAN, over_k()))).windows(3, 3)
        loop.weights = (Weight((MEAN, over_k(1, text="len(group)"))),)
        loop.windows(1)
        assert codes(acc205, loop.trace()) == []
        assert codes(acc215, loop.trace()) == []

    @pytest.mark.parametrize(
        "weight",
        [
            pytest.param(Weight((MEAN, ENGINE)), id="the framework divides"),
            pytest.param(Weight((over_k(),)), id="a sum"),
            pytest.param(Weight((BY_RANK,)), id="the window's count"),
            pytest.param(Weight((MEAN,)), id="undivided"),
        ],
    )
    def test_is_silent(self, weight: Weight) -> None:
        assert codes(acc205, Loop(weight).windows(3, 3, 1).trace()) == []


class TestDoubleNormalised:
    @pytest.mark.parametrize(
        "factors",
        [
            pytest.param((MEAN, over_k(line=12), over_k(line=13)), id="K twice by hand"),
            pytest.param((MEAN, over_k(line=13), ENGINE), id="by hand and by the engine"),
            pytest.param((BY_RANK, ENGINE), id="the window's count given to an engine"),
            pytest.param((BY_RANK, over_k(line=13)), id="the window's count and K"),
            pytest.param((over_k(line=12), over_k(line=13)), id="K twice on a sum"),
            pytest.param((MEAN, BY_ALL), id="a mean and the window's count"),
        ],
    )
    def test_is_reported_at_the_division_that_is_too_many(self, factors: tuple[Factor, ...]) -> None:
        assert lines(acc206, plain(*factors)) == [13]

    def test_a_division_in_a_loop_over_the_parameters_counts_once(self) -> None:
        loop = Loop(Weight((MEAN,)))
        for _ in range(2):
            for index in range(3):
                loop.micro(index=index)
            loop.update(over_k(line=15), over_k(line=15))
        assert codes(acc206, loop.trace()) == []

    def test_in_the_loss_and_in_the_gradients(self) -> None:
        loop = Loop(Weight((MEAN, over_k()))).windows(3, 3, scaling=over_k(line=15))
        assert lines(acc206, loop.trace()) == [15]

    @pytest.mark.parametrize(
        "factors",
        [
            pytest.param((MEAN, ENGINE), id="the engine alone"),
            pytest.param((BY_RANK, factor(Quantity.ACCUMULATION, 1, 3, text="K"), ENGINE), id="undone"),
            pytest.param((MEAN, over_k(root="accum"), over_k(root="tasks")), id="two settings"),
            pytest.param((MEAN, over_k(3), over_k(5)), id="two numbers"),
            pytest.param((BY_MICRO, BY_RANK), id="a mean for each sequence over the number of sequences"),
            pytest.param((MEAN, over_k(), over_k(1)), id="K of 1"),
            pytest.param((MEAN, over_k(line=13), over_k(line=13)), id="one division that an earlier turn went through"),
        ],
    )
    def test_is_silent(self, factors: tuple[Factor, ...]) -> None:
        assert codes(acc206, plain(*factors)) == []


class TestCounts:
    """ACC207 and ACC208: what the denominator counts."""

    def test_inputs_are_reported_at_the_division(self) -> None:
        assert lines(acc207, plain(BY_INPUTS, facts=("ignored-targets",))) == [13]

    def test_inputs_are_reported_where_they_are_counted(self) -> None:
        """The count of the first window tells where that of the second, which the trace does not show, stands too."""
        loop = Loop(Weight((factor(Quantity.INPUTS, line=13, root="tokens"),)))
        loop.builder.add(Kind.COUNT, 5, weight=Weight((factor(Quantity.INPUTS, 1, root="tokens"),)))
        loop.builder.add(Kind.COUNT, 6, weight=Weight((factor(Quantity.INPUTS, 1, root="seen"),)))
        assert lines(acc207, loop.windows(3, 3).trace("ignored-targets")) == [5]

    def test_inputs_are_right_where_no_target_is_ignored(self) -> None:
        assert codes(acc207, plain(BY_INPUTS)) == []

    @pytest.mark.parametrize("count", [BY_MICRO, BY_RANK, BY_ALL])
    def test_a_count_that_can_be_zero(self, count: Factor) -> None:
        assert lines(acc208, plain(count, facts=("may-lose-targets",))) == [13]
        assert codes(acc208, plain(count)) == []

    def test_a_guarded_count_or_a_loss_functions_own_mean(self) -> None:
        guarded = factor(Quantity.UNITS, line=13, guarded=True)
        assert codes(acc208, plain(guarded, over_k(), facts=("may-lose-targets",))) == []
        assert codes(acc208, plain(MEAN, over_k(), facts=("may-lose-targets",))) == []


class TestDivisorIsNotK:
    def test_is_reported_at_the_division(self) -> None:
        assert lines(acc215, plain(MEAN, over_k(5, text="cfg.accum"))) == [13]

    @pytest.mark.parametrize(
        ("divisor", "expected"),
        [
            pytest.param(factor(Quantity.CONSTANT, -1, 3, line=13, root="mega_batch_factor"), [13], id="a setting with a count's name"),
            pytest.param(factor(Quantity.CONSTANT, -1, 3, line=13, root="temperature"), [], id="a weight"),
            pytest.param(factor(Quantity.CONSTANT, -1, 3, line=13), [], id="a plain number"),
            pytest.param(factor(Quantity.CONSTANT, -1, 3, line=13, root="K", text="self.K"), [], id="K itself"),
            pytest.param(over_k(1, text="loss.numel()"), [], id="the size of a scalar"),
        ],
    )
    def test_a_setting_that_was_not_taken_for_k(self, divisor: Factor, expected: list[int]) -> None:
        assert lines(acc215, plain(MEAN, divisor)) == expected

    def test_an_unfollowed_divisor_makes_it_less_sure(self) -> None:
        found = codes(acc215, plain(MEAN, factor(Quantity.UNKNOWN, line=13, text="args.accumulation_steps")))
        assert [one.confidence for one in found] == [Confidence.MEDIUM]

    def test_an_unfollowed_loss_makes_it_less_sure(self) -> None:
        found = codes(acc215, plain(over_k(5, text="cfg.accum"), known=False))
        assert [one.confidence for one in found] == [Confidence.MEDIUM]

    @pytest.mark.parametrize(
        "trace",
        [
            pytest.param(plain(MEAN, over_k()), id="K itself"),
            pytest.param(plain(over_k(5)), id="a sum"),
            pytest.param(plain(MEAN, over_k(5), facts=("engine-divides",)), id="the engine divides"),
            pytest.param(Loop(Weight((MEAN, over_k(5)))).windows(4, 4).trace(), id="windows of another size"),
            pytest.param(plain(MEAN, ENGINE), id="implicit"),
        ],
    )
    def test_is_silent(self, trace: Trace) -> None:
        assert codes(acc215, trace) == []


def test_two_models_take_their_own_backwards() -> None:
    """A generator's backward inside the discriminator's window is not the discriminator's."""
    builder = Builder()
    parts: list[tuple[Actor, Actor]] = [
        (model, builder.optimizer(model, f"opt_{model.name}")) for model in (builder.model("d"), builder.model("g"))
    ]
    for number in range(6):
        builder.data(10)
        for at, (model, optimizer) in enumerate(parts):
            weight = Weight((MEAN, over_k())) if model.name == "g" else Weight((MEAN,))
            builder.backward(builder.forward(model, 20 + at), line=30 + at, weight=weight, reaches=(model.uid,))
            if number % 3 == 2:
                builder.step(optimizer, 40 + at)
                builder.zero(optimizer, 50 + at)
    assert lines(acc202, builder.trace()) == [30]
