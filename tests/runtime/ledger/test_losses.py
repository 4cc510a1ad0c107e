"""Units and coefficients of every loss function, against unit losses that are written out here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from tests.runtime.ledger.observed import observed, only_loss  # noqa: E402


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(), dtype=torch.float64)


SCORES, CLASSES = (6, 3), torch.tensor([0, 2, -100, 1, 1, -100])
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
VALID = CLASSES != -100
PROBABILITIES = normal(6, 3).softmax(1)
GRID = normal(6, 3).sigmoid()
SIGNS = torch.where(GRID > 0.5, 1.0, -1.0).double()


def picked(x: torch.Tensor) -> torch.Tensor:
    """Minus the log-probability of each valid target."""
    return -x.log_softmax(1)[VALID].gather(1, CLASSES[VALID, None])[:, 0]


def smoothed(x: torch.Tensor) -> torch.Tensor:
    return 0.9 * picked(x) + 0.1 * -x.log_softmax(1)[VALID].mean(1)


def weighted(x: torch.Tensor) -> torch.Tensor:
    return picked(x) * CLASS_WEIGHT[CLASSES[VALID]]


def smooth_l1(difference: torch.Tensor) -> torch.Tensor:
    size = difference.abs()
    return torch.where(size < 1, 0.5 * size**2, size - 0.5)


def binary(p: torch.Tensor) -> torch.Tensor:
    return -(GRID * p.log() + (1 - GRID) * (1 - p).log())


def multi_margin(x: torch.Tensor) -> torch.Tensor:
    target = CLASSES.clamp(min=0)
    right = x.gather(1, target[:, None])
    others = torch.arange(3) != target[:, None]
    return (((1 - right + x).clamp(min=0)) * others).sum(1) / 3


Case = tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], torch.Tensor], float]
# The call, the losses of its units (whose sum is the loss of `reduction="sum"`), and what the mean divides by.
CASES: dict[str, Case] = {
    "cross_entropy": (lambda x, **o: F.cross_entropy(x, CLASSES, **o), picked, 4),
    "cross_entropy, smoothed": (lambda x, **o: F.cross_entropy(x, CLASSES, label_smoothing=0.1, **o), smoothed, 4),
    "cross_entropy, class weights": (
        lambda x, **o: F.cross_entropy(x, CLASSES, weight=CLASS_WEIGHT, **o),
        weighted,
        float(CLASS_WEIGHT[CLASSES[VALID]].sum()),
    ),
    "cross_entropy, probabilities": (
        lambda x, **o: F.cross_entropy(x, PROBABILITIES, **o),
        lambda x: -(PROBABILITIES * x.log_softmax(1)).sum(1),
        6,
    ),
    "nll_loss": (lambda x, **o: F.nll_loss(x.log_softmax(1), CLASSES, **o), picked, 4),
    "mse_loss": (lambda x, **o: F.mse_loss(x, GRID, **o), lambda x: (x - GRID) ** 2, 18),
    "l1_loss": (lambda x, **o: F.l1_loss(x, GRID, **o), lambda x: (x - GRID).abs(), 18),
    "smooth_l1_loss": (lambda x, **o: F.smooth_l1_loss(x, GRID, **o), lambda x: smooth_l1(x - GRID), 18),
    "huber_loss": (lambda x, **o: F.huber_loss(x, GRID, **o), lambda x: smooth_l1(x - GRID), 18),
    "binary_cross_entropy": (lambda x, **o: F.binary_cross_entropy(x.sigmoid(), GRID, **o), lambda x: binary(x.sigmoid()), 18),
    "binary_cross_entropy_with_logits": (
        lambda x, **o: F.binary_cross_entropy_with_logits(x, GRID, **o),
        lambda x: binary(x.sigmoid()),
        18,
    ),
    "soft_margin_loss": (lambda x, **o: F.soft_margin_loss(x, SIGNS, **o), lambda x: (1 + (-SIGNS * x).exp()).log(), 18),
    "multi_margin_loss": (lambda x, **o: F.multi_margin_loss(x, CLASSES.clamp(min=0), **o), multi_margin, 6),
    "kl_div": (lambda x, **o: F.kl_div(x.log_softmax(1), GRID, **o), lambda x: GRID * (GRID.log() - x.log_softmax(1)), 18),
    "poisson_nll_loss": (lambda x, **o: F.poisson_nll_loss(x, GRID, **o), lambda x: x.exp() - GRID * x, 18),
    "hinge_embedding_loss": (
        lambda x, **o: F.hinge_embedding_loss(x, SIGNS, **o),
        lambda x: torch.where(SIGNS > 0, x, (1 - x).clamp(min=0)),
        18,
    ),
    "margin_ranking_loss": (
        lambda x, **o: F.margin_ranking_loss(x, GRID, SIGNS, margin=0.3, **o),
        lambda x: (-SIGNS * (x - GRID) + 0.3).clamp(min=0),
        18,
    ),
    "triplet_margin_loss": (
        lambda x, **o: F.triplet_margin_loss(x, GRID, SIGNS, **o),
        lambda x: (1 + (x - GRID + 1e-6).norm(dim=1) - (x - SIGNS + 1e-6).norm(dim=1)).clamp(min=0),
        6,
    ),
    "cosine_embedding_loss": (
        lambda x, **o: F.cosine_embedding_loss(x, GRID, torch.ones(6), **o),
        lambda x: 1 - (x * GRID).sum(1) / (x.norm(dim=1) * GRID.norm(dim=1)),
        6,
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_coefficient_times_that_of_the_sum_of_unit_losses(name: str, reduction: str) -> None:
    call, unit_losses, divisor = CASES[name]
    x = normal(*SCORES).requires_grad_()
    with observed() as recorder:
        loss = call(x, reduction=reduction)
        root = (loss.mean() if reduction == "none" else loss) * 3 / 7
        root.backward()
        found = only_loss(recorder)
    assert found["name"] == name.split(",")[0]
    assert found["reduction"] == reduction
    assert found["low"] == pytest.approx(found["high"], rel=1e-12)
    expected = {"mean": 3 / 7 / divisor, "sum": 3 / 7, "none": 3 / 7 / loss.numel()}[reduction]
    assert found["high"] == pytest.approx(expected, rel=1e-12)
    assert found["units"] == pytest.approx(divisor, rel=1e-12)
    operands = [["mul", 3.0], ["div", 7.0]]
    assert found["operands"] == ([["div", float(loss.numel())], *operands] if reduction == "none" else operands)
    (independent,) = torch.autograd.grad(unit_losses(x).sum(), x)
    torch.testing.assert_close(x.grad, found["high"] * independent, rtol=1e-10, atol=1e-12)


def test_huber_with_a_weight_divides_by_the_number_of_elements() -> None:
    x, weight = normal(6, 3).requires_grad_(), GRID + 0.1
    with observed() as recorder:
        F.huber_loss(x, SIGNS, weight=weight).backward()
        found = only_loss(recorder)
    assert (found["units"], found["low"], found["high"]) == (18, pytest.approx(1 / 18), pytest.approx(1 / 18))


def test_elements_that_are_broadcast_are_counted() -> None:
    x = normal(6, 1).requires_grad_()
    with observed() as recorder:
        with pytest.warns(UserWarning, match="broadcasting"):
            F.mse_loss(x, GRID).backward()
        found = only_loss(recorder)
    assert (found["units"], found["elements"], found["sequences"], found["high"]) == (18, 18, 6, pytest.approx(1 / 18))


@pytest.mark.parametrize(("reduction", "low", "high"), [("mean", 1 / 2, 1 / 2), ("sum", 1, 1), ("none", 2, 2)])
def test_a_unit_of_ctc_is_a_sequence_and_its_mean_takes_the_loss_of_one_label(reduction: str, low: float, high: float) -> None:
    x = normal(5, 2, 4).requires_grad_()
    labels, lengths = torch.tensor([[1, 2, 3], [2, 1, 0]]), torch.tensor([3, 2])
    with observed() as recorder:
        loss = F.ctc_loss(x.log_softmax(2), labels, torch.tensor([5, 5]), lengths, reduction=reduction)
        (2 * loss.sum() if reduction == "none" else loss).backward()
        found = only_loss(recorder)
    assert (found["units"], found["low"], found["high"]) == (2, low, high)
    singles = [F.ctc_loss(x[:, [i]].log_softmax(2), labels[[i]], torch.tensor([5]), lengths[[i]], reduction="sum") for i in range(2)]
    unit = sum(single / length for single, length in zip(singles, (3, 2), strict=True)) if reduction == "mean" else sum(singles)
    (independent,) = torch.autograd.grad(unit, x)
    torch.testing.assert_close(x.grad, high * independent, rtol=1e-9, atol=1e-12)


def test_batchmean_shows_in_the_operands() -> None:
    x = normal(6, 3).requires_grad_()
    with observed() as recorder:
        F.kl_div(x.log_softmax(1), GRID, reduction="batchmean").backward()
        found = only_loss(recorder)
    assert (found["reduction"], found["units"], found["operands"]) == ("sum", 18, [["div", 6.0]])
    assert found["high"] == pytest.approx(1 / 6)


def test_a_mask_over_an_unreduced_loss_leaves_only_its_units() -> None:
    x, mask = normal(6, 3).requires_grad_(), torch.tensor([1.0, 0, 1, 1, 0, 1])
    with observed() as recorder:
        ((F.cross_entropy(x, CLASSES, reduction="none") * mask).sum() / mask.sum()).backward()
        found = only_loss(recorder)
    assert (found["units"], found["elements"], found["low"], found["high"]) == (2, 6, 0.25, 0.25)
    assert found["operands"] is None


def test_different_weights_for_the_units_of_an_unreduced_loss_show() -> None:
    x, each = normal(6, 3).requires_grad_(), torch.arange(1.0, 7.0)
    with observed() as recorder:
        (F.cross_entropy(x, CLASSES, reduction="none") * each).sum().backward()
        found = only_loss(recorder)
    assert (found["units"], found["low"], found["high"]) == (4, 1, 5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_call_without_valid_targets_counts_nothing(reduction: str) -> None:
    x = normal(2, 3).requires_grad_()
    with observed() as recorder:
        loss = F.cross_entropy(x, torch.tensor([-100, -100]), reduction=reduction)
        loss.sum().backward()
        found = only_loss(recorder)
    assert (found["units"], found["low"], found["high"], found["elements"]) == (0, 0, 0, 2)
    assert math.isnan(float(loss.sum())) == (reduction == "mean")


def test_sequences_are_the_first_dimension_of_the_targets() -> None:
    x, target = normal(2, 3, 5).requires_grad_(), torch.tensor([[0, 1, 2, -100, 1], [2, 2, -100, -100, 0]])
    with observed() as recorder:
        F.cross_entropy(x, target).backward()
        found = only_loss(recorder)
    assert (found["units"], found["elements"], found["sequences"], found["high"]) == (7, 10, 2, pytest.approx(1 / 7))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no fused linear cross entropy")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_fused_linear_cross_entropy_is_one_loss(reduction: str, chunked: bool) -> None:
    from torch.nn import LinearCrossEntropyOptions

    x, matrix = normal(6, 4).float().requires_grad_(), normal(3, 4).float().requires_grad_()
    options = LinearCrossEntropyOptions() if chunked else None
    with observed() as recorder:
        loss = F.linear_cross_entropy(x, matrix, CLASSES, reduction=reduction, options=options)
        (loss.sum() / 5).backward()
        found = only_loss(recorder)
    assert (found["units"], found["elements"]) == (4, 6)
    expected = {"mean": 1 / 20, "sum": 1 / 5, "none": 1 / 5}[reduction]
    assert (found["low"], found["high"]) == (pytest.approx(expected), pytest.approx(expected))
