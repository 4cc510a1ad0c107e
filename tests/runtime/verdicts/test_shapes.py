"""Loops whose windows have the wrong shape, and right ones whose windows differ in size: no run of a wrong one is confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint.cli.rehearsed import rehearsed
from accumlint.rule import catalogue
from accumlint.runtime.measure import Question, measurement
from accumlint.verdict import Measurement, Status, judged
from tests.runtime.runs import measure

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model, K, done = nn.Linear(2, 1), 4, 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(3, 2), torch.randn(3, 1)) for _ in range(24)]


def update():
    optimizer.step()
    optimizer.zero_grad()


def backward(x, y, share=1 / K):
    (nn.functional.mse_loss(model(x), y) * share).backward()


"""
EACH = "for i, (x, y) in enumerate(data):\n    backward(x, y)\n"
WRONG = {
    "a second modulus": EACH + "    if (i + 1) % K == 0 or (i + 1) % 10 == 0:\n        update()",
    "one more in the first window": EACH + "    if i % K == 0 and i > 0:\n        update()",
    "a bit instead of a remainder": EACH + "    if (i + 1) & K == 0:\n        update()",
    "a listed step too many": EACH + "    if i + 1 in (4, 8, 9, 12, 16, 20, 24):\n        update()",
    "set back to one": EACH + "    done += 1\n    if done == K:\n        update()\n        done = 1",
    "less each time": EACH + "    done += 1\n    if done >= K:\n        update()\n        done, K = 0, K - 1",
    "the divisor and the counter swapped": EACH + "    if K % (i + 1) == 0:\n        update()",
    "twice on the same gradients": EACH + "    if (i + 1) % K == 0:\n        optimizer.step()\n        update()",
    "in each turn of its own loop": (
        "for i in range(0, 24, 4):\n    for x, y in data[i : i + K]:\n"
        "        (nn.functional.mse_loss(model(x), y) / K + nn.functional.l1_loss(model(x), y) / K).backward()\n        update()"
    ),
}
RIGHT = {
    "a tail of its own size": (
        "for epoch in range(2):\n    for i, (x, y) in enumerate(data[:10]):\n"
        "        backward(x, y, 1 / min(K, 10 - i // K * K))\n        if (i + 1) % K == 0 or i == 9:\n            update()"
    ),
    "a division by what there is": "for K in (4, 2, 5, 1, 6, 6):\n    for _ in range(K):\n        backward(*data[done], 1 / K)\n"
    "        done += 1\n    update()",
    "more each time": (
        "for K in (1, 2, 3, 4, 4, 4):\n    for _ in range(K):\n        backward(*data[done], 1 / 4)\n        done += 1\n    update()"
    ),
    "one for each batch": "for x, y in data:\n    backward(x, y, 1 / 2)\n    update()",
    "windows over two passes": (
        "for epoch in range(3):\n    for x, y in data[:10]:\n        backward(x, y)\n        done += 1\n"
        "        if done % K == 0:\n            update()"
    ),
}


def shown(folder: Path, loop: str) -> Measurement:
    script = folder / "train.py"
    script.write_text(HEAD + loop + "\n", encoding="utf-8")
    reports = measure(script)
    assert [report["ended"] for report in reports] == ["script"]
    return measurement(reports, Question(2, tuple(catalogue().values())), rehearsed=rehearsed(reports))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_is_not_confirmed(name: str, tmp_path: Path) -> None:
    assert judged(shown(tmp_path, WRONG[name])).status in {Status.VIOLATED, Status.UNPROVED}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_one_is(name: str, tmp_path: Path) -> None:
    verdict = judged(shown(tmp_path, RIGHT[name]))
    assert verdict.status is Status.CONFIRMED, verdict.reason


def test_a_counter_that_is_not_set_back_is_named(tmp_path: Path) -> None:
    found = shown(tmp_path, EACH + "    done += 1\n    if done >= K:\n        update()").findings
    assert [finding.code for finding in found] == ["ACC306"]
    assert "holds after `K` micro-batches, and from there on in every one" in found[0].message


@pytest.mark.parametrize("every", [3, 6])
def test_clearing_by_another_count_is_no_window_given_up(every: int, tmp_path: Path) -> None:
    loop = EACH + f"    if (i + 1) % K == 0:\n        update()\n    if (i + 1) % {every} == 0:\n        optimizer.zero_grad()"
    assert "ACC302" in {finding.code for finding in shown(tmp_path, loop).findings}
