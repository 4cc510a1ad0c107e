"""Lightning and Fabric: who divides, who unscales, where the window ends."""

from __future__ import annotations

from fractions import Fraction
from textwrap import dedent

import pytest

from accumlint.judge import judge_rehearsal
from accumlint.rule import catalogue
from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind, Trace, Wrapper

MODULE = """
    import lightning as L
    import torch
    import torch.nn.functional as F

    class Net(L.LightningModule):
        def __init__(self, accum):
            super().__init__()
            {mode}
            self.accum = accum
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.layer(x), y)
            {body}

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    trainer = L.Trainer({trainer})
    trainer.fit(Net(4), loader)
"""
MANUAL = """self.manual_backward(loss / self.accum)
            optimizer = self.optimizers()
            if (batch_idx + 1) % self.accum == 0{end}:
                {clip}
                optimizer.step()
                optimizer.zero_grad()"""
FABRIC = """
    import torch
    import torch.nn.functional as F
    from lightning.fabric import Fabric

    def main(fabric, accum):
        model = torch.nn.Linear(4, 2)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for i, (x, y) in enumerate(fabric.setup_dataloaders(loader)):
            with fabric.no_backward_sync(model, enabled=(i + 1) % accum != 0):
                fabric.backward(F.cross_entropy(model(x), y) / accum)
            if (i + 1) % accum == 0:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()

    fabric = Fabric({options})
    fabric.launch(main, args.accum)
"""


def traces(text: str) -> list[Trace]:
    source = parse(dedent(text).encode(), "train.py")
    assert isinstance(source, Source)
    return [trace for rehearsal in rehearsals(source) for trace in rehearsal.traces(3)]


def manual(*, clip: str = "pass", end: str = "", trainer: str = "max_epochs=2") -> Trace:
    body = MANUAL.format(clip=clip, end=end)
    return traces(MODULE.format(mode="self.automatic_optimization = False", body=body, trainer=trainer))[0]


def shape(trace: Trace) -> list[str]:
    kept = (event.kind.value for event in trace.windows()[0].events if event.kind not in {Kind.DATA, Kind.LOSS, Kind.SYNC_OFF, Kind.OPAQUE})
    return list(kept)


def test_the_trainer_divides_and_steps_where_a_module_only_gives_its_loss() -> None:
    [trace] = traces(MODULE.format(mode="", body="return loss", trainer="accumulate_grad_batches=4, max_epochs=1"))
    windows = trace.windows()
    assert [window.size for window in windows] == [3, 3]  # K is rehearsed with 3
    assert {backward.weight.share for window in windows for backward in window.backwards if backward.weight} == {Fraction(1, 3)}
    assert trace.tail() is None


def test_a_division_by_hand_comes_on_top_of_that() -> None:
    body = "return {'loss': loss / self.trainer.accumulate_grad_batches}"
    [trace] = traces(MODULE.format(mode="", body=body, trainer="accumulate_grad_batches=4, max_epochs=1"))
    assert {one.weight.share for one in trace.windows()[0].backwards if one.weight} == {Fraction(1, 9)}


@pytest.mark.parametrize("trainer", ["accumulate_grad_batches=1, max_epochs=1", "max_epochs=1"])
def test_a_trainer_without_accumulation_is_not_played(trainer: str) -> None:
    assert traces(MODULE.format(mode="", body="return loss", trainer=trainer)) == []


def test_nobody_divides_in_manual_optimisation_but_the_module() -> None:
    trace = manual()
    assert shape(trace) == ["forward", "backward"] * 3 + ["step", "zero"]
    assert {one.weight.share for one in trace.windows()[0].backwards if one.weight} == {Fraction(1, 3)}
    assert trace.optimizers[0].name == "optimizer"


def test_the_epoch_of_a_manual_module_leaves_a_rest_unless_the_last_batch_is_asked_for() -> None:
    assert [window.size for window in manual().windows()] == [3, 3, 4, 3]
    assert [window.size for window in manual(end=" or self.trainer.is_last_batch").windows()] == [3, 3, 1, 3, 3, 1]


def test_half_precision_unscales_in_the_step_and_not_in_clip_gradients() -> None:
    trace = manual(clip="self.clip_gradients(optimizer, gradient_clip_val=1.0)", trainer="precision='16-mixed', max_epochs=2")
    assert shape(trace)[-5:] == ["clip", "unscale", "step", "scaler-update", "zero"]
    assert all(backward.scaled for backward in trace.of(Kind.BACKWARD))


def test_fabric_unscales_in_clip_gradients() -> None:
    [trace] = traces(FABRIC.format(options="precision='16-mixed'"))
    assert shape(trace)[-5:] == ["unscale", "clip", "step", "scaler-update", "zero"]


@pytest.mark.parametrize(
    ("options", "wrapper", "optional"),
    [
        ("strategy='ddp', devices=2", Wrapper.DDP, False),
        ("", Wrapper.DDP, True),
        ("strategy='fsdp', devices=8", Wrapper.FSDP1, False),
        ("strategy='deepspeed_stage_2', devices=8", Wrapper.ZERO, False),
        ("strategy=args.strategy", Wrapper.UNKNOWN, True),
    ],
)
def test_the_strategy_chooses_the_wrapper(options: str, wrapper: Wrapper, optional: bool) -> None:
    [trace] = traces(FABRIC.format(options=options))
    model = trace.of(Kind.FORWARD)[0].model
    assert model is not None
    assert (model.wrapper, "optional" in model.options) == (wrapper, optional)


def test_the_context_switches_off_all_but_the_boundary() -> None:
    [trace] = traces(FABRIC.format(options="strategy='ddp', devices=2"))
    assert [backward.sync for backward in trace.windows()[0].backwards] == [False, False, True]


@pytest.mark.parametrize("spelled", ["self.trainer.accumulate_grad_batches", "self.hparams.accumulate_grad_batches"])
def test_a_module_without_its_trainer_divides_by_the_same_k(spelled: str) -> None:
    """A third by hand and a third by the Trainer make a ninth of each target."""
    script = dedent(MODULE).split("trainer =")[0].format(mode="", body=f"return loss / {spelled}")
    source = parse(script.encode(), "net.py")
    assert isinstance(source, Source)
    (rehearsal,) = rehearsals(source)
    trace = rehearsal.traces(3)[0]
    weights = {event.weight.share for event in trace.of(Kind.BACKWARD) if event.weight is not None}
    assert weights == {Fraction(1, 9)}
    assert trace.accumulation is not None
    assert trace.accumulation.text.endswith("accumulate_grad_batches")


UNSEEN_TRAINER = """
    import lightning as L
    import torch
    import torch.nn.functional as F

    class Tagger(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        {override}

        def training_step(self, batch, batch_idx):
            logits = self.layer(batch["x"])
            valid = (batch["y"] != -100).sum()
            loss = F.cross_entropy(logits, batch["y"], ignore_index=-100, reduction="sum") / {count}
            return {{"loss": loss}}
"""


def _noted(source: str) -> set[tuple[str, str, int]]:
    [rehearsal] = rehearsals(parse(dedent(source).encode(), "module.py"))
    findings = judge_rehearsal(rehearsal, catalogue().values())
    return {(finding.code, str(finding.severity), finding.place.line) for finding in findings}


@pytest.mark.parametrize("override", ["", "def backward(self, *args):\n            super().backward(*args)"])
def test_a_module_whose_trainer_lies_elsewhere_is_noted_as_if_it_accumulated(override: str) -> None:
    source = UNSEEN_TRAINER.format(count="valid", override=override)
    line = dedent(source).splitlines().index(next(each for each in dedent(source).splitlines() if "loss = " in each)) + 1
    assert _noted(source) == {("ACC201", "info", line), ("ACC208", "info", line)}


def test_a_module_whose_trainer_lies_elsewhere_may_divide_by_a_fixed_count() -> None:
    assert not _noted(UNSEEN_TRAINER.format(count="512", override=""))


def test_a_trainer_that_is_seen_and_given_no_k_accumulates_nothing() -> None:
    source = UNSEEN_TRAINER.format(count="valid", override="") + '\n    L.Trainer(max_epochs=1, precision="32").fit(Tagger(), loader)\n'
    assert not list(rehearsals(parse(dedent(source).encode(), "module.py")))


def test_an_override_that_goes_backward_by_itself_is_left_alone() -> None:
    source = UNSEEN_TRAINER.format(count="valid", override="def optimizer_step(self, *args):\n            args[2].step()")
    assert not any(rehearsal.traces(3) for rehearsal in rehearsals(parse(dedent(source).encode(), "module.py")))
