"""Updates and synchronisation that wait for the answer of a function that nobody can follow, asked anew in every turn."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

SYNC = """
    import torch
    import torch.nn.functional as F
    from contextlib import nullcontext
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import plan

    def train(net, windows, optimizer, args):
        model = DDP(net)
        for window in windows:
            for k, (x, y) in enumerate(window):
                {switch}
                {context}
                    loss = F.cross_entropy(model(x), y) / len(window)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
ALWAYS = {("main.py", "ACC103", "loss.backward()")}


@pytest.mark.parametrize(
    ("switch", "context", "found"),
    [
        ("model.require_backward_grad_sync = k == len(window) - 1", "if True:", set()),
        ("model.require_backward_grad_sync = plan.is_last(k)", "if True:", set()),
        ("model.require_backward_grad_sync = k == plan.size - 1", "if True:", set()),
        ("last = plan.is_last(k)", "with nullcontext() if last else model.no_sync():", set()),
        ("last = plan.is_last(k)", "with model.no_sync() if args.saves and not last else nullcontext():", set()),
        ("pass", "with plan.synchronised(model, k):", set()),
        ("plan.advance()", "with nullcontext() if plan.synchronises else model.no_sync():", set()),
        ("pass", "with nullcontext() if plan.is_boundary() else model.no_sync():", set()),
        ("pass", "with plan.autocast(model):", ALWAYS),
        ("model.require_backward_grad_sync = args.always", "if True:", ALWAYS),
        ("pass", "if True:", ALWAYS),
    ],
)
def test_synchronisation(lint: Lint, switch: str, context: str, found: set[tuple[str, str, str]]) -> None:
    seen = lint({"main.py": SYNC.format(switch=switch, context=context)})
    assert seen & ALWAYS == found
    assert "args.always" in switch or "ACC102" not in {code for _, code, _ in seen}


STEP = """
    import torch
    import torch.nn.functional as F
    from elsewhere import plan

    def train(model, loader, optimizer, scheduler, accum):
        for i, (x, y) in enumerate(loader):
            {first}
            loss = F.cross_entropy(model(x), y) / accum
            loss.backward()
            {last}
            if {gate}:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "last", "gate"),
    [
        ("pass", "pass", "plan.ends_window(i)"),
        ("pass", "done = plan.is_boundary(i, accum)", "done"),
        ("pass", "done = plan.is_boundary(i, accum)\n            if done:\n                scheduler.step()", "done"),
        ("if plan.starts_window(i):\n                optimizer.zero_grad()", "pass", "plan.ends_window(i)"),
        ("pass", "pass", 'y["last"]'),
        ("plan.advance()", "pass", "plan.at_the_end"),
        ("pass", "boundary = plan.at_boundary()", "boundary"),
    ],
)
def test_an_update_that_waits_for_an_answer_makes_windows_nobody_knows(lint: Lint, first: str, last: str, gate: str) -> None:
    assert lint({"main.py": STEP.format(first=first, last=last, gate=gate)}) == set()


def test_one_that_waits_for_nothing_steps_too_often(lint: Lint) -> None:
    found = lint({"main.py": STEP.format(first="pass", last="pass", gate="True")})
    assert ("main.py", "ACC301", "optimizer.step()") in found


OTHERS = """
    import torch
    from elsewhere import plan

    def train(model, loader, optimizer, accum):
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
        assert len(loader) % accum == 0
        for i, batch in enumerate(loader):
            {before}
            loss = model(batch).mean() / accum
            loss.backward()
            {after}
            if (i + 1) % accum == 0:
                optimizer.step()
                {last}
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("before", "after", "last", "found"),
    [
        ("if plan.opens(i):\n                optimizer.zero_grad()", "pass", "pass", set()),
        ("pass", f"if plan.closes(i):\n                {CLIP}", "optimizer.zero_grad()", set()),
        ("pass", "if plan.closes(i):\n                scheduler.step()", "optimizer.zero_grad()", set()),
        ("optimizer.zero_grad()", "pass", "pass", {("main.py", "ACC302", "optimizer.zero_grad()")}),
        ("pass", CLIP, "optimizer.zero_grad()", {("main.py", "ACC304", CLIP)}),
        ("pass", "scheduler.step()", "optimizer.zero_grad()", {("main.py", "ACC305", "scheduler.step()")}),
    ],
)
def test_other_events_that_wait_for_an_answer(lint: Lint, before: str, after: str, last: str, found: set[tuple[str, str, str]]) -> None:
    assert lint({"main.py": OTHERS.format(before=before, after=after, last=last)}) == found


MADE = """
    import torch
    from elsewhere import Accumulating, Engine, Optimizers, plan

    def train(net, loader, accum):
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        {make}
        for i, batch in enumerate(loader):
            loss = net(batch).mean() / accum
            {backward}
            {step}.step()
            plain.zero_grad()
"""


@pytest.mark.parametrize(
    ("make", "backward", "step", "silent"),
    [
        ("optimizer = Accumulating(plain, accum)", "loss.backward()", "optimizer", True),
        ("optimizer = plan.wrap(plain, every=accum)", "loss.backward()", "optimizer", True),
        ("optimizer = plan.accumulate(plain)", "loss.backward()", "optimizer", True),
        ("engine = Engine(net, accum)", "engine.backward(loss)", "engine", True),
        ("pass", "loss.backward()", "plain", False),
    ],
)
def test_objects_that_were_told_of_accumulation_may_count_by_themselves(
    lint: Lint, make: str, backward: str, step: str, silent: bool
) -> None:
    found = lint({"main.py": MADE.format(make=make, backward=backward, step=step)})
    assert {code for _, code, _ in found} & {"ACC206", "ACC301"} == (set() if silent else {"ACC301"})
