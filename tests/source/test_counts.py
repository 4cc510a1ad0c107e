"""What a sum of counts counts: the targets of a micro-batch, or those of a window."""

from __future__ import annotations

import pytest

from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind
from accumlint.weight import Quantity

HEADS = """
import torch
from torch.nn import functional as F

def train(model, batches, optimizer, accumulation_steps):
    {start}
    for number, (x, words, tones) in enumerate(batches):
        left, right = model(x)
        {count}
        loss = F.cross_entropy(left, words, reduction="sum") + F.cross_entropy(right, tones, reduction="sum")
        (loss / {divisor}).backward()
        if (number + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
BOTH = "of_words, of_tones = (words != -100).sum(), (tones != -100).sum()"


@pytest.mark.parametrize(
    ("start", "count", "divisor", "expected"),
    [
        ("pass", BOTH, "(of_words + of_tones)", Quantity.UNITS),
        ("seen = 0", "seen = seen + (words != -100).sum()", "seen", Quantity.WINDOW_UNITS),
    ],
)
def test_counts_of_one_turn_are_of_one_micro_batch(start: str, count: str, divisor: str, expected: Quantity) -> None:
    source = parse(HEADS.format(start=start, count=count, divisor=divisor).encode(), "train.py")
    assert isinstance(source, Source)
    (rehearsal,) = rehearsals(source)
    last = rehearsal.traces(3)[0].of(Kind.BACKWARD)[2]
    assert last.weight is not None
    counts = {factor.quantity for factor in last.weight.factors if factor.power < 0 and not factor.implicit}
    assert counts == {expected}


@pytest.mark.parametrize(("added", "guarded"), [("cfg['eps']", True), ("args.eps", True), ("1e-8", True), ("cfg['offset']", False)])
def test_what_is_added_keeps_a_count_from_zero(added: str, guarded: bool) -> None:
    count = f"seen = (words != -100).sum() + {added}"
    source = parse(HEADS.format(start="pass", count=count, divisor="seen").encode(), "train.py")
    assert isinstance(source, Source)
    (rehearsal,) = rehearsals(source)
    weight = rehearsal.traces(3)[0].of(Kind.BACKWARD)[0].weight
    assert weight is not None
    assert {factor.guarded for factor in weight.factors if factor.power < 0 and not factor.implicit} == {guarded}


SUMMED = """
import torch
from torch.nn import functional as F

def train(model, batches, optimizer, accumulation_steps):
    total = 0
    for number, (x, y) in enumerate(batches):
        total = total + F.cross_entropy(model(x), y) / accumulation_steps
        if (number + 1) % accumulation_steps == 0:
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = 0
"""


def test_a_loss_that_is_formed_where_it_is_added_goes_forward_once() -> None:
    source = parse(SUMMED.encode(), "train.py")
    assert isinstance(source, Source)
    (rehearsal,) = rehearsals(source)
    first = rehearsal.traces(3)[0].windows()[0]
    assert len(first.of(Kind.FORWARD)) == 3
    assert len(first.of(Kind.RETAIN)) == 2
