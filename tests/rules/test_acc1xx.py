"""The synchronisation rules, on traces written by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accumlint.findings import Severity
from accumlint.rule import catalogue
from accumlint.trace import Actor, Kind, Trace, Turn, Wrapper

sys.path.insert(0, str(Path(__file__).parent))
from build import Builder, codes, lines, windows

RULES = catalogue()


def _loop(
    wrapper: Wrapper, forward: list[bool], backward: list[bool], *, options: str = "", known: bool = True, switch: str = "context"
) -> Trace:
    """Two windows of one model; the lists give the flag that each forward and each backward of a window sees."""
    build = Builder()
    model = build.model("model", wrapper, options=options, known=known)
    optimizer = build.optimizer(model)

    def micro(at: int, boundary: bool) -> None:
        build.data()
        if not forward[at]:
            build.sync_off(model, 40, options=switch)
        seen = build.forward(model, 41, sync=forward[at])
        if forward[at] and not backward[at]:
            build.sync_off(model, 42, options=switch)
        build.backward(seen, line=43, sync=backward[at])
        if boundary:
            build.step(optimizer, 50)
            build.zero(optimizer, 51)

    windows(micro, k=len(forward))
    return build.trace()


GOOD = ([False, False, True], [False, False, True])
BACKWARD_ONLY = ([True, True, True], [False, False, True])
FORWARD_ONLY = ([False, False, True], [True, True, True])
NONE = ([True, True, True], [True, True, True])
NEVER = ([False, False, False], [False, False, False])
FIRST_SYNCED = ([True, False, False], [True, False, False])
FLAG_BETWEEN = ([True, False, False], [False, False, True])


@pytest.mark.parametrize(
    ("wrapper", "flags", "expected"),
    [
        (Wrapper.DDP, GOOD, {}),
        (Wrapper.DDP, BACKWARD_ONLY, {"ACC101": [43]}),
        (Wrapper.APEX_DDP, BACKWARD_ONLY, {"ACC101": [43]}),
        (Wrapper.DDP, FORWARD_ONLY, {}),
        (Wrapper.DDP, NONE, {"ACC103": [43]}),
        (Wrapper.DDP, NEVER, {"ACC102": [40]}),
        (Wrapper.DDP, FIRST_SYNCED, {"ACC102": [40], "ACC103": [43]}),
        (Wrapper.DDP, FLAG_BETWEEN, {"ACC102": [40]}),
        (Wrapper.FSDP1, GOOD, {}),
        (Wrapper.FSDP1, BACKWARD_ONLY, {}),
        (Wrapper.FSDP2, FORWARD_ONLY, {"ACC104": [43]}),
        (Wrapper.FSDP2, NONE, {}),
        (Wrapper.FSDP2, NEVER, {"ACC102": [40]}),
        (Wrapper.NONE, NONE, {}),
        (Wrapper.UNKNOWN, NONE, {}),
    ],
)
def test_flags(wrapper: Wrapper, flags: tuple[list[bool], list[bool]], expected: dict[str, list[int]]) -> None:
    trace = _loop(wrapper, *flags)
    found = {code: lines(RULES[code], trace) for code in ("ACC101", "ACC102", "ACC103", "ACC104", "ACC110", "ACC111")}
    assert {code: at for code, at in found.items() if at} == expected


def test_every_micro_batch_is_information_where_a_launcher_wraps() -> None:
    assert [one.severity for one in codes(RULES["ACC103"], _loop(Wrapper.DDP, *NONE, options="prepared"))] == [Severity.INFO]
    assert [one.severity for one in codes(RULES["ACC103"], _loop(Wrapper.DDP, *NONE, options="optional"))] == [Severity.INFO]
    assert not codes(RULES["ACC103"], _loop(Wrapper.DDP, *NONE, known=False))
    assert not codes(RULES["ACC103"], _loop(Wrapper.DDP, *NONE, options="static_graph"))


def test_a_gate_of_k_in_a_window_that_is_rehearsed_longer() -> None:
    longer = [False, False, True, True, True]
    assert not lines(RULES["ACC103"], _loop(Wrapper.DDP, longer, longer))
    wrong = [False, True, True, True, True]  # no gate of K = 3
    assert lines(RULES["ACC103"], _loop(Wrapper.DDP, wrong, wrong)) == [43]


def test_static_graph() -> None:
    assert lines(RULES["ACC110"], _loop(Wrapper.DDP, *GOOD, options="static_graph")) == [40]
    assert not codes(RULES["ACC110"], _loop(Wrapper.DDP, *NONE, options="static_graph"))


def test_a_late_flag_says_so() -> None:
    build = Builder()
    model = build.model("model", Wrapper.DDP)
    optimizer = build.optimizer(model)
    flag = True

    def micro(at: int, boundary: bool) -> None:
        nonlocal flag
        build.data()
        seen = build.forward(model, sync=flag)
        flag = boundary
        (build.sync_on if flag else build.sync_off)(model, 44, options="flag")
        build.backward(seen, line=45, sync=flag)
        if boundary:
            build.step(optimizer)

    windows(micro)
    (finding,) = codes(RULES["ACC102"], build.trace())
    assert finding.place.line == 44
    assert "after the forward" in finding.message
    assert not codes(RULES["ACC101"], build.trace())
    assert not codes(RULES["ACC103"], build.trace())


def test_gradients_reduced_by_hand() -> None:
    build = Builder()
    model = build.model("model", Wrapper.DDP)
    optimizer = build.optimizer(model)

    def micro(at: int, boundary: bool) -> None:
        build.data()
        build.backward(build.forward(model, sync=False), sync=False)
        if boundary:
            build.add(Kind.REDUCE, options=frozenset({"manual"}))
            build.step(optimizer)

    windows(micro)
    assert not codes(RULES["ACC102"], build.trace())


def test_step_in_a_hook() -> None:
    build = Builder()
    model = build.model("model", Wrapper.DDP)
    optimizer = build.optimizer(model)
    build.data()
    build.forward(model, sync=True)
    build.step(optimizer, 60, options="hook")
    assert lines(RULES["ACC102"], build.trace(k=None)) == [60]


def test_the_last_turn_of_a_loader_may_synchronise() -> None:
    build = Builder()
    model = build.model("model", Wrapper.DDP)
    optimizer = build.optimizer(model)
    for epoch in range(2):
        for at in range(7):
            build.turns = (Turn(3, epoch), Turn(4, at, entry=epoch, last=at == 6))
            build.data()
            sync = at % 3 == 2 or at == 6
            build.backward(build.forward(model, sync=sync), sync=sync)
            if at % 3 == 2:
                build.step(optimizer)
    assert not codes(RULES["ACC103"], build.trace())


def _distributed(**fields: object) -> Builder:
    build = Builder()
    model = build.model("model", Wrapper.DDP)
    optimizer = build.optimizer(model)
    for _ in range(2):
        build.data()
        seen = build.forward(model, sync=fields.pop("sync", True))  # type: ignore[arg-type]
        build.skip(
            "not torch.isfinite(loss)", 70, *fields.get("skipped", (Kind.BACKWARD,)), **{k: v for k, v in fields.items() if k != "skipped"}
        )  # type: ignore
        build.backward(seen, sync=True)
        build.step(optimizer)
    return build


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [70]),
        ({"cause": "exception", "leaves": "except"}, [70]),
        ({"cause": "clock", "leaves": "break"}, [70]),
        ({"cause": "setting"}, []),
        ({"leaves": "raise"}, []),
        ({"options": "agreed"}, []),
        ({"options": "zero-loss"}, []),
        ({"skipped": (Kind.ZERO,)}, []),
        ({"skipped": (Kind.STEP,)}, [70]),
    ],
)
def test_skips(fields: dict[str, object], expected: list[int]) -> None:
    assert lines(RULES["ACC105"], _distributed(**fields).trace(k=None)) == expected


def test_a_skip_in_one_process_is_no_divergence() -> None:
    build = Builder()
    model = build.model()
    build.data()
    build.skip("loss > 5", 70, Kind.BACKWARD)
    build.backward(build.forward(model))
    build.step(build.optimizer(model))
    assert not codes(RULES["ACC105"], build.trace())


@pytest.mark.parametrize(("fact", "expected"), [("distributed", [70]), ("distributed makes-wrapper", [])])
def test_a_world_without_the_wrapper_is_one_process(fact: str, expected: list[int]) -> None:
    build = Builder()
    model = build.model()
    for name in fact.split():
        build.fact(name)
    build.data()
    build.skip("loss > 5", 70, Kind.BACKWARD)
    build.backward(build.forward(model))
    build.step(build.optimizer(model))
    assert lines(RULES["ACC105"], build.trace()) == expected


def _bypass(*, wrapped_too: bool = False, backward: bool = True, wrapper: Wrapper = Wrapper.DDP) -> Trace:
    build = Builder()
    model = build.model("model", wrapper)
    optimizer = build.optimizer(model)

    def micro(at: int, boundary: bool) -> None:
        build.data()
        seen = [build.forward(model, 80, bypass=True, text="model.module(x)")]
        if wrapped_too:
            seen.append(build.forward(model, 81, sync=True))
        build.backward(*(seen if backward else seen[1:]), sync=True)
        if boundary:
            build.step(optimizer)

    windows(micro)
    return build.trace()


def test_bypass() -> None:
    assert lines(RULES["ACC108"], _bypass()) == [80]
    assert not codes(RULES["ACC103"], _bypass())
    assert not codes(RULES["ACC108"], _bypass(wrapped_too=True))
    assert not codes(RULES["ACC108"], _bypass(wrapped_too=True, backward=False))
    assert not codes(RULES["ACC108"], _bypass(wrapper=Wrapper.FSDP1))


def test_a_wrapper_that_is_never_called() -> None:
    build = Builder()
    layers = build.model("layers", Wrapper.DDP)
    net = build.model("net")
    optimizer = build.optimizer(layers)
    for _ in range(2):
        build.data()
        build.backward(build.forward(net, 82), reaches=[layers.base or 0])
        build.step(optimizer)
        build.zero(layers)
    assert lines(RULES["ACC108"], build.trace()) == [82]


def _two(model_of: Actor | None = None, *, joint: bool = False, nested: bool = False) -> Trace:
    build = Builder()
    model = build.model("model", Wrapper.DDP)
    optimizer = build.optimizer(model)
    build.fact("means-to-accumulate")
    for _ in range(2):
        build.data()
        first = build.forward(model, 90, sync=True)
        if nested:
            build.backward(first, line=92, sync=True)
        second = build.forward(model, 91, sync=True)
        if joint:
            build.backward(first, second, line=93, sync=True)
        else:
            if not nested:
                build.backward(first, line=92, sync=True)
            build.backward(second, line=93, sync=True)
        build.step(optimizer)
    return build.trace()


def test_second_backward() -> None:
    assert lines(RULES["ACC111"], _two()) == [93]
    assert not codes(RULES["ACC111"], _two(joint=True))
    assert not codes(RULES["ACC111"], _two(nested=True))
