"""Losses that are written out: their units and coefficients by arithmetic, and what is no loss of targets."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.runtime.ledger.observed import backwards, observed, only_loss, rows  # noqa: E402
from tests.runtime.ledger.test_book import TARGET, Holding, batch, model  # noqa: E402
from tests.runtime.ledger.test_reference import errors, full, linear, parts  # noqa: E402

Y = torch.linspace(-1, 1, 12).view(4, 3)
MASK = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])  # 6 of 12


def per_token(out: Any) -> Any:
    return (out - Y) ** 2


def log_likelihood(out: Any) -> Any:
    return out.log_softmax(1).gather(1, TARGET.clamp(min=0)[:, None])


Root = Callable[[Any], Any]
# What is trained, then units, elements, coefficient and operands of its one loss.
LOSSES: dict[str, tuple[Root, str, float, int, float, list[list[Any]] | None]] = {
    "mean": (lambda out: per_token(out).mean(), "mean", 12, 12, 1 / 12, []),
    "torch.mean": (lambda out: torch.mean(per_token(out)) / 4, "mean", 12, 12, 1 / 48, [["div", 4.0]]),
    "torch.mean by name": (lambda out: torch.mean(input=per_token(out)), "mean", 12, 12, 1 / 12, []),
    "torch.sum": (lambda out: torch.sum(per_token(out)) * 0.5, "sum", 12, 12, 1 / 2, [["mul", 0.5]]),
    "minus a mean": (lambda out: -log_likelihood(out).mean() / 2, "mean", 4, 4, 1 / 8, [["div", 2.0]]),
    "a mean times -0.1": (lambda out: log_likelihood(out).mean() * -0.1, "mean", 4, 4, 1 / 40, [["mul", 0.1]]),
    "masked by a product": (lambda out: (per_token(out) * MASK).sum() / MASK.sum() / 3, "sum", 6, 12, 1 / 18, [["div", 6.0], ["div", 3.0]]),
    "by a filling": (lambda out: per_token(out).masked_fill(MASK == 0, 0).sum() / 6, "sum", 6, 12, 1 / 6, [["div", 6.0]]),
    "by a choice": (lambda out: torch.where(MASK > 0, per_token(out), 0.0).sum(), "sum", 6, 12, 1, []),
    "by the other choice": (lambda out: torch.where(MASK == 0, torch.zeros(()), per_token(out)).sum(), "sum", 6, 12, 1, []),
    "by two": (lambda out: (per_token(out) * MASK * MASK.flip(1)).sum(), "sum", 4, 12, 1, []),
    "by rows": (lambda out: (0.5 * MASK[:, :1] * per_token(out)).view(-1).sum(), "sum", 9, 12, 1, []),
    "selected": (lambda out: per_token(out)[MASK > 0].mean(), "mean", 6, 6, 1 / 6, []),
    "a sum of a hinge": (lambda out: (out - 10).clamp(min=0).sum() / 12, "sum", 12, 12, 1 / 12, [["div", 12.0]]),
    "samples": (lambda out: per_token(out).sum(1).mean(), "mean", 4, 4, 1 / 4, []),
    "sequences": (lambda out: ((per_token(out) * MASK).sum(-1) / MASK.sum(-1).clamp(min=1)).sum() / 4, "sum", 4, 4, 1 / 4, [["div", 4.0]]),
    "a mean of one mean": (lambda out: per_token(out).mean().mean() / 2, "mean", 12, 12, 1 / 24, [["div", 1.0], ["div", 2.0]]),
    "both dimensions": (lambda out: per_token(out).mean((0, 1)), "mean", 12, 12, 1 / 12, []),
    "the model's output": (lambda out: out.mean(), "mean", 12, 12, 1 / 12, []),
    "expanded": (lambda out: per_token(out).mean().expand(3).sum() / 3, "mean", 12, 12, 1 / 12, None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_hand_has_units_and_a_coefficient(name: str) -> None:
    root, called, units, elements, coefficient, operands = LOSSES[name]
    net, x = model(), batch()
    with observed() as recorder:
        root(net(x)).backward()
        found = only_loss(recorder)
        (row,) = rows(recorder, "loss")
    assert (found["name"], found["reduction"], found["by_hand"]) == (called, called, True)
    assert (found["units"], found["elements"]) == (units, elements)
    assert (found["low"], found["high"]) == (pytest.approx(coefficient), pytest.approx(coefficient))
    assert found["operands"] == (operands if operands is None else [[each, pytest.approx(value)] for each, value in operands])
    assert (found["call"], row.numbers) == (row.index, {"name": called, "reduction": called, "by_hand": True})
    assert recorder.stacks[row.at][0][0] == __file__


def test_a_mask_that_leaves_nothing_counts_nothing() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        ((per_token(net(x)) * (MASK * 0)).sum() / (MASK * 0).sum().clamp(min=1)).backward()
        found = only_loss(recorder)
    assert (found["units"], found["low"], found["high"]) == (0, 0, 0)


def test_the_line_of_the_loss_is_kept_until_the_backward() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        total = torch.zeros(())
        for _ in range(3):
            total = total + per_token(net(x)).mean()
        other = per_token(net(x)).sum()
        (total / 3 + other).backward()
        (numbers,) = backwards(recorder)
    lines = {loss["call"]: recorder.stacks[recorder.rows[loss["call"]].at][0][1] for loss in numbers["losses"]}
    assert len(lines) == 4
    assert len(set(lines.values())) == 2
    assert sorted(loss["high"] for loss in numbers["losses"]) == [*[pytest.approx(1 / 36)] * 3, 1]
    assert numbers["covered"] is True


def test_two_backwards_through_one_loss_by_hand_name_one_call() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        loss = per_token(net(x)).mean()
        loss.backward(retain_graph=True)
        (loss / 4).backward()
        found = [numbers["losses"] for numbers in backwards(recorder)]
    assert [[loss["high"] for loss in losses] for losses in found] == [[pytest.approx(1 / 12)], [pytest.approx(1 / 48)]]
    assert found[0][0]["call"] == found[1][0]["call"]
    assert len(rows(recorder, "loss")) == 1


def test_a_function_that_is_reduced_by_hand_stays_the_functions() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        out = net(x)
        (F.cross_entropy(out, TARGET, reduction="none").sum() / 3 + per_token(out).mean()).backward()
        (numbers,) = backwards(recorder)
    found = {loss["name"]: (loss["units"], loss["high"], loss.get("by_hand", False)) for loss in numbers["losses"]}
    assert found == {"cross_entropy": (3, pytest.approx(1 / 3), False), "mean": (12, pytest.approx(1 / 12), True)}
    assert numbers["covered"] is True


BEGINS = "no recorded loss: the backward begins at "


def slope(net: Any) -> Any:
    x = batch().requires_grad_()
    return torch.autograd.grad(net(x).log_softmax(1)[:, 0].sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("root", "why"),
    [
        (
            lambda net, out: per_token(out).mean() + 0.01 * net[0].weight.pow(2).sum(),
            BEGINS + "PowBackward0",
        ),
        (lambda net, out: F.cross_entropy(out, TARGET) + 0.01 * net[0].weight.pow(2).sum(), "PowBackward0 is no recorded loss"),
        (lambda net, out: F.cross_entropy(out, TARGET) + (net[0].weight.T @ net[0].weight).mean(), "MmBackward0 is no recorded loss"),
        (lambda net, out: sum(each.sum() for each in net.parameters()) * 0.1, BEGINS + "AccumulateGrad"),
        (lambda net, out: (F.cross_entropy(out, TARGET, reduction="none") ** 2).mean(), "PowBackward0 is no recorded loss"),
        (lambda net, out: per_token(out).mean().sqrt(), BEGINS + "SqrtBackward0"),
        (lambda net, out: per_token(out).mean() * out.abs().mean(), BEGINS + "MulBackward0"),
        (lambda net, out: per_token(out).mean() + slope(net).pow(2).sum(), BEGINS + "PowBackward0"),
        (lambda net, out: per_token(out).sum(0).max(), BEGINS + "MaxBackward1"),
    ],
)
def test_what_is_no_loss_of_targets_leaves_the_backward_uncovered(root: Callable[[Any, Any], Any], why: str) -> None:
    net, x = model(), batch()
    with observed() as recorder:
        root(net, net(x)).backward()
        (numbers,) = backwards(recorder)
    assert numbers["covered"] is False
    assert why in numbers["why"]
    assert not any(loss.get("by_hand") for loss in numbers["losses"])


def test_what_the_functions_explain_is_theirs_alone() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        F.cross_entropy(net(x), TARGET, reduction="none").relu().mean().backward()
        found = only_loss(recorder)
    assert (found["name"], found["units"], found["high"]) == ("cross_entropy", 3, 0.25)


class Whole(torch.nn.Module):
    """Its forward is the loss."""

    def __init__(self, penalty: float) -> None:
        super().__init__()
        self.net = model()
        self.penalty = penalty

    def forward(self, x: Any) -> Any:
        loss = per_token(self.net(x)).mean() / 2
        return loss + self.penalty * self.net[0].weight.pow(2).mean() if self.penalty else loss


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_a_loss_inside_of_the_forward_is_one_where_it_depends_on_data(penalty: float) -> None:
    whole, x = Whole(penalty), batch()
    with observed() as recorder:
        (whole(x) / 4).backward()
        (numbers,) = backwards(recorder)
    assert numbers["covered"] is not bool(penalty)
    if not penalty:
        assert [(loss["units"], loss["high"]) for loss in numbers["losses"]] == [(12, pytest.approx(1 / 96))]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_once(reentrant: bool) -> None:
    net, x = model(), batch().requires_grad_()
    with observed() as recorder:
        (checkpoint(lambda x: per_token(net(x)).mean(), x, use_reentrant=reentrant) / 4).backward()
        (inside,) = backwards(recorder)
        (per_token(checkpoint(net, x, use_reentrant=reentrant)).mean() / 4).backward()
        _, outside = backwards(recorder)
    # A reentrant one runs without a graph: no forward is recorded in it.
    assert (inside["covered"], outside["covered"]) == (not reentrant, not reentrant)
    for numbers, operands in ((inside, None), (outside, [["div", 4.0]])):
        found = [(loss["units"], loss["high"], loss["operands"]) for loss in numbers["losses"]]
        assert found == ([] if reentrant else [(12, pytest.approx(1 / 48), operands)])


def test_a_checkpointed_part_of_a_model_keeps_the_units() -> None:
    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Any) -> Any:
            return checkpoint(self.net, x, use_reentrant=False)

    part, x = Part(), batch()
    with observed() as recorder:
        ((per_token(part(x)) * MASK).sum() / MASK.sum()).backward()
        found = only_loss(recorder)
    assert (found["units"], found["high"], found["operands"]) == (6, pytest.approx(1 / 6), [["div", 6.0]])


def test_a_scale_shows_among_the_operands() -> None:
    net, x = model(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with observed() as recorder:
        scaler.scale(-log_likelihood(net(x)).mean() / 2).backward()
        found = only_loss(recorder)
    assert (found["operands"], found["high"]) == ([["div", 2.0], ["mul", 1024.0]], pytest.approx(1024 / 8))


def test_autocast_is_followed() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (per_token(net(x)) * MASK).sum() / MASK.sum()
        loss.backward()
        found = only_loss(recorder)
    assert (found["units"], found["high"]) == (6, pytest.approx(1 / 6))


def test_what_does_not_concern_a_backward_is_not_marked() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        out = net(x)
        stacks = len(recorder.stacks)
        marked = [out.sum(0), out.mean(1, keepdim=True), out.detach().sum(), torch.arange(3).sum(), F.gaussian_nll_loss(out, Y, Y**2 + 1)]
        with torch.no_grad():
            marked.append(out.mean())
        with torch.autograd.graph.save_on_cpu():
            compiled = eval(compile("out.sum()", "<text>", "eval"), {"out": out})
        assert [each.grad_fn.metadata for each in [*marked, compiled] if each.grad_fn is not None] == [{}] * 4
        assert len(recorder.stacks) == stacks
    assert rows(recorder, "loss") == []


def test_the_replacement_is_known_as_what_it_replaces() -> None:
    before = (torch.sum, torch.mean, torch.Tensor.sum, torch.Tensor.mean)
    overridden: dict[Any, str] = {torch.sum: "sum", torch.Tensor.mean: "mean"}
    with observed():
        now = (torch.sum, torch.mean, torch.Tensor.sum, torch.Tensor.mean)
        assert all(one == other and one is not other for one, other in zip(now, before, strict=True))
        assert all(pickle.loads(pickle.dumps(each)) is each and copy.deepcopy(each) is each for each in now)
        assert (overridden[torch.sum], overridden[torch.Tensor.mean]) == ("sum", "mean")
        assert {torch.sum: 1}[before[0]] == 1
        assert torch.sum != torch.mean
        assert torch.jit.script(scripted)(torch.ones(3)) == 4
        assert list(map(torch.Tensor.sum, [torch.ones(2)])) == [2]
    assert (torch.sum, torch.mean, torch.Tensor.sum, torch.Tensor.mean) == before
    assert torch.sum is before[0]
    assert "sum" not in vars(torch.Tensor)


def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.sum(x) + x.mean()


def test_functional_transforms_are_left_alone() -> None:
    weight, x = torch.randn(3, 5), batch()

    def loss(weight: Any, x: Any) -> Any:
        return ((x @ weight.T) ** 2).mean()

    expected = torch.func.grad(loss)(weight, x)
    with observed():
        assert torch.equal(torch.func.grad(loss)(weight, x), expected)
        assert torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x).shape == (4, 3, 5)


def train(dtype: Any, alive: list[Any]) -> list[Any]:
    """Three windows of two micro-batches, with dropout, a mask, a penalty in one of them; what comes out of it."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    kept, mask, y = [], MASK.to(dtype), Y.to(dtype)
    for _ in range(3):
        for part in range(2):
            out = Holding.apply(net(torch.randn(4, 5, dtype=dtype)), alive)
            loss = (((out - y) ** 2) * mask).sum() / mask.sum() / 2
            if part:
                loss = loss + torch.mean(out.abs()) + 0.01 * net[0].weight.pow(2).sum()
            loss.backward()
            kept.append(loss.detach().clone())
            alive.append(weakref.ref(loss))
            alive.append(weakref.ref(out))
            del loss, out
        optimizer.step()
        optimizer.zero_grad()
    return [*kept, *[parameter.detach().clone() for parameter in net.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reference", ["off", "exact", "sketch"])
def test_training_is_the_same_bit_for_bit(dtype: Any, reference: str) -> None:
    plain = train(dtype, [])
    with observed(reference) as recorder:
        seen = train(dtype, [])
    assert len(rows(recorder, "loss")) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


@pytest.mark.parametrize("reference", ["off", "exact", "sketch"])
def test_losses_and_graphs_die_as_they_would(reference: str) -> None:
    alive: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        with observed(reference):
            train(torch.float32, alive)
            assert [each() for each in alive] == [None] * 18
    finally:
        gc.enable()


def test_a_window_keeps_nothing_of_what_was_reduced() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        gc.collect()
        before = {id(each) for each in gc.get_objects()}
        for _ in range(3):
            per_token(net(x)).mean()  # never used
            ((per_token(net(x)) * MASK).sum() / 6).backward()
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() == 12 and id(each) not in before]
        assert kept == []
        assert len(rows(recorder, "loss")) == 3


NORMALISATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum / N": lambda likelihood, n: -likelihood.sum() / 20,
    "mean * n / N": lambda likelihood, n: -likelihood.mean() * n / 20,
    "mean / K": lambda likelihood, n: -likelihood.mean() / 4,
}


@pytest.mark.parametrize("name", NORMALISATIONS)
@pytest.mark.parametrize("reference", ["exact", "sketch"])
def test_the_reference_is_that_of_the_function(name: str, reference: str) -> None:
    net = linear()
    with observed(reference) as recorder:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in parts():
            NORMALISATIONS[name](net(x).log_softmax(1).gather(1, y[:, None]), len(y)).backward()
        distance = errors(net, full())
        optimizer.step()
        (step,) = rows(recorder, "step")
    found = step.numbers["reference"]
    assert (found["kind"], found["units"]) == (reference, 20)
    assert found["relative"] == pytest.approx(distance[1], rel=1e-9, abs=1e-12)
    assert (distance[1] > 0.01) == (name == "mean / K")


def test_two_terms_by_hand_are_not_separable() -> None:
    net = linear()
    with observed("exact") as recorder:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, _ in parts():
            out = net(x)
            first = out.pow(2).mean()
            (first + out.abs().mean()).backward()
        optimizer.step()
        (step,) = rows(recorder, "step")
    found = step.numbers["reference"]
    assert found["kind"] == "not separable"
    assert found["why"].startswith("terms of different kinds (mean of line ")
