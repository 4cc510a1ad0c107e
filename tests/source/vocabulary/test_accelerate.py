"""Accelerate: what only a GPU run or an odd setting shows, so that no fixture can."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint.linter import lint_file

HEAD = """
import torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

def main(loader, args):
    accelerator = Accelerator({settings})
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    a, b, {prepared}, loader = accelerator.prepare(a, b, {prepared}, loader)
    for epoch in range(3):
        for i, batch in enumerate(loader):
"""
UPDATE = """
optimizer.step()
optimizer.zero_grad()
"""


def found(tmp_path: Path, body: str, settings: str = "gradient_accumulation_steps=args.k", prepared: str = "optimizer") -> list[str]:
    lines = [" " * 12 + line for line in body.strip("\n").split("\n")]
    path = tmp_path / "train.py"
    path.write_text(HEAD.format(settings=settings, prepared=prepared) + "\n".join(lines) + "\n", encoding="utf-8")
    return sorted({finding.code for finding in lint_file(str(path))})


def in_window(*statements: str) -> str:
    body = ["with accelerator.accumulate(a, b):", "    accelerator.backward(b(a(batch)).square().mean())"]
    return "\n".join(body + ["    " + line for statement in statements for line in statement.strip("\n").split("\n")])


FP16 = 'gradient_accumulation_steps=args.k, mixed_precision="fp16"'
CLIP = "if accelerator.sync_gradients:\n    accelerator.clip_grad_norm_(a.parameters(), 1.0)"
CLIP_BOTH = CLIP + "\n    accelerator.clip_grad_norm_(b.parameters(), 1.0)"
CLIP_RAW = "if accelerator.sync_gradients:\n    torch.nn.utils.clip_grad_norm_(a.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("statements", "settings", "expected"),
    [
        ((CLIP, UPDATE), FP16, []),
        ((CLIP_BOTH, UPDATE), FP16, ["ACC401"]),
        ((CLIP_BOTH, UPDATE), "gradient_accumulation_steps=args.k, mixed_precision=args.precision", ["ACC401"]),
        ((CLIP_BOTH, UPDATE), 'gradient_accumulation_steps=args.k, mixed_precision="bf16"', []),
        ((CLIP_RAW, UPDATE), FP16, ["ACC403"]),
        ((CLIP_RAW, UPDATE), "gradient_accumulation_steps=args.k", []),
    ],
    ids=["one clip", "two clips", "two clips, fp16 by choice", "two clips, bf16", "clip still scaled", "clip, no fp16 in sight"],
)
def test_the_scaler_of_fp16(tmp_path: Path, statements: tuple[str, ...], settings: str, expected: list[str]) -> None:
    assert found(tmp_path, in_window(*statements), settings) == expected


def test_a_raw_optimizer_bypasses_the_scaler(tmp_path: Path) -> None:
    body = "accelerator.backward(b(a(batch)).square().mean())\noptimizer.step()\noptimizer.zero_grad()"
    assert found(tmp_path, body, 'mixed_precision="fp16"', "schedule") == ["ACC405"]
    assert found(tmp_path, body, 'mixed_precision="fp16"', "optimizer") == []


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [("num_steps=args.k", []), ("num_steps=args.k, sync_with_dataloader=False", []), ("num_steps=1", [])],
)
def test_a_plugin_gives_k(tmp_path: Path, plugin: str, expected: list[str]) -> None:
    settings = f"gradient_accumulation_plugin=GradientAccumulationPlugin({plugin})"
    assert found(tmp_path, in_window(CLIP, UPDATE), settings) == expected
    assert found(tmp_path, in_window("optimizer.zero_grad()", "optimizer.step()"), settings) == (
        [] if plugin == "num_steps=1" else ["ACC302"]
    )


def test_a_scheduler_that_does_not_follow_the_optimizer_moves_in_every_micro_batch(tmp_path: Path) -> None:
    body = in_window("optimizer.step()", "schedule.step()", "optimizer.zero_grad()")
    alone = "gradient_accumulation_steps=args.k, step_scheduler_with_optimizer=False"
    assert found(tmp_path, body, prepared="optimizer, schedule") == []
    assert found(tmp_path, body, alone, "optimizer, schedule") == ["ACC305"]


def test_no_k_is_no_window(tmp_path: Path) -> None:
    assert found(tmp_path, in_window("accelerator.clip_grad_norm_(a.parameters(), 1.0)", UPDATE), "") == []


def test_a_model_that_takes_no_gradient_may_be_left_out(tmp_path: Path) -> None:
    body = (
        "with accelerator.accumulate(a):\n    accelerator.backward({loss}.square().mean())\n    optimizer.step()\n    optimizer.zero_grad()"
    )
    assert found(tmp_path, body.format(loss="b(a(batch))")) == ["ACC109"]
    assert found(tmp_path, "b.requires_grad_(False)\n" + body.format(loss="b(a(batch))")) == []


def test_an_accelerator_that_is_handed_over_is_known_by_name_and_use(tmp_path: Path) -> None:
    path = tmp_path / "steps.py"
    path.write_text(
        "def fit(accelerator, model, optimizer, loader):\n"
        "    for x, y in loader:\n"
        "        with accelerator.accumulate(model):\n"
        "            loss = (model(x) - y).square().mean()\n"
        "            accelerator.backward(loss)\n"
        "            accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n",
        encoding="utf-8",
    )
    assert [(finding.code, finding.place.line) for finding in lint_file(str(path))] == [("ACC304", 6)]


ACCURACY = """
total = torch.zeros(())
with accelerator.accumulate(a, b):
    logits = b(a(batch))
    accelerator.backward(logits.square().mean())
    hits = (logits > 0).sum().float() / logits.size(0)
    hits += 0.5 * (logits == 0).sum().float() / logits.size(0)
    optimizer.step()
    optimizer.zero_grad()
"""
PARTS = """
with accelerator.accumulate(a, b):
    encoded = [part(batch) for part in (a, b)]
    loss = (encoded[0] - encoded[1]).square().mean()
    prior = encoded[0].square().mean()
    loss = loss + 0.1 * prior
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
PLUGIN = """
with accelerator.accumulate(a, b):
    accelerator.backward(b(a(batch)).square().mean())
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(a.parameters(), 1.0)
    if accelerator.state.deepspeed_plugin is None:
        optimizer.step()
        optimizer.zero_grad()
"""
ALTERNATING = """
with accelerator.accumulate(a, b):
    accelerator.backward(b(a(batch)).square().mean())
    if (i // args.k) % 2 == 0:
        optimizer.step()
    else:
        optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("body", [ACCURACY, PARTS, PLUGIN, ALTERNATING], ids=["accuracy", "parts", "plugin", "alternating"])
def test_nothing_is_said_of_loops_that_are_right(tmp_path: Path, body: str) -> None:
    assert found(tmp_path, body) == []


def test_a_table_of_models_is_not_wrapped_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text(
        "from accelerate import Accelerator\n"
        "def fit(build, loader, optimizer, k):\n"
        "    accelerator = Accelerator(gradient_accumulation_steps=k)\n"
        "    model = build()\n"
        "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "    for key in model:\n"
        "        model[key].train()\n"
        "    for x, y in loader:\n"
        "        loss = (model.decoder(model.encoder(x)) - y).square().mean()\n"
        "        with accelerator.accumulate(model.decoder):\n"
        "            accelerator.backward(loss)\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n",
        encoding="utf-8",
    )
    assert "ACC108" not in [finding.code for finding in lint_file(str(path))]


PARTS = """
for part in batch.chunk(4):
    with accelerator.accumulate(a, b):
        accelerator.backward(b(a(part)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
COUNTED = "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=args.k, sync_with_dataloader=False)"


@pytest.mark.parametrize(
    ("body", "settings", "expected"),
    [
        (PARTS, "gradient_accumulation_steps=args.k", ["ACC320"]),
        (PARTS, "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=args.k)", ["ACC320"]),
        (PARTS, COUNTED, []),
        (PARTS, "gradient_accumulation_plugin=args.plugin", []),
        (PARTS, "**args.accelerate", []),
        ("stream: torch.utils.data.IterableDataset = batch" + PARTS, "gradient_accumulation_steps=args.k", []),
        (in_window(UPDATE), "gradient_accumulation_steps=args.k", []),
    ],
    ids=["parts", "plugin", "count alone", "unknown plugin", "unknown settings", "no last batch", "whole batches"],
)
def test_parts_of_the_last_batch_are_updates_of_their_own(tmp_path: Path, body: str, settings: str, expected: list[str]) -> None:
    assert found(tmp_path, body, settings) == expected
