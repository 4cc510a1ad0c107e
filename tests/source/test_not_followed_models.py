"""What is told by the way in which a model that nobody followed is called."""

from __future__ import annotations

from textwrap import dedent

import pytest

from accumlint.judge import judge_rehearsal
from accumlint.rule import catalogue
from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals

TOLD = """
    def train(model, optimizer, loader, accumulate):
        for index, (ids, labels, {mask}) in enumerate(loader):
            loss, _ = model(ids, labels, {given})
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
TRAINER = """
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            raw = {raw}
            hidden = {called}(inputs["ids"])
            return (hidden - inputs["targets"]).pow(2).sum() / num_items_in_batch * self.accelerator.num_processes

    Own(model=None, args=TrainingArguments("out", gradient_accumulation_steps=4)).train()
"""
ZEROED = """
    def train(model, optimizer, loader, args):
        for index, (x, y) in enumerate(loader):
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            if index % args.accumulate == args.accumulate - 1:
                if args.all_failed == args.world:
                    optimizer.zero_grad()
                    return
                optimizer.step()
                optimizer.zero_grad()
"""
ENGINE = """
    import deepspeed

    class Rlhf:
        def __init__(self, engines, accumulate):
            self.actor_model, self.accumulate = engines.actor, accumulate

        def fit(self, loader):
            for index, batch in enumerate(loader):
                loss = (self.actor_model(batch) - 1).pow(2).mean() / self.accumulate
                self.actor_model.backward(loss)
                {step}
"""


def codes(text: str) -> set[str]:
    source = parse(dedent(text).encode(), "train.py")
    assert isinstance(source, Source)
    found = [judge_rehearsal(rehearsal, catalogue().values()) for rehearsal in rehearsals(source)]
    return {finding.code for findings in found for finding in findings}


@pytest.mark.parametrize("given", ["loss_mask=mask", "masked_weights=mask", "mask, target_mask"])
def test_a_model_that_is_told_which_targets_count_gives_their_mean(given: str) -> None:
    assert codes(TOLD.format(mask="mask", given=given)) == {"ACC201"}


@pytest.mark.parametrize("given", ["mask", "attention_mask=mask"])
def test_a_mask_of_inputs_says_nothing_of_targets(given: str) -> None:
    assert codes(TOLD.format(mask="mask", given=given)) == set()


@pytest.mark.parametrize(
    ("raw", "called"),
    [
        ("self.accelerator.unwrap_model(model)", "raw.model"),
        ("getattr(model.module, 'encoder', model.module)", "raw"),
        ("model.module", "raw.lm_head"),
    ],
)
def test_a_part_of_an_unwrapped_model_goes_round_the_wrapper(raw: str, called: str) -> None:
    assert codes(TRAINER.format(raw=raw, called=called)) == {"ACC108"}


def test_what_is_looked_up_in_an_unwrapped_model_is_no_forward() -> None:
    assert codes(TRAINER.format(raw="self.accelerator.unwrap_model(model).get_scale", called="model")) == set()


def test_what_throws_gradients_away_is_not_what_trains() -> None:
    assert codes(ZEROED) == {"ACC202"}


def test_an_engine_is_known_by_the_name_that_it_is_used_by() -> None:
    assert codes(ENGINE.format(step="self.actor_model.step()")) == {"ACC206"}
