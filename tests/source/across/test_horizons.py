"""Totals of schedules that advance in every micro-batch, of which no number is known but what they were computed from."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

LOOP = """
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader
    from elsewhere import WarmupCosine, cfg

    def schedule(optimizer, samples):
        return WarmupCosine(optimizer, warmup_steps=cfg.warmup, t_total={total})

    def main(model, dataset, optimizer):
        loader = DataLoader(dataset, batch_size=cfg.batch_size, shuffle=True)
        scheduler = schedule(optimizer, len(dataset))
        seen = 0
        for x, y in loader:
            seen += 1
            (F.cross_entropy(model(x), y) / cfg.accumulation).backward()
            if seen % cfg.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
"""


@pytest.mark.parametrize(
    ("total", "found"),
    [
        ("cfg.epochs * (samples // cfg.batch_size)", False),
        ("cfg.epochs * (samples // cfg.global_batch_size)", True),
        ("cfg.steps", True),
    ],
)
def test_a_length_without_k_counts_micro_batches(lint: Lint, total: str, found: bool) -> None:
    seen = lint({"main.py": LOOP.format(total=total), "elsewhere.py": "from torch.optim.lr_scheduler import LambdaLR as WarmupCosine\n"})
    assert ("ACC305" in {code for _, code, _ in seen}) is found


ENDS = """
    import torch
    import torch.nn.functional as F
    from torch.optim.lr_scheduler import LambdaLR

    def decaying(optimizer, total):
        def rate(step):
            return max(0.0, 1 - step / total)

        return LambdaLR(optimizer, rate)

    def main(model, loader, optimizer, args):
        scheduler = decaying(optimizer, args.max_steps)
        seen = updates = 0
        for x, y in loader:
            seen += 1
            (F.cross_entropy(model(x), y) / args.accumulation).backward()
            if seen % args.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
            scheduler.step()
            if {counter} {comparison} args.max_steps:
                break
"""


@pytest.mark.parametrize(("counter", "comparison", "found"), [("seen", ">=", False), ("seen", "==", False), ("updates", ">=", True)])
def test_what_ends_a_counter_of_micro_batches_is_counted_in_them(lint: Lint, counter: str, comparison: str, found: bool) -> None:
    seen = lint({"main.py": ENDS.format(counter=counter, comparison=comparison)})
    assert ("ACC305" in {code for _, code, _ in seen}) is found
