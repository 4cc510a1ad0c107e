"""Loops of which a part may be done by something that is not there and that is handed the model, the optimizer, the loss or K."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

GATED = """
    import torch
    from elsewhere import Base, Counter, NotYet, boundaries, patch, report, wait

    class Trainer(Base):
        def train(self, net, loader, optimizer, accum):
            {made}
            for i, batch in enumerate(loader):
                (net(batch).mean() / accum).backward()
                {ends}
"""

TRIED = """try:
                    {}
                except NotYet:
                    continue
                optimizer.step()"""


@pytest.mark.parametrize(
    ("made", "ends", "silent"),
    [
        ("pass", "while boundaries.pending(i):\n                    optimizer.step()\n                    optimizer.zero_grad()", True),
        (
            "counted = Counter(accum)",
            "for _ in counted:\n                    optimizer.step()\n                    optimizer.zero_grad()",
            True,
        ),
        (
            "pass",
            TRIED.format("wait(i)"),
            True,
        ),
        (
            "pass",
            TRIED.format("n = i + 1"),
            False,
        ),
        ("pass", "self.tick()\n                if self.due:\n                    optimizer.step()", True),
        ("count = Counter()", "count += 1\n                if count.full:\n                    optimizer.step()", True),
        ("patch(optimizer, every=accum)", "optimizer.step()", True),
        ("report(optimizer)", "optimizer.step()", False),
    ],
)
def test_updates_that_wait_for_something_that_is_not_there(lint: Lint, made: str, ends: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": GATED.format(made=made, ends=ends)})}
    assert found & {"ACC301"} == (set() if silent else {"ACC301"})


CLEARED = """
    import torch
    from elsewhere import Base, Buffers, Manager, log, patch, windows

    class Trainer(Base):
        def __init__(self, net, accum):
            self.net, self.accum = net, accum
            self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def train(self, loader):
            optimizer, accum = self.optimizer, self.accum
            {made}
            for window in {over}:
                for batch in window:
                    (self.net(batch).mean() / accum).backward()
                optimizer.step()
                {after}
"""


@pytest.mark.parametrize(
    ("made", "over", "after", "silent"),
    [
        ("pass", "windows(loader, optimizer, accum)", "pass", True),
        ("manager = Manager(optimizer)", "loader", "manager.after_step()", True),
        ("buffers = Buffers(self.net)", "loader", "buffers.clear()", True),
        ("held = {'optimizer': optimizer}", "loader", "Manager.run(held)", True),
        ("pass", "loader", "for one in self.callbacks:\n                    one.on_update(self)", True),
        ("patch(optimizer)", "loader", "pass", True),
        ("pass", "loader", "self.finish_update()", True),
        ("manager = Manager(accum)", "loader", "manager.after_step()", False),
        ("log(optimizer)", "loader", "pass", False),
        ("pass", "windows(loader, accum)", "pass", False),
        ("pass", "loader", "self.log_update()", False),
    ],
)
def test_who_holds_the_optimizer_may_clear(lint: Lint, made: str, over: str, after: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": CLEARED.format(made=made, over=over, after=after)})}
    assert found & {"ACC303"} == (set() if silent else {"ACC303"})


SYNCED = """
    import torch
    from contextlib import ExitStack
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import Base, SyncControl, contexts, evaluate, hook, patch, set_sync, synced

    class Trainer(Base):
        def __init__(self, net, optimizer, accum):
            self.model, self.optimizer, self.accum = DDP(net), optimizer, accum

        def train(self, loader):
            model, optimizer, accum = self.model, self.optimizer, self.accum
            {made}
            for i, batch in enumerate({over}):
                {first}
                    (model(batch).mean() / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    {after}
"""
STACK = """with ExitStack() as stack:
                    for context in contexts(model, i):
                        stack.enter_context(context)"""


@pytest.mark.parametrize(
    ("made", "over", "first", "after", "silent"),
    [
        ("pass", "loader", "set_sync(model, (i + 1) % accum == 0)\n                if True:", "pass", True),
        ("pass", "loader", "self.set_sync(i)\n                if True:", "pass", True),
        ("control = SyncControl(model, accum)", "loader", "with control.at(i):", "pass", True),
        ("pass", "loader", STACK, "pass", True),
        ("patch(model, accum)", "loader", "if True:", "pass", True),
        ("pass", "synced(model, loader, accum)", "if True:", "pass", True),
        ("model.register_comm_hook(None, hook(accum))", "loader", "if True:", "pass", True),
        ("patch(accum)", "loader", "if True:", "pass", False),
        ("pass", "synced(loader, accum)", "if True:", "pass", False),
        ("pass", "loader", "if True:", "evaluate(model, i)", False),
    ],
)
def test_who_is_told_of_the_model_may_switch_synchronisation(
    lint: Lint, made: str, over: str, first: str, after: str, silent: bool
) -> None:
    text = SYNCED.format(made=made, over=over, first=first, after=after)
    found = {code for _, code, _ in lint({"main.py": text})}
    assert found & {"ACC103"} == (set() if silent else {"ACC103"})


REDUCED = """
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import Reducer, comm

    def train(net, loader, optimizer, accum):
        reducer = {made}
        model, batches = DDP(net), iter(loader)
        for _ in range(100):
            with model.no_sync():
                for k in range(accum):
                    (model(next(batches)).mean() / accum).backward()
            {after}
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "after", "silent"),
    [
        ("None", "comm.finish(net.parameters())", True),
        ("Reducer(net)", "reducer.finish(accum)", True),
        ("Reducer(net.parameters())", "reducer.finish()", True),
        ("Reducer(accum)", "reducer.finish()", False),
        ("Reducer(net)", "pass", False),
    ],
)
def test_who_was_given_the_parameters_may_reduce_their_gradients(lint: Lint, made: str, after: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": REDUCED.format(made=made, after=after)})}
    assert found == (set() if silent else {"ACC102"})


WRAPPED = """
    from contextlib import nullcontext
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import make_ddp, shard

    def train(net, loader, optimizer, accum):
        model = {made}
        for i, batch in enumerate(loader):
            last = (i + 1) % accum == 0
            loss = model(batch).mean() / accum
            with nullcontext() if last else model.no_sync():
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(("made", "found"), [("shard(net)", set()), ("make_ddp(net)", {"ACC101"}), ("DDP(net)", {"ACC101"})])
def test_a_wrapper_of_unknown_make_may_decide_in_the_backward(lint: Lint, made: str, found: set[str]) -> None:
    assert {code for _, code, _ in lint({"main.py": WRAPPED.format(made=made)})} == found


ANSWERED = """
    import torch
    from contextlib import nullcontext
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import bad_everywhere, boundaries, guard

    def train(net, loader, optimizer, accum):
        model = DDP(net)
        for i, batch in enumerate(loader):
            last = (i + 1) % accum == 0
            with nullcontext() if last else model.no_sync():
                loss = model(batch).mean() / accum
                if {bad}:
                    continue
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("bad", "silent"),
    [
        ("bad_everywhere(loss)", True),
        ("not guard.accepts(loss)", True),
        ("guard.score(loss) > 3", True),
        ("torch.isnan(loss)", False),
        ("loss.isnan()", False),
        ("loss > 3", False),
        ("torch.isnan(loss) or bad_everywhere(loss)", False),
    ],
)
def test_an_answer_about_the_loss_may_be_that_of_all_ranks(lint: Lint, bad: str, silent: bool) -> None:
    found = {code for _, code, _ in lint({"main.py": ANSWERED.format(bad=bad)})}
    assert found & {"ACC105"} == (set() if silent else {"ACC105"})


DONE = """
    import torch
    from torch.amp import GradScaler
    from elsewhere import Ema, augment, due, grads, to_device

    def train(net, loader, accum, args):
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler()
        ema = {ema}
        for i, batch in enumerate(loader):
            scaler.scale({loss}).backward()
            if (i + 1) % accum == 0:
                {before}
                optimizer.step()
                scaler.update()
                optimizer.zero_grad()
            {after}
"""
SAVE = 'torch.save({"optimizer": optimizer.state_dict()}, "x.pt")'


@pytest.mark.parametrize(
    ("ema", "loss", "before", "after", "found"),
    [
        ("None", "net(batch).mean() / accum", "grads.finish(net.parameters(), scaler.get_scale())", "pass", set()),
        ("None", "net(batch).mean() / accum", "grads.finish(accum)", "pass", {"ACC405"}),
        ("Ema(net, every=accum)", "net(batch).mean() / accum", "scaler.unscale_(optimizer)", "ema.update()", set()),
        ("Ema(net)", "net(batch).mean() / accum", "scaler.unscale_(optimizer)", "if due(i):\n                ema.update()", set()),
        ("Ema(net)", "net(batch).mean() / accum", "scaler.unscale_(optimizer)", "ema.update()", {"ACC311"}),
        ("None", "net(batch).mean() / accum", "scaler.unscale_(optimizer)", f"if due(i):\n                {SAVE}", set()),
        ("None", "net(batch).mean() / accum", "scaler.unscale_(optimizer)", f"if i % args.every == 0:\n                {SAVE}", {"ACC310"}),
        ("None", "net(batch, scale=1 / accum)[0].mean()", "scaler.unscale_(optimizer)", "pass", {"ACC202"}),
    ],
)
def test_what_is_done_once_an_update(lint: Lint, ema: str, loss: str, before: str, after: str, found: set[str]) -> None:
    text = DONE.replace("{ema}", ema).replace("{loss}", loss).replace("{before}", before).replace("{after}", after)
    assert {code for _, code, _ in lint({"main.py": text})} == found


def test_a_loss_that_a_model_was_told_to_scale(lint: Lint) -> None:
    text = """
        def train(model, loader, optimizer, accum):
            for i, batch in enumerate(loader):
                loss, stats = model(batch{told})
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert lint({"main.py": text.replace("{told}", ", scale=1 / accum")}) == set()
    assert {code for _, code, _ in lint({"main.py": text.replace("{told}", "")})} == {"ACC202"}


@pytest.mark.parametrize(("rate", "found"), [("args.lr / args.accum", set()), ("args.lr", {"ACC202"})])
def test_a_rate_that_is_divided_in_the_place_of_the_losses(lint: Lint, rate: str, found: set[str]) -> None:
    text = """
        import torch

        def train(net, loader, args):
            optimizer = torch.optim.SGD(net.parameters(), lr={rate})
            for i, batch in enumerate(loader):
                net(batch).mean().backward()
                if (i + 1) % args.accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert {code for _, code, _ in lint({"main.py": text.replace("{rate}", rate)})} == found


MIXED = """
    import torch
    from elsewhere import Mixin

    class Adam(Mixin, torch.optim.Adam):
        pass

    def train(net, loader, accum):
        optimizer = {made}
        for batch in loader:
            (net(batch).mean() / accum).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("Adam(net.parameters(), every=accum)", set()),
        ("Adam(net.parameters())", {"ACC301"}),
        ("torch.optim.Adam(net.parameters())", {"ACC301"}),
    ],
)
def test_an_optimizer_with_a_base_class_that_is_not_there(lint: Lint, made: str, found: set[str]) -> None:
    assert {code for _, code, _ in lint({"main.py": MIXED.format(made=made)})} == found


@pytest.mark.parametrize(("batch", "found"), [("augment(batch)", set()), ("to_device(batch)", {"ACC312"}), ("batch", {"ACC312"})])
def test_what_is_made_of_a_batch_may_be_another_thing_each_time(lint: Lint, batch: str, found: set[str]) -> None:
    text = """
        from elsewhere import augment, to_device

        def train(net, loader, optimizer, accum):
            for batch in loader:
                for k in range(accum):
                    (net({batch}).mean() / accum).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert {code for _, code, _ in lint({"main.py": text.replace("{batch}", batch)})} == found


@pytest.mark.parametrize(("package", "found"), [("oneflow.nn.parallel", set()), ("torch.nn.parallel", {"ACC103"})])
def test_a_wrapper_that_is_not_torchs_own(lint: Lint, package: str, found: set[str]) -> None:
    text = f"""
        from {package} import DistributedDataParallel

        def train(net, loader, optimizer, accum):
            model = DistributedDataParallel(net)
            for i, batch in enumerate(loader):
                (model(batch).mean() / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert {code for _, code, _ in lint({"main.py": text})} == found


def test_a_frozen_discriminator_reduces_nothing(lint: Lint) -> None:
    text = """
        import torch
        from contextlib import nullcontext
        from torch.nn.parallel import DistributedDataParallel as DDP

        def train(generator, discriminator, accum, updates):
            generator, discriminator = DDP(generator), DDP(discriminator)
            optimizer = torch.optim.Adam(generator.parameters())
            discriminator.requires_grad_(False)
            for _ in range(updates):
                for k in range(accum):
                    with nullcontext() if k == accum - 1 else generator.no_sync():
                        fake = generator(torch.randn(8, 4))
                        (-discriminator(fake).mean() / accum).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert lint({"main.py": text}) == set()
