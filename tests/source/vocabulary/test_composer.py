"""Composer's Trainer: how it weighs micro-batches, when it accumulates, and which of its events come how often."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from accumlint.findings import Severity
from accumlint.judge import judge
from accumlint.rule import catalogue
from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind, Trace

PROGRAM = """
import torch
from composer import Algorithm, Callback, Event, Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader

class Net(ComposerModel):
    def forward(self, batch):
        return self.head(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

class Each(Callback):
    def {hook}(self, state, logger):
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)

class Matched(Algorithm):
    def match(self, event, state):
        return {match}

    def apply(self, event, state, logger):
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 2.0)

def main(data, size, micro):
    model = Net()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=size),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Each()],
        algorithms=Matched(),
        {given}
    )
    trainer.fit()
"""


def traces(given: str, hook: str = "batch_end", match: str = "False") -> list[Trace]:
    source = parse(PROGRAM.format(given=given, hook=hook, match=match).encode(), "train.py")
    assert isinstance(source, Source)
    return [trace for each in rehearsals(source) for trace in each.traces(3)[:1]]


@pytest.mark.parametrize("given", ["device_train_microbatch_size=micro", "device_train_microbatch_size='auto'", "grad_accum=4"])
def test_a_window_is_a_batch_and_each_micro_batch_has_its_share(given: str) -> None:
    (trace,) = traces(given)
    sizes = {window.size for window in trace.windows()}
    (size,) = sizes
    assert size > 1
    assert {event.weight.share for event in trace.of(Kind.BACKWARD) if event.weight is not None} == {Fraction(1, size)}
    assert len(trace.of(Kind.ZERO)) == len(trace.of(Kind.STEP)) == 2


@pytest.mark.parametrize("given", ["", "device_train_microbatch_size=None", "device_train_microbatch_size=size"])
def test_whole_batches_do_not_accumulate(given: str) -> None:
    assert not any(trace.accumulates for trace in traces(given))


@pytest.mark.parametrize(
    ("hook", "match", "clips"),
    [
        ("after_train_batch", "False", 2),
        ("after_backward", "False", 6),
        ("eval_end", "event == Event.AFTER_TRAIN_BATCH", 2),
        ("eval_end", "event in (Event.AFTER_LOSS, Event.AFTER_BACKWARD)", 12),
        ("eval_end", "event == Event.BATCH_END and self.begun", 0),
    ],
)
def test_what_waits_for_an_event_is_called_as_often_as_it_comes(hook: str, match: str, clips: int) -> None:
    (trace,) = traces("device_train_microbatch_size=micro", hook, match)
    assert len(trace.of(Kind.CLIP)) == clips


@pytest.mark.parametrize(
    ("required", "severity"),
    [("mosaicml==0.22.0", Severity.INFO), ("mosaicml==0.32.1", Severity.ERROR), ("mosaicml>=0.20", Severity.ERROR)],
)
def test_means_of_means_where_tokens_could_be_counted(tmp_path: Path, required: str, severity: Severity) -> None:
    fixture = Path(__file__).resolve().parents[3] / "fixtures" / "acc201_mean_of_means" / "bad_composer_samples.py"
    (tmp_path / "requirements.txt").write_text(required + "\n")
    path = tmp_path / "train.py"
    path.write_text(fixture.read_text())
    source = parse(path.read_bytes(), str(path))
    assert isinstance(source, Source)
    found = [finding for each in rehearsals(source) for trace in each.traces(3)[:1] for finding in judge(trace, catalogue().values())]
    assert {finding.severity for finding in found if finding.code == "ACC201"} == {severity}
