"""Hand-built traces of one small training script, and findings on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from accumlint.findings import Finding, Severity, at
from accumlint.rule import Rule
from accumlint.trace import Accumulation, Actor, Event, Kind, Place, Role, Trace, Wrapper
from accumlint.weight import Factor, Quantity, Weight

SOURCE = """\
def train(model, loader, optimizer, args):
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % args.accum == 0
        logits = model(x)
        loss = F.cross_entropy(logits, y) / args.accum
        with nullcontext() if last else model.no_sync():
            loss.backward()
        if last:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""

PAGE = """Only the backward runs inside `no_sync`.

## What it does
Reports a backward
inside `no_sync`.

## Why is this bad?
It is.
"""

MODEL = Actor(1, "model", Role.MODEL, Wrapper.DDP, base=0)
OPTIMIZER = Actor(2, "optimizer", Role.OPTIMIZER)
Loop = Callable[..., Trace]


def _loop(micro_batches: int = 7, k: int = 3, path: str = "train.py") -> Trace:
    """A loop that steps after every K-th micro-batch, with only its backwards inside no_sync."""
    events: list[Event] = []

    def add(kind: Kind, line: int, micro_batch: int, **seen: object) -> int:
        text = SOURCE.split("\n")[line - 1]
        column = len(text) - len(text.lstrip()) + 1
        place = Place(path, line, column, line, len(text) + 1)
        event = Event(len(events), kind, place, micro_batch, text=text.strip(), targets=(OPTIMIZER,) if line > 8 else ())
        events.append(replace(event, **seen))  # type: ignore[arg-type]
        return event.index

    mean = Factor(Quantity.UNITS, -1, text="F.cross_entropy(logits, y)", implicit=True)
    divided = Weight((mean, Factor(Quantity.ACCUMULATION, -1, Fraction(k), "args.accum", Place(path, 5))))
    for number in range(micro_batches):
        last = (number + 1) % k == 0
        add(Kind.DATA, 2, number, data=(number,))
        forward = add(Kind.FORWARD, 4, number, model=MODEL, sync=True)
        add(Kind.LOSS, 5, number, weight=divided)
        add(Kind.BACKWARD, 7, number, model=MODEL, sync=last, forwards=(forward,), weight=divided)
        if last:
            add(Kind.CLIP, 9, number)
            add(Kind.STEP, 10, number)
            add(Kind.ZERO, 11, number)
    accumulation = Accumulation("args.accum", k)
    return Trace(path, Place(path, 2), "train", tuple(events), accumulation, settings=(("args.ddp", "True"),))


@pytest.fixture
def loop() -> Loop:
    return _loop


@pytest.fixture
def finding() -> Finding:
    """ACC101 on the first window."""
    trace = _loop()
    window = trace.windows()[0]
    guilty = tuple(event for event in window.backwards if not event.sync)
    message = "`loss.backward()` runs inside `model.no_sync()`, but `model(x)` does not."
    found = at("ACC101", guilty[0], message, help="Put the forward inside `no_sync`.", window=window, guilty=guilty)
    return replace(found, trace=trace, settings=trace.settings)


@pytest.fixture
def rules() -> dict[str, Rule]:
    return {
        "ACC101": Rule("ACC101", "backward-only-no-sync", Severity.ERROR, lambda trace: (), PAGE),
        "ACC307": Rule("ACC307", "tail-lost", Severity.WARNING, lambda trace: (), "Steps are lost.\n\n## What it does\n" + "x" * 2000),
    }


@pytest.fixture
def sources() -> Callable[[str], str]:
    return lambda path: SOURCE if path.endswith("train.py") else ""
