"""A trainer that divides by its own count of the labels, which takes in the first one of every row."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from accumlint.cli.rehearsed import rehearsed
from accumlint.rule import catalogue
from accumlint.runtime.measure import Question, measurement
from accumlint.verdict import State, Status, Topic, judged
from tests.runtime.runs import measure

pytest.importorskip("transformers")

ROWS, K, LENGTHS = 2, 3, (5, 8, 6, 9, 4, 7)  # labels of each row of the one window
SCRIPT = f"""
import tempfile
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
torch.set_num_threads(1)
tokens = torch.randint(1, 30, ({len(LENGTHS)}, 10))
rows = []
for row, length in zip(tokens, {LENGTHS}):
    labels = row.clone()
    labels[length:] = -100
    rows.append({{"input_ids": row, "labels": labels}})
config = GPT2Config(vocab_size=30, n_positions=10, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size={ROWS},
    gradient_accumulation_steps={K},
    max_steps=1,
    report_to="none",
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows).train()
"""


def test_the_first_label_of_each_row_is_no_doubt(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    reports = measure(script, reference="exact")
    shown = measurement(reports, Question(1, tuple(catalogue().values())), rehearsed=rehearsed(reports))
    assert shown.findings == ()
    total = shown.check(Topic.SUM)
    assert total is not None
    assert total.state is State.NOT_OBSERVED
    (found,) = total.numbers["sums"]
    counted = sum(LENGTHS)
    assert found == pytest.approx(float(Fraction(counted - len(LENGTHS), counted)), rel=1e-4)
    assert judged(shown).status is Status.CONFIRMED
