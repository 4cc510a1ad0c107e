"""mmcv's optimizer hooks: the runner calls the model, which a launcher may have wrapped, and then the hook."""

from __future__ import annotations

import pytest

from accumlint.findings import Severity
from accumlint.rules.acc103_sync_every_micro_batch import check
from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind, Trace, Wrapper

HOOK = """
from mmcv.runner import HOOKS, OptimizerHook

@HOOKS.register_module()
class CumulativeHook(OptimizerHook):
    def __init__(self, interval=1):
        self.interval = interval

    def after_train_iter(self, runner):
        {divide}
        runner.outputs["loss"].backward()
        {test}
            runner.optimizer.step()
            runner.optimizer.zero_grad()
"""


def traced(divide: str = 'runner.outputs["loss"] /= self.interval', test: str = "if self.every_n_iters(runner, self.interval):") -> Trace:
    source = parse(HOOK.format(divide=divide, test=test).encode(), "hook.py")
    assert isinstance(source, Source)
    (trace,) = (each.traces(3)[0] for each in rehearsals(source))
    return trace


@pytest.mark.parametrize("test", ["if self.every_n_iters(runner, self.interval):", "if (runner.iter + 1) % self.interval == 0:"])
def test_the_model_goes_forward_before_the_hook(test: str) -> None:
    trace = traced(test=test)
    assert [event.kind for event in trace.events if event.kind in {Kind.FORWARD, Kind.BACKWARD}] == [Kind.FORWARD, Kind.BACKWARD] * 7
    assert {event.sync for event in trace.of(Kind.BACKWARD)} == {True}
    assert {event.model.wrapper for event in trace.of(Kind.FORWARD) if event.model is not None} == {Wrapper.DDP}
    assert [window.size for window in trace.windows()] == [3, 3]


def test_the_reductions_are_an_information_for_a_launcher_wraps_the_model() -> None:
    found = list(check.check(traced()))
    assert {(each.code, each.severity) for each in found} == {("ACC103", Severity.INFO)}
    assert {each.place.line for each in found} == {11}


def test_a_hook_that_steps_each_time_does_not_accumulate() -> None:
    assert list(check.check(traced(divide="pass", test="if True:"))) == []
