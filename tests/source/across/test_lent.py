"""Functions that nobody can follow, which are given a model and a batch and give a loss."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

LOOP = """
    import functools
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import process, save_samples

    def train(net, data, optimizer, micro_size):
        model = DDP(net)
        while True:
            batch = next(data)
            optimizer.zero_grad()
            for at in range(0, batch.shape[0], micro_size):
                micro = batch[at : at + micro_size]
                {form}
                loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    "form",
    [
        'losses = process.training_losses(model, micro)\n                loss = (losses["loss"] * weights).mean()',
        "losses = process.training_losses(model, micro)\n                loss = losses.mean()",
        "compute = functools.partial(process.training_losses, model, micro)\n                loss = compute().mean()",
    ],
)
def test_a_mean_of_such_losses_is_a_mean(lint: Lint, form: str) -> None:
    assert lint({"main.py": LOOP.format(form=form)}) == {("main.py", code, "loss.backward()") for code in ("ACC103", "ACC202")}


@pytest.mark.parametrize(
    "form",
    [
        "losses = process.training_losses(model, micro)\n                loss = losses.sum() / batch.shape[0]",
        "losses = process.training_losses(model, micro)\n                loss = losses.mean() * micro.shape[0] / batch.shape[0]",
    ],
)
def test_one_that_is_divided_by_the_whole_batch_is_right(lint: Lint, form: str) -> None:
    quiet = LOOP.replace("model = DDP(net)", "model = net")
    assert lint({"main.py": quiet.format(form=form)}) == set()


def test_the_mean_behind_a_single_loss_is_not_seen(lint: Lint) -> None:
    form = "loss = process.compute_loss(model, micro)"
    assert lint({"main.py": LOOP.format(form=form)}) == {("main.py", "ACC103", "loss.backward()")}


def test_a_loss_of_what_the_model_gave_is_no_second_forward(lint: Lint) -> None:
    form = "loss = process.compute_loss(model, model(micro)).mean() * micro.shape[0] / batch.shape[0]"
    text = LOOP.replace("model = DDP(net)", "model = net").format(form=form)
    assert lint({"main.py": text}) == set()
