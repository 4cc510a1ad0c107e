"""The mixed-precision rules, on traces written by hand."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest

from accumlint.findings import Confidence
from accumlint.rule import catalogue
from accumlint.trace import Guard, Kind, Trace
from accumlint.weight import Factor, Quantity

sys.path.insert(0, str(Path(__file__).parent))
from build import Builder, codes, lines, place, windows

RULES = catalogue()
CODES = ("ACC401", "ACC402", "ACC403", "ACC404", "ACC405", "ACC406")

UNSCALED, UPDATED, CLIPPED, STEPPED, BACK = 20, 21, 22, 23, 24


def _found(trace: Trace) -> dict[str, list[int]]:
    found = {code: lines(RULES[code], trace) for code in CODES}
    return {code: at for code, at in found.items() if at}


def _loop(inside: str, boundary: str, *, scaled: bool = True, options: str = "", first: str = "") -> Trace:
    """Two windows; the words say what stands beside every backward, and what at the boundary. `first` is for the first backward."""
    build = Builder()
    model, scaler = build.model(), build.scaler(options=options)
    optimizer = build.optimizer(model)
    acts = {
        "unscale": lambda: build.unscale(scaler, optimizer, line=UNSCALED),
        "update": lambda: build.update(scaler, UPDATED),
        "new-scale": lambda: build.update(scaler, UPDATED, options="new-scale"),
        "clip": lambda: build.clip(optimizer, CLIPPED),
        "scaled-clip": lambda: build.clip(optimizer, CLIPPED, text="clip_grad_norm_(params, 1.0 * scaler.get_scale())"),
        "divide": lambda: build.normalize(optimizer, Factor(Quantity.SCALE, -1, Fraction(1, 1024))),
        "step": lambda: build.step(optimizer, STEPPED, scaler=scaler),
        "raw-step": lambda: build.step(optimizer, STEPPED),
        "zero": lambda: build.zero(optimizer),
    }

    def micro(at: int, last: bool) -> None:
        build.data()
        build.backward(build.forward(model), line=BACK, scaler=scaler if scaled else None)
        for word in (inside + (" " + first if at == 0 else "")).split():
            acts[word]()
        if last:
            for word in boundary.split():
                acts[word]()

    windows(micro)
    return build.trace()


@pytest.mark.parametrize(
    ("inside", "boundary", "expected"),
    [
        ("", "unscale clip step update zero", {}),
        ("", "step update zero", {}),
        ("unscale", "clip step update zero", {"ACC401": [UNSCALED]}),
        ("unscale update", "step zero", {"ACC402": [UNSCALED], "ACC404": [UPDATED]}),
        ("unscale update", "clip step zero", {"ACC402": [UNSCALED], "ACC404": [UPDATED]}),
        ("", "clip step update zero", {"ACC403": [CLIPPED]}),
        ("", "clip unscale step update zero", {"ACC403": [CLIPPED]}),
        ("", "scaled-clip step update zero", {}),
        ("", "step zero update", {}),
        ("update", "step zero", {"ACC404": [UPDATED]}),
        ("", "update step zero", {"ACC404": [UPDATED]}),
        ("new-scale", "step update zero", {}),
        ("", "raw-step update zero", {"ACC405": [STEPPED]}),
        ("", "unscale raw-step update zero", {}),
        ("", "divide raw-step zero", {}),
        ("", "divide clip raw-step zero", {}),
    ],
)
def test_order(inside: str, boundary: str, expected: dict[str, list[int]]) -> None:
    assert _found(_loop(inside, boundary)) == expected


def test_unscale_on_the_first_micro_batch_only() -> None:
    assert _found(_loop("", "step update zero", first="unscale")) == {"ACC402": [UNSCALED]}
    assert _found(_loop("", "clip step update zero", first="unscale")) == {"ACC402": [UNSCALED]}
    assert _found(_loop("", "step update zero", first="unscale zero")) == {}


def test_unscaled_backward() -> None:
    assert _found(_loop("", "step update zero", scaled=False)) == {"ACC406": [BACK]}
    assert _found(_loop("", "raw-step zero", scaled=False)) == {}


def test_disabled_scaler() -> None:
    assert _found(_loop("unscale", "clip step update zero", options="disabled")) == {}
    assert _found(_loop("", "clip step update zero", scaled=False, options="disabled")) == {}


def test_one_scaler_for_two_optimizers() -> None:
    build = Builder()
    gen, dis, scaler = build.model("gen"), build.model("dis"), build.scaler()
    og, od = build.optimizer(gen, "og"), build.optimizer(dis, "od")

    def micro(at: int, boundary: bool) -> None:
        build.data()
        build.zero(od)
        build.backward(build.forward(dis), scaler=scaler)
        build.step(od, scaler=scaler)
        build.backward(build.forward(gen), scaler=scaler, reaches=[gen.uid])
        if boundary:
            build.step(og, scaler=scaler)
            build.zero(og)
        build.update(scaler, 32)

    windows(micro)
    assert _found(build.trace()) == {"ACC404": [32]}


def test_two_optimizers_unscaled_once_each() -> None:
    build = Builder()
    gen, dis, scaler = build.model("gen"), build.model("dis"), build.scaler()
    og, od = build.optimizer(gen, "og"), build.optimizer(dis, "od")

    def micro(at: int, boundary: bool) -> None:
        build.data()
        build.backward(build.forward(gen), build.forward(dis), scaler=scaler)
        if boundary:
            for optimizer in (og, od):
                build.unscale(scaler, optimizer)
                build.clip(optimizer)
            build.step(og, scaler=scaler)
            build.step(od, scaler=scaler)
            build.update(scaler)
            build.zero(og)
            build.zero(od)

    windows(micro)
    assert _found(build.trace()) == {}


def test_an_optimizer_made_anew_for_each_epoch() -> None:
    build = Builder()
    model, scaler = build.model(), build.scaler()
    for _ in range(2):
        optimizer = build.optimizer(model)
        for at in range(6):
            build.data()
            build.backward(build.forward(model), scaler=scaler)
            if at % 3 == 2:
                build.unscale(scaler, optimizer)
                build.clip(optimizer)
                build.step(optimizer, scaler=scaler)
                build.update(scaler)
                build.zero(optimizer)
    assert _found(build.trace()) == {}


def test_clip_inside_apex_scale_loss() -> None:
    build = Builder()
    model = build.model()
    optimizer = build.optimizer(model)
    build.data()
    build.backward(build.forward(model))
    build.add(Kind.CLIP, CLIPPED, targets=(optimizer,), options=frozenset({"scale-loss"}))
    build.clip(optimizer, 33)
    build.step(optimizer)
    assert _found(build.trace()) == {"ACC403": [CLIPPED]}


def test_settings_that_may_never_meet() -> None:
    build = Builder()
    model, scaler = build.model(), build.scaler()
    optimizer = build.optimizer(model)

    def guard(text: str, holds: bool) -> tuple[Guard, ...]:
        return (Guard(place(1), text, "setting", holds),)

    build.data()
    build.backward(build.forward(model), guards=guard("fp16", False))
    build.step(optimizer, scaler=scaler, guards=guard("scaler is not None", True))
    (finding,) = codes(RULES["ACC406"], build.trace())
    assert finding.confidence is Confidence.MEDIUM


def test_an_unknown_call_that_received_the_scaler() -> None:
    build = Builder()
    model, scaler = build.model(), build.scaler()
    optimizer = build.optimizer(model)
    build.data()
    build.backward(build.forward(model), scaler=scaler)
    build.add(Kind.OPAQUE, targets=(scaler,), text="prepare(scaler)")
    build.clip(optimizer)
    build.step(optimizer, scaler=scaler)
    (finding,) = codes(RULES["ACC403"], build.trace())
    assert finding.confidence is Confidence.MEDIUM
