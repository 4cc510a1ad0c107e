"""Loops of which a part is done by what comes from a package that is not there: marks, objects, decorators, hooks, samplers."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

STEP = ("main.py", "ACC301", "optimizer.step()")

MARKED = """
    import torch
    from contextlib import nullcontext
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import counter, source, windows

    def train(net, loader, optimizer, accum):
        model = DDP(net)
        {loop}
            {first}
            with nullcontext() if {last} else model.no_sync():
                loss = model(batch).mean() / accum
                loss.backward()
            if {last}:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("loop", "first", "last"),
    [
        ("for batch, last in windows(loader, accum):", "pass", "last"),
        ("for item in windows(loader, accum):", "batch = item.batch", "item.last"),
        ("for item in windows(loader, accum):", "batch = item['batch']", "item['ends']"),
        ("for batch in loader:", "ends = counter.next_is_last(accum)", "ends"),
        ("for batch in loader:", "counter.advance()", "counter.ends"),
        ("for batch in loader:", "counter.advance()", "counter.count == accum"),
        ("while (batch := source.next()) is not None:", "pass", "source.done"),
    ],
)
def test_marks_that_come_with_the_data(lint: Lint, loop: str, first: str, last: str) -> None:
    assert lint({"main.py": MARKED.format(loop=loop, first=first, last=last)}) == set()


@pytest.mark.parametrize("guard", ["if batch['good']:", "if torch.isfinite(batch).all():"])
def test_marks_that_hold_a_backward_differ_between_ranks(lint: Lint, guard: str) -> None:
    text = f"""
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        def train(net, loader, optimizer, accum):
            model = DDP(net)
            for i, batch in enumerate(loader):
                {guard}
                    (model(batch).mean() / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert "ACC105" in {code for _, code, _ in lint({"main.py": text})}


BASE = """
    import torch
    from elsewhere import Counting

    class Trainer(Counting):
        def __init__(self, net, accum):
            self.model, self.accum = net, accum
            self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def train(self, loader):
            for batch in loader:
                {first}
                    (self.model(batch).mean() / self.accum).backward()
                if {gate}:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "gate", "silent"),
    [
        ("with self.counted():", "self.due", True),
        ("if True:", "self.due(batch)", False),
        ("if self.log(batch) is None:", "True", False),
    ],
)
def test_methods_of_a_base_class(lint: Lint, first: str, gate: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": BASE.format(first=first, gate=gate)})}
    assert not silent or not found


DECORATED = """
    from elsewhere import accumulate, every, timed

    def train(net, loader, optimizer, accum):
        {backward}
        def learn(batch):
            (net(batch).mean() / accum).backward()

        {step}
        def update():
            optimizer.step()
            optimizer.zero_grad()

        for batch in loader:
            learn(batch)
            update()
"""


@pytest.mark.parametrize(
    ("backward", "step", "found"),
    [
        ("@accumulate(accum)", "", set()),
        ("@accumulate", "", set()),
        ("", "@every(accum)", set()),
        ("@timed", "@timed", {STEP}),
        ("", "", {STEP}),
    ],
)
def test_decorators_that_are_told_of_windows(lint: Lint, backward: str, step: str, found: set[tuple[str, str, str]]) -> None:
    assert lint({"main.py": DECORATED.format(backward=backward, step=step)}) == found


MATCHED = """match {asked}:
                case "step":
                    update()
                case "wait":
                    pass"""
CHOSEN = """
    from elsewhere import phase

    def train(net, loader, optimizer, args, accum):
        def update():
            optimizer.step()
            optimizer.zero_grad()

        ways = {{"step": update, "wait": lambda: None}}
        for i, batch in enumerate(loader):
            (net(batch).mean() / accum).backward()
            {choice}
"""


@pytest.mark.parametrize(
    ("choice", "silent"),
    [
        ("ways[phase(i, accum)]()", True),
        (MATCHED.format(asked="phase(i)"), True),
        ("ways[args.way]()", False),
        (MATCHED.format(asked="args.way"), False),
    ],
)
def test_ways_that_an_answer_chooses(lint: Lint, choice: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": CHOSEN.format(choice=choice)})}
    assert found & {"ACC301"} == (set() if silent else {"ACC301"})


DIVIDED = """
    import torch
    from torch.amp import GradScaler
    from elsewhere import LossScaler, Plan, divide, divider, report

    def train(net, loader, optimizer, accum):
        scaler = {scaler}
        {hook}
        for i, batch in enumerate(loader):
            loss = net(batch).mean()
            scaler.scale(loss).backward()
            if (i + 1) % accum == 0:
                {before}
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("scaler", "hook", "before", "silent"),
    [
        ("GradScaler()", "divide(net, accum)", "pass", True),
        ("GradScaler()", "for p in net.parameters():\n            p.register_hook(divider(accum))", "pass", True),
        ("GradScaler()", "pass", "divide(optimizer, 1 / accum)", True),
        ("LossScaler(accum)", "pass", "pass", True),
        ("GradScaler()", "report(accum)", "pass", False),
        ("GradScaler()", "pass", "report(net, i)", False),
    ],
)
def test_who_is_told_of_k_and_of_gradients_may_divide_them(lint: Lint, scaler: str, hook: str, before: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": DIVIDED.format(scaler=scaler, hook=hook, before=before)})}
    assert found & {"ACC202"} == (set() if silent else {"ACC202"})


COUNTED = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import comm, log_count, sum_over_ranks

    def train(net, loader, optimizer):
        model = DDP(net)
        for window in loader:
            n = sum((y != -100).sum() for x, y in window)
            {agreed}
            for k, (x, y) in enumerate(window):
                model.require_backward_grad_sync = k == len(window) - 1
                loss = F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / n
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("agreed", "silent"),
    [("sum_over_ranks(n)", True), ("comm.sum_(n)", True), ("dist.all_reduce(n)", True), ("log_count(n)", False), ("pass", False)],
)
def test_a_count_that_is_handed_over_may_be_summed_in_place(lint: Lint, agreed: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": COUNTED.format(agreed=agreed)})}
    assert found & {"ACC204"} == (set() if silent else {"ACC204"})


TOLD = """
    import torch
    from elsewhere import Schedule, Windows, prepare

    def train(net, data, args, accum):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(data{sampler})
        {make}
        for epoch in range(args.epochs):
            for i, batch in enumerate(loader):
                (net(batch).mean() / accum).backward()
                {each}
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("sampler", "make", "each", "missing"),
    [
        (", batch_sampler=Windows(data, accum)", "pass", "pass", "ACC307"),
        (", batch_sampler=Windows(data)", "pass", "pass", ""),
        ("", "schedule = Schedule(optimizer, accum=accum)", "schedule.step()", "ACC305"),
        ("", "schedule = Schedule(optimizer, 1000)", "schedule.step()", ""),
    ],
)
def test_samplers_and_schedules_that_were_told_of_k(lint: Lint, sampler: str, make: str, each: str, missing: str) -> None:
    found = {code for _, code, _ in lint({"main.py": TOLD.format(sampler=sampler, make=make, each=each)})}
    always = {"ACC307"} | ({"ACC305"} if each != "pass" else set())
    assert found & always == always - {missing}


def test_an_optimizer_among_what_was_prepared_with_k(lint: Lint) -> None:
    text = """
        import torch
        from elsewhere import prepare

        def train(net, loader, accum):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net, optimizer, loader = prepare(net, optimizer, loader, accum=accum)
            for batch in loader:
                (net(batch).mean() / accum).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert lint({"main.py": text}) == set()


WAITS = """
    import torch
    from elsewhere import Accumulator, Base, build, due, wait

    class Trainer(Base):
        def train(self, net, loader, optimizer, args, accum):
            {make}

            def update():
                optimizer.step()
                optimizer.zero_grad()

            for i, batch in enumerate(loader):
                (net(batch).mean() / accum).backward()
                {ends}
"""


@pytest.mark.parametrize(
    ("make", "ends", "silent"),
    [
        ("pass", "if not due(i):\n                    continue\n                update()", True),
        ("pass", "if self.is_last_micro_batch:\n                    update()", True),
        ("pass", "due(i) and update()", True),
        ("pass", "update() if due(i) else wait()", True),
        ("pass", "act = update if due(i) else wait\n                act()", True),
        ("counted = Accumulator(optimizer, accum)", "with counted:\n                    update()", True),
        ("optimizer = build(net)\n            optimizer.set_accumulation(accum)", "optimizer.step()", True),
        ("counted = torch.autograd.profiler.profile()", "with counted:\n                    update()", False),
        ("pass", "args.updates and update()", False),
        ("optimizer = build(net)", "optimizer.step()", False),
    ],
)
def test_other_ways_of_waiting_for_an_answer(lint: Lint, make: str, ends: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": WAITS.format(make=make, ends=ends)})}
    assert found & {"ACC301"} == (set() if silent else {"ACC301"})


UNSYNCED = """
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import comm

    def train(net, loader, optimizer, accum):
        model, batches = DDP(net), iter(loader)
        for _ in range(100):
            with model.no_sync():
                for k in range(accum):
                    (model(next(batches)).mean() / accum).backward()
            {after}
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("after", "found"), [("comm.finish(model)", set()), ("comm.finish()", {"ACC102"}), ("pass", {"ACC102"})])
def test_who_is_given_the_model_may_reduce_its_gradients(lint: Lint, after: str, found: set[str]) -> None:
    assert {code for _, code, _ in lint({"main.py": UNSYNCED.format(after=after)})} == found


VIEWS = """
    from elsewhere import view

    def train(net, loader, optimizer, accum):
        for batch in loader:
            for k in range(accum):
                (net({batch}).mean() / accum).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("batch", "found"), [("view(batch, k)", set()), ("view(batch)", set()), ("batch", {"ACC312"})])
def test_a_view_that_is_given_the_turn_is_another_one_each_time(lint: Lint, batch: str, found: set[str]) -> None:
    assert {code for _, code, _ in lint({"main.py": VIEWS.format(batch=batch)})} == found
