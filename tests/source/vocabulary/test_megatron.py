"""Megatron's schedule: what is said of a loss function that a forward step gives, by what it returns."""

from __future__ import annotations

from textwrap import dedent

import pytest

from accumlint.judge import judge_rehearsal
from accumlint.rule import catalogue
from accumlint.source.reading.parse import parse
from accumlint.source.rehearsal.rehearse import rehearsals

STEP = """
    from functools import partial

    import torch
    from megatron.training import pretrain

    def loss_func(loss_mask, output_tensor):
        losses = output_tensor.float().view(-1)
        loss_mask = loss_mask.view(-1).float()
        {loss}
        return {returned}

    def forward_step(data_iterator, model):
        data = next(data_iterator)
        output_tensor = model(data["text"], labels=data["labels"])
        return output_tensor, partial(loss_func, data["loss_mask"])

    pretrain(datasets, model_provider, forward_step)
"""
MEAN = "loss = torch.sum(losses * loss_mask) / loss_mask.sum()"
GUARDED = "loss = torch.sum(losses * loss_mask) / loss_mask.sum().clamp(min=1)"


def noted(loss: str, returned: str) -> set[tuple[str, str, int]]:
    source = dedent(STEP.format(loss=loss, returned=returned))
    findings = [
        finding
        for rehearsal in rehearsals(parse(source.encode(), "pretrain.py"))
        for finding in judge_rehearsal(rehearsal, catalogue().values())
    ]
    return {(finding.code, str(finding.severity), finding.place.line) for finding in findings}


@pytest.mark.parametrize(
    ("loss", "codes"),
    [(MEAN, {("ACC201", "info", 10), ("ACC208", "info", 10)}), (GUARDED, {("ACC201", "info", 10)}), ("loss = losses.mean()", set())],
)
def test_a_loss_with_its_report_is_divided_by_the_number_of_micro_batches(loss: str, codes: set[tuple[str, str, int]]) -> None:
    assert noted(loss, '(loss, {"lm loss": loss.detach()})') == codes


def test_a_sum_with_its_number_of_tokens_is_divided_by_that() -> None:
    assert noted("total = torch.sum(losses * loss_mask)", "(total, loss_mask.sum(), {})") == set()
