"""The rules about checkpoints and averages, ACC310 and ACC311, on traces written by hand and on small loops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accumlint.config import Settings
from accumlint.findings import Confidence
from accumlint.linter import lint_data
from accumlint.rule import Rule
from accumlint.rules.acc310_mid_window_checkpoint import check as acc310
from accumlint.rules.acc311_update_bookkeeping_per_micro_batch import check as acc311
from accumlint.trace import Actor, Guard, Kind, Role, Trace, Turn

sys.path.insert(0, str(Path(__file__).parent))

from build import Builder, lines, place

STATE = frozenset({"optimizer-state"})
Act = Callable[[Builder, int], object]


def trace(*, inside: Act | None = None, between: Act | None = None, flush: bool = False, k: int = 3, batches: int = 7) -> Trace:
    """Two epochs; `inside` acts in every micro-batch after the update, `between` after each epoch, before the flush."""
    build = Builder()
    model = build.model()
    optimizer = build.optimizer(model)
    for epoch in range(2):
        outer = Turn(4, epoch, last=epoch == 1)
        for i in range(batches):
            build.turns = (outer, Turn(5, i, epoch, last=i == batches - 1))
            build.data()
            build.backward(build.forward(model), reaches={model.uid})
            if (i + 1) % k == 0:
                build.step(optimizer)
                build.zero(optimizer)
            if inside:
                inside(build, i)
        build.turns = (outer,)
        if between:
            between(build, epoch)
        if flush:
            build.step(optimizer, 60)
            build.zero(optimizer, 61)
    return build.trace(k=k)


def saves_at(*turns: int, **fields: object) -> Act:
    return lambda build, i: build.add(Kind.SAVE, 50, options=STATE, **fields) if i in turns else None


@pytest.mark.parametrize("turn", [0, 1, 3, 4])
def test_a_save_inside_a_window(turn: int) -> None:
    assert lines(acc310, trace(inside=saves_at(turn))) == [50]


@pytest.mark.parametrize("turn", [2, 5])
def test_a_save_after_the_step_is_right(turn: int) -> None:
    assert not lines(acc310, trace(inside=saves_at(turn)))


def test_weights_alone_may_be_saved_anywhere() -> None:
    assert not lines(acc310, trace(inside=lambda build, i: build.add(Kind.SAVE, 50)))


def test_a_save_in_a_handler_is_better_than_none() -> None:
    guard = Guard(place(49), "KeyboardInterrupt", "exception")
    assert not lines(acc310, trace(inside=saves_at(1, guards=(guard,))))


def test_a_save_between_the_passes() -> None:
    assert not lines(acc310, trace(between=saves_at(0)))  # what the pass left over is another rule's
    assert lines(acc310, trace(between=saves_at(0), flush=True)) == [50]


def test_an_average_in_every_micro_batch() -> None:
    assert lines(acc311, trace(inside=lambda build, i: build.add(Kind.AVERAGE, 51))) == [51]


def test_an_average_beside_the_step_or_once_an_epoch_is_right() -> None:
    assert not lines(acc311, trace(inside=lambda build, i: build.add(Kind.AVERAGE, 51) if i in {2, 5} else None))
    assert not lines(acc311, trace(between=lambda build, epoch: build.add(Kind.AVERAGE, 51)))


def test_an_average_that_the_framework_holds_back_is_right() -> None:
    assert not lines(acc311, trace(inside=lambda build, i: build.add(Kind.AVERAGE, 51, options=frozenset({"gated"}))))


def with_unknown_calls(*roles: Role) -> Trace:
    """An unknown call in every micro-batch that receives unknown objects of these roles, and a save and an average behind it."""

    def act(build: Builder, i: int) -> None:
        build.add(Kind.OPAQUE, 48, targets=tuple(Actor(900 + i, "given", role) for role in roles))
        build.add(Kind.SAVE, 50, options=STATE)
        build.add(Kind.AVERAGE, 51)

    return trace(inside=act)


def confidences(check: Rule, over: Trace) -> set[Confidence | None]:
    return {finding.confidence for finding in check.check(over)}


@pytest.mark.parametrize("check", [acc310, acc311])
def test_only_an_unknown_call_with_an_optimizer_may_step(check: Rule) -> None:
    assert confidences(check, with_unknown_calls(Role.MODEL)) == {Confidence.HIGH}
    assert confidences(check, with_unknown_calls(Role.MODEL, Role.OPTIMIZER)) == {Confidence.MEDIUM}
    assert confidences(check, with_unknown_calls()) == {Confidence.MEDIUM}


def test_a_counter_names_its_limit() -> None:
    counts = frozenset({"counter", "moving"})
    found = list(
        acc311.check(trace(inside=lambda build, i: build.add(Kind.AVERAGE, 51, options=counts, note="`max_updates` counts updates")))
    )
    assert [finding.place.line for finding in found] == [51]
    assert "`max_updates` counts updates" in found[0].message


LOOP = """
import torch
from torch import nn
model = nn.Linear(2, 1)
other = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(24):
    (model(torch.randn(3, 2)).mean() / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()
    {}
"""


def found(statement: str, head: str = "K = 4\n") -> list[str]:
    source = head + LOOP.replace("{}", statement)
    examined, warnings = lint_data("/loop.py", source.encode(), Settings())
    assert not warnings
    return sorted({finding.code for finding in examined.findings if int(finding.confidence) == 2})


@pytest.mark.parametrize(
    "statement",
    [
        "if i % 5 == 4: torch.save({'m': model.state_dict(), 'o': optimizer.state_dict()}, 'x.pt')",
        "if i % every == 0: save_checkpoint('x.pt', model, optimizer, i)",
        "if i % every == 0: torch.save(dict(m=model.state_dict(), o=optimizer.state_dict()), 'x.pt')",
        "if i % every == 0 and rank == 0: torch.save([model.state_dict(), optimizer.state_dict()], 'x.pt')",
        "if i % every == 0: torch.distributed.checkpoint.save({'m': model, 'o': optimizer}, checkpoint_id='x')",
    ],
)
def test_what_saves_the_state_of_the_optimizer(statement: str) -> None:
    assert found(statement) == ["ACC310"]


@pytest.mark.parametrize(
    "statement",
    [
        "if i % every == 0: torch.save(model.state_dict(), 'x.pt')",
        "if i % every == 0: save_checkpoint(model, i)",
        "if (i + 1) % (K * every) == 0: torch.save({'m': model.state_dict(), 'o': optimizer.state_dict()}, 'x.pt')",
        "if (i + 1) % K == 0 and i % every == 0: save_checkpoint('x.pt', model, optimizer, i)",
        "if i % every == 0: log.save(i)",
    ],
)
def test_what_does_not(statement: str) -> None:
    assert found(statement) == []


def test_periods_in_place_that_the_window_divides() -> None:
    save = "if (i + 1) % EVERY == 0: torch.save({'o': optimizer.state_dict()}, 'x.pt')"
    assert found(save, "K = 4\nEVERY = 8\n") == []
    assert found(save, "K = 4\nEVERY = 10\n") == ["ACC310"]


@pytest.mark.parametrize(
    "statement",
    [
        "ema.update()",
        "ema_model.update_parameters(model)",
        "self.model_ema.step(model.parameters())",
        "update_ema(other, model, 0.99)",
        "soft_update(other, model)",
        "for p, q in zip(other.parameters(), model.parameters()): p.data.mul_(0.9).add_(q.data, alpha=0.1)",
        "for p, q in zip(other.parameters(), model.parameters()): p.lerp_(q, 0.1)",
        "for p, q in zip(other.parameters(), model.parameters()): p.data.copy_(0.9 * p.data + 0.1 * q.data)",
    ],
)
def test_what_averages_weights(statement: str) -> None:
    assert found(statement) == ["ACC311"]


@pytest.mark.parametrize(
    "statement",
    [
        "loss_ema.update(i)",
        "schema.update(model)",
        "remaining.step()",
        "for p, q in zip(other.parameters(), model.parameters()): p.data.copy_(q.data)",
        "for p in model.parameters(): p.data.clamp_(-1, 1)",
        "if (i + 1) % K == 0: ema.update(model)",
    ],
)
def test_what_averages_none(statement: str) -> None:
    assert found(statement) == []
