"""The rules about numbers in the wrong unit and about the limits of accumulation, on small loops."""

from __future__ import annotations

import pytest

from accumlint.config import Settings
from accumlint.linter import lint_data

LOOP = """
import torch
from torch import nn
from torch.optim.lr_scheduler import *
HEAD
def main(args, loader, criterion):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = args.updates
    BEFORE
    for epoch in range(args.epochs):
        for i, x in enumerate(loader):
            FIRST
            loss = criterion(model(x), x)
            (loss / args.accum_steps).backward()
            if (i + 1) % args.accum_steps == 0:
                optimizer.step()
                INSIDE
                optimizer.zero_grad()
                updates += 1
            AFTER
"""


def found(code: str, *, head: str = "", before: str = "pass", first: str = "pass", inside: str = "pass", after: str = "pass") -> list[int]:
    source = LOOP
    for name, text in (("HEAD", head), ("BEFORE", before), ("FIRST", first), ("INSIDE", inside), ("AFTER", after)):
        source = source.replace(name, text)
    examined, warnings = lint_data("/loop.py", source.encode(), Settings())
    assert not warnings
    return [finding.place.line for finding in examined.findings if finding.code == code and int(finding.confidence) == 2]


STEP = "scheduler.step()"


@pytest.mark.parametrize(
    "made",
    [
        "scheduler = CosineAnnealingLR(optimizer, args.epochs * len(loader))",
        "scheduler = CosineAnnealingLR(optimizer, T_max=len(loader) * args.epochs)",
        "scheduler = OneCycleLR(optimizer, 0.1, epochs=args.epochs, steps_per_epoch=len(loader))",
        "total = args.epochs * len(loader); scheduler = get_linear_schedule_with_warmup(optimizer, 100, total)",
        "scheduler = get_scheduler('cosine', optimizer, num_warmup_steps=0, num_training_steps=args.epochs * len(loader))",
        "n = len(loader) // args.accum_steps; scheduler = LinearLR(optimizer, total_iters=n * args.accum_steps)",
    ],
)
def test_totals_in_micro_batches(made: str) -> None:
    assert found("ACC316", before=made, inside=STEP) == [10]
    assert found("ACC316", before=made, after=STEP) == []


@pytest.mark.parametrize(
    "made",
    [
        "scheduler = CosineAnnealingLR(optimizer, args.epochs * len(loader) // args.accum_steps)",
        "scheduler = CosineAnnealingLR(optimizer, T_max=args.total)",
        "scheduler = StepLR(optimizer, step_size=len(loader))",
        "total = len(loader); total = total // args.accum_steps; scheduler = CosineAnnealingLR(optimizer, total)",
        "scheduler = get_constant_schedule(optimizer)",
    ],
)
def test_totals_that_are_right_or_unclear(made: str) -> None:
    assert found("ACC316", before=made, inside=STEP) == []


@pytest.mark.parametrize("skip", ["if i < updates: continue", "if epoch == 0 and i < start: continue", "if start > i: continue"])
def test_skips_in_updates(skip: str) -> None:
    assert found("ACC317", before="start = updates", first=skip) == [13]


@pytest.mark.parametrize(
    ("before", "skip"),
    [
        ("start = updates * args.accum_steps", "if i < start: continue"),
        ("start = args.start", "if i < start: continue"),
        ("start = updates", "if start: print(start)"),
        ("start = updates", "if i < args.limit: continue"),
    ],
)
def test_skips_that_are_right_or_unclear(before: str, skip: str) -> None:
    assert found("ACC317", before=before, first=skip) == []


DISTRIBUTED = "import torch.distributed as dist; dist.init_process_group('nccl')"


@pytest.mark.parametrize(
    ("derived", "expected"),
    [
        ("args.accum_steps = args.global_batch_size // args.batch_size", [10]),
        ("args.accum_steps = max(1, args.total_batch_size // args.micro_batch_size)", [10]),
        ("args.accum_steps = args.global_batch_size // (args.batch_size * dist.get_world_size())", []),
        ("args.accum_steps = args.global_batch_size // args.world_size // args.batch_size", []),
        ("args.global_batch_size //= args.num_gpus; args.accum_steps = args.global_batch_size // args.batch_size", []),
        ("args.accum_steps = args.global_batch_size // args.batch_size; args.accum_steps //= world_size", []),
        ("args.accum_steps = args.batch_size // args.micro_batch_size", []),
    ],
)
def test_k_from_a_global_batch(derived: str, expected: list[int]) -> None:
    assert found("ACC321", head=DISTRIBUTED, before=derived) == expected
    assert found("ACC321", before=derived) == []


def test_a_rate_of_the_loss_is_noted_only_where_it_is_logged() -> None:
    divided = "loss = loss / args.accum_steps\n            "
    assert found("ACC214", after=f"{divided}print(loss.item())") == [22]
    assert found("ACC214", after=f"{divided}print(loss.item() * args.accum_steps)") == []
    assert found("ACC214", after="print(loss.item())") == []


def test_normalisation_over_the_batch() -> None:
    made = "norm = nn.BatchNorm1d(2)"
    frozen = f"{made}\n    for part in model.modules():\n        if isinstance(part, nn.BatchNorm1d): part.eval()"
    assert found("ACC211", before=made) == [10]
    assert found("ACC211", before="norm = nn.GroupNorm(1, 2)") == []
    assert found("ACC211", before=frozen) == []


@pytest.mark.parametrize(
    ("cast", "expected"),
    [
        ("model.half()", [10]),
        ("model = model.to(torch.bfloat16)", [10]),
        ("model = model.to(device='cuda', dtype=torch.bfloat16)", [10]),
        ("teacher.half()", []),
        ("model.to(torch.float32)", []),
        ("model.to('cuda')", []),
    ],
)
def test_models_of_half_precision(cast: str, expected: list[int]) -> None:
    assert found("ACC318", before=cast) == expected
