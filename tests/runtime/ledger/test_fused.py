"""Fused losses of other libraries, by stand-ins with their modules' names and signatures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.runtime.ledger.observed import observed, only_loss  # noqa: E402

LIGER = """
import torch

class LigerCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _input, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean"):
        with torch.enable_grad():
            x = _input.detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(x, target, reduction=reduction, ignore_index=ignore_index)
            (ctx.gradient,) = torch.autograd.grad(loss, x)
        return loss.detach(), None, None

    @staticmethod
    def backward(ctx, gradient, *others):
        return gradient * ctx.gradient, None, None, None, None, None, None
"""

APEX = """
import torch

class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, smoothing=0.0, padding_idx=0, half_to_float=False):
        ctx.save_for_backward(logits, labels)
        ctx.padding = padding_idx
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=padding_idx)

    @staticmethod
    def backward(ctx, gradient):
        logits, labels = ctx.saved_tensors
        wrong = logits.softmax(1) - torch.nn.functional.one_hot(labels, logits.shape[1])
        return wrong * (gradient * (labels != ctx.padding))[:, None], None, None, None, None
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of a library that is not installed."""
    written: list[str] = []

    def write(name: str, text: str) -> None:
        folder = tmp_path
        for part in name.split(".")[:-1]:
            folder = folder / part
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{name.rpartition('.')[2]}.py").write_text(text)
        written.append(name.partition(".")[0])

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in [each for each in sys.modules if each.partition(".")[0] in written]:
        del sys.modules[name]


@pytest.mark.parametrize("imported_before", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_fused_cross_entropy_counts_once(library: Any, imported_before: bool, reduction: str) -> None:
    library("liger_kernel.ops.cross_entropy", LIGER)
    x, y = torch.randn(5, 3, requires_grad=True), torch.tensor([0, -100, 1, 2, -100])
    if imported_before:
        import liger_kernel.ops.cross_entropy  # type: ignore[import-not-found]  # noqa: F401
    with observed() as recorder:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        loss, _, _ = LigerCrossEntropyFunction.apply(x, y, None, -100, 0.0, 0.0, reduction)
        (loss / 4).backward()
        found = only_loss(recorder)
    assert (found["name"], found["reduction"], found["units"]) == ("LigerCrossEntropyFunction", reduction, 3)
    assert found["high"] == pytest.approx(1 / 12 if reduction == "mean" else 1 / 4)
    assert "apply" not in vars(LigerCrossEntropyFunction)


def test_one_that_gives_a_loss_a_target_leaves_its_own_padding_out(library: Any) -> None:
    library("apex.contrib.xentropy.softmax_xentropy", APEX)
    x, y = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, 1, 2, 0])
    with observed() as recorder:
        from apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss  # type: ignore[import-not-found]

        (SoftmaxCrossEntropyLoss.apply(x, y).sum() / 6).backward()
        found = only_loss(recorder)
    assert (found["reduction"], found["units"], found["elements"]) == ("none", 3, 5)
    assert (found["low"], found["high"]) == (pytest.approx(1 / 6), pytest.approx(1 / 6))
