"""mmengine's optimizer wrapper: when it steps, what it divides by, and where it leaves synchronisation off."""

from __future__ import annotations

from fractions import Fraction

import pytest

from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind, Trace

LOOP = """
import torch
from mmengine.optim import OptimWrapper
from torch.nn.parallel import DistributedDataParallel as DDP

def main(loader, k):
    model = DDP(torch.nn.Linear(2, 1))
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts={k})
    {before}
    for batch in loader:
        with wrapper.optim_context(model):
            loss = model(batch).mean()
        {update}
"""
BY_HAND = """wrapper.backward(wrapper.scale_loss(loss))
        if wrapper.should_update():
            wrapper.step()
            wrapper.zero_grad()"""


def traced(k: str = "k", before: str = "", update: str = "wrapper.update_params(loss)") -> Trace:
    source = parse(LOOP.format(k=k, before=before, update=update).encode(), "train.py")
    assert isinstance(source, Source)
    (trace,) = (each.traces(3)[0] for each in rehearsals(source))
    return trace


@pytest.mark.parametrize("update", ["wrapper.update_params(loss)", BY_HAND])
def test_windows_and_what_the_wrapper_does_in_them(update: str) -> None:
    trace = traced(update=update)
    assert [window.size for window in trace.windows()] == [3, 3]
    assert [event.weight.share for event in trace.of(Kind.BACKWARD) if event.weight is not None] == [Fraction(1, 3)] * 7
    assert [event.sync for event in trace.of(Kind.FORWARD)] == [False, False, True] * 2 + [False]
    assert {event.sync for event in trace.of(Kind.BACKWARD)} == {True}


def test_the_last_window_of_a_run_whose_length_is_told() -> None:
    trace = traced(before="wrapper.initialize_count_status(model, 0, len(loader))")
    assert [window.size for window in trace.windows()] == [3, 3, 1]
    assert [event.weight.share for event in trace.of(Kind.BACKWARD) if event.weight is not None] == [Fraction(1, 3)] * 6 + [1]


def test_a_wrapper_that_does_not_accumulate() -> None:
    trace = traced(k="1")
    assert [window.size for window in trace.windows()] == [1] * 7
    assert {event.weight.share for event in trace.of(Kind.BACKWARD) if event.weight is not None} == {Fraction(1)}


def test_train_step_with_a_wrapper_made_elsewhere() -> None:
    text = """
from mmengine.model import BaseModel

class Net(BaseModel):
    def forward(self, x, mode="loss"):
        return {"loss": self.head(x).mean()}

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            losses = self._run_forward(data, mode="loss")
        loss, log = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log
"""
    source = parse(text.encode(), "model.py")
    assert isinstance(source, Source)
    (trace,) = (each.traces(3)[0] for each in rehearsals(source))
    assert not trace.accumulates
    assert {window.size for window in trace.windows()} == {1}


RUNNER = """
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner

@MODELS.register_module()
class Net(BaseModel):
    def forward(self, x, mode="loss"):
        return {{"loss": self.head(x).mean()}}

@HOOKS.register_module()
class Saving(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.every_n_train_iters(runner, 2):
            runner.save_checkpoint("out", "last.pth")

def main(k, every, loader):
    runner = Runner(
        model={model},
        train_dataloader=loader,
        optim_wrapper=dict(type="{kind}", optimizer=dict(type="SGD", lr=0.1), accumulative_counts={k}, clip_grad=dict(max_norm=1.0)),
        train_cfg=dict(by_epoch=False, max_iters=100),
        custom_hooks=[dict(type="Saving")],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch={by_epoch}, interval={interval})),
    )
    runner.train()
"""


def run(**given: str) -> list[Trace]:
    told = {"model": "Net()", "kind": "OptimWrapper", "k": "k", "by_epoch": "True", "interval": "1"} | given
    source = parse(RUNNER.format(**told).encode(), "train.py")
    assert isinstance(source, Source)
    return [trace for each in rehearsals(source) for trace in each.traces(3)[:1]]


@pytest.mark.parametrize("model", ["Net()", "dict(type='Net')", "dict(type=Net)"])
def test_a_runner_calls_its_model_and_steps_by_its_wrapper(model: str) -> None:
    (trace,) = run(model=model)
    assert [window.size for window in trace.windows()] == [3, 3]
    assert {event.weight.share for event in trace.of(Kind.BACKWARD) if event.weight is not None} == {Fraction(1, 3)}
    assert len(trace.of(Kind.CLIP)) == 2
    assert len(trace.of(Kind.SAVE)) == 3  # by the hook of the source, after every second batch


def test_a_runner_with_a_scaler_unscales_before_it_clips() -> None:
    (trace,) = run(kind="AmpOptimWrapper")
    order = [event.kind for event in trace.events if event.kind in {Kind.UNSCALE, Kind.CLIP, Kind.STEP, Kind.SCALER_UPDATE}]
    assert order == [Kind.UNSCALE, Kind.CLIP, Kind.STEP, Kind.SCALER_UPDATE] * 2


@pytest.mark.parametrize("k", ["1", "None"])
def test_a_runner_that_does_not_accumulate(k: str) -> None:
    assert not any(trace.accumulates for trace in run(k=k))


@pytest.mark.parametrize(
    ("k", "interval", "by_epoch", "inside"),
    [("4", "10", "False", True), ("4", "500", "False", False), ("k", "every", "False", True), ("4", "10", "True", False)],
)
def test_checkpoints_between_the_micro_batches_of_a_window(k: str, interval: str, by_epoch: str, inside: bool) -> None:
    (trace,) = run(k=k, interval=interval, by_epoch=by_epoch)
    assert any("CheckpointHook" in event.text for event in trace.of(Kind.SAVE)) is inside
