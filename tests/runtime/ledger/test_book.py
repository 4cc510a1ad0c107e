"""What counts as one loss in one backward, what covers it, and that nothing changes or stays alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.runtime.ledger.observed import backwards, observed, only_loss, rows  # noqa: E402

TARGET = torch.tensor([0, 2, 1, -100])


def model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def batch(dtype: Any = torch.float32) -> Any:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_inside_a_checkpoint_counts_once(reentrant: bool) -> None:
    net, x = model(), batch().requires_grad_()

    def inner(x: Any) -> Any:
        return F.cross_entropy(net(x), TARGET) / 2

    with observed() as recorder:
        (checkpoint(inner, x, use_reentrant=reentrant) / 4).backward()
        (numbers,) = backwards(recorder)
    (loss,) = numbers["losses"]
    assert (loss["units"], loss["high"]) == (3, pytest.approx(1 / 24))
    assert len(rows(recorder, "loss")) == 1
    assert numbers["covered"] is True
    assert loss["operands"] is None


def test_a_checkpointed_model_with_the_loss_outside_keeps_its_operands() -> None:
    net, x = model(), batch().requires_grad_()
    with observed() as recorder:
        (F.cross_entropy(checkpoint(net, x, use_reentrant=False), TARGET) / 4).backward()
        assert only_loss(recorder)["operands"] == [["div", 4.0]]


def test_a_gradient_asked_for_without_a_backward_is_no_row() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        loss = F.cross_entropy(net(x), TARGET)
        torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        loss.backward()
        assert only_loss(recorder)["units"] == 3


def test_two_backwards_through_one_loss_are_two_rows() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        loss = F.cross_entropy(net(x), TARGET)
        loss.backward(retain_graph=True)
        (loss / 4).backward()
        found = [numbers["losses"] for numbers in backwards(recorder)]
    assert [[loss["high"] for loss in losses] for losses in found] == [[pytest.approx(1 / 3)], [pytest.approx(1 / 12)]]
    assert found[0][0]["call"] == found[1][0]["call"]


def test_a_loss_without_gradients_is_no_row() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        with torch.no_grad():
            F.cross_entropy(net(x), TARGET)
        F.cross_entropy(net(x).detach(), TARGET)
    assert rows(recorder, "loss") == []


def test_terms_of_different_kinds_have_a_row_each() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        out = net(x)
        (F.cross_entropy(out, TARGET) + 0.1 * F.mse_loss(out, torch.zeros(4, 3))).backward()
        (numbers,) = backwards(recorder)
    found = {loss["name"]: (loss["units"], loss["high"], loss["operands"]) for loss in numbers["losses"]}
    assert found["cross_entropy"] == (3, pytest.approx(1 / 3), [])
    assert found["mse_loss"] == (12, pytest.approx(0.1 / 12), [["mul", 0.1]])


def test_a_running_sum_has_a_row_for_each_of_its_losses() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        total = torch.zeros(())
        for _ in range(3):
            total = total + F.cross_entropy(net(x), TARGET)
        (total / 3).backward()
        (numbers,) = backwards(recorder)
    assert [loss["operands"] for loss in numbers["losses"]] == [[["div", 3.0]]] * 3
    assert len({loss["call"] for loss in numbers["losses"]}) == 3


def in_place(loss: Any) -> Any:
    loss /= 4
    return loss


@pytest.mark.parametrize(
    ("arithmetic", "operands"),
    [
        (in_place, [["div", 4.0]]),
        (lambda loss: loss / torch.tensor(4.0), [["div", 4.0]]),
        (lambda loss: 1 / 4 * loss, [["mul", 0.25]]),
        (lambda loss: -(1 - loss / 4), [["div", 4.0], ["mul", -1.0], ["mul", -1.0]]),
        (lambda loss: torch.stack([loss / 2, torch.zeros(())]).mean(), [["div", 2.0], ["div", 2.0]]),
        (lambda loss: loss.double().view(1).squeeze() * 2 / 8, [["mul", 2.0], ["div", 8.0]]),
        (lambda loss: loss / 8 + loss / 8, None),
        (lambda loss: loss.expand(4).sum() / 16, None),
    ],
)
def test_the_scalars_between_the_loss_and_the_backward_are_told_in_order(arithmetic: Callable[[Any], Any], operands: Any) -> None:
    net, x = model(), batch()
    with observed() as recorder:
        arithmetic(F.cross_entropy(net(x), TARGET)).backward()
        found = only_loss(recorder)
    assert found["operands"] == operands
    assert found["high"] == pytest.approx(1 / 12)


def test_a_gradient_given_to_the_backward_is_the_last_scalar() -> None:
    net, x = model(), batch()
    with observed() as recorder:
        (F.cross_entropy(net(x), TARGET) / 2).backward(gradient=torch.tensor(0.5))
        found = only_loss(recorder)
    assert (found["operands"], found["high"]) == ([["div", 2.0], ["mul", 0.5]], pytest.approx(1 / 12))


def test_a_scaled_loss_shows_the_scale_among_its_operands() -> None:
    net, x = model(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with observed() as recorder:
        scaler.scale(F.cross_entropy(net(x), TARGET) / 2).backward()
        found = only_loss(recorder)
    assert (found["operands"], found["high"]) == ([["div", 2.0], ["mul", 1024.0]], pytest.approx(1024 / 6))


L2 = "PowBackward0 is no recorded loss"


@pytest.mark.parametrize(
    ("root", "covered", "why"),
    [
        (lambda net, out: F.cross_entropy(out, TARGET) / 2, True, ""),
        (lambda net, out: 2 * F.cross_entropy(out, TARGET, reduction="sum") / 20, True, ""),
        (lambda net, out: F.cross_entropy(out, TARGET) + 5.0, True, ""),
        (lambda net, out: F.cross_entropy(out, TARGET) * out.detach().mean(), True, ""),
        (lambda net, out: (F.cross_entropy(out, TARGET, reduction="none") * out.detach()[:, 0]).sum(), True, ""),
        (lambda net, out: F.cross_entropy(out, TARGET) + 0.01 * net[0].weight.pow(2).sum(), False, L2),
        (lambda net, out: F.cross_entropy(out, TARGET).exp(), False, "ExpBackward0 is no recorded loss"),
        (lambda net, out: F.cross_entropy(out, TARGET) * F.mse_loss(out, torch.zeros(4, 3)), False, "MulBackward0 is no recorded loss"),
        (lambda net, out: -out.log_softmax(1)[:, 0].max(), False, "no recorded loss: the backward begins at MaxBackward1"),
        (lambda net, out: (F.cross_entropy(out, TARGET) ** 2).sqrt(), True, ""),
    ],
)
def test_the_recorded_losses_must_be_all_of_the_root(root: Callable[[Any, Any], Any], covered: bool, why: str) -> None:
    net, x = model(), batch()
    with observed() as recorder:
        root(net, net(x)).backward()
        (numbers,) = backwards(recorder)
    assert numbers["covered"] is covered
    assert numbers.get("why", "").startswith(why)
    assert bool(why) == ("why" in numbers)


def test_a_coarse_precision_does_not_tell_a_small_term_from_none() -> None:
    net, x = model(torch.bfloat16), batch(torch.bfloat16)
    with observed() as recorder:
        (F.cross_entropy(net(x), TARGET) + 1e-3 * net[0].weight.pow(2).sum()).backward()
        (numbers,) = backwards(recorder)
    assert numbers["covered"] is None
    assert "PowBackward0" in numbers["why"]


class Token:
    """Lives as long as the graph that holds it."""


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, alive: list[Any]) -> Any:
        ctx.token = Token()
        alive.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


def train(dtype: Any, alive: list[Any]) -> list[Any]:
    """Three windows of two micro-batches, with dropout; the losses and parameters at the end. `alive` gets weak references."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    kept = []
    for _ in range(3):
        for part in range(2):
            x = torch.randn(4, 5, dtype=dtype)
            out = Holding.apply(net(x), alive)
            loss = F.cross_entropy(out, TARGET) / 2 + 0.1 * F.mse_loss(net(x), torch.zeros(4, 3, dtype=dtype), reduction="none").mean()
            (checkpoint(lambda loss: loss * 1.0, loss, use_reentrant=False) if part else loss).backward()
            kept.append(loss.detach().clone())
            alive.append(weakref.ref(loss))
            del loss, out
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [*kept, *[parameter.detach().clone() for parameter in net.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reference", ["off", "exact", "sketch"])
def test_training_is_the_same_bit_for_bit(dtype: Any, reference: str) -> None:
    plain = train(dtype, [])
    with observed(reference) as recorder:
        seen = train(dtype, [])
    assert len(rows(recorder, "step")) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


@pytest.mark.parametrize("reference", ["off", "exact", "sketch"])
def test_losses_and_graphs_die_as_they_would(reference: str) -> None:
    alive: list[Any] = []

    gc.collect()
    gc.disable()
    try:
        with observed(reference):
            train(torch.float32, alive)
            assert [each() for each in alive] == [None] * 12
    finally:
        gc.enable()


def test_a_script_may_still_compile_the_functions() -> None:
    with observed() as recorder:

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, y) + F.binary_cross_entropy_with_logits(x, x)

        scripted = torch.jit.script(loss)
        x = torch.randn(4, 3, requires_grad=True)
        scripted(x, torch.tensor([0, 1, 2, 0])).backward()
        (numbers,) = backwards(recorder)
    assert numbers["covered"] is False
    assert x.grad is not None


def test_everything_is_put_back() -> None:
    before = (torch._C._nn.cross_entropy_loss, torch.kl_div, torch.autograd.graph.saved_tensors_hooks.__enter__, torch.autograd.backward)
    with observed():
        assert torch.kl_div is not before[1]
    after = (torch._C._nn.cross_entropy_loss, torch.kl_div, torch.autograd.graph.saved_tensors_hooks.__enter__, torch.autograd.backward)
    assert after == before


def test_a_name_imported_before_and_a_module_are_seen() -> None:
    from torch.nn.functional import cross_entropy

    criterion, net, x = torch.nn.CrossEntropyLoss(), model(), batch()
    with observed() as recorder:
        cross_entropy(net(x), TARGET).backward()
        criterion(net(x), TARGET).backward()
        found = [numbers["losses"] for numbers in backwards(recorder)]
    assert [(loss["name"], loss["units"]) for losses in found for loss in losses] == [("cross_entropy", 3)] * 2


def test_functional_transforms_are_left_alone() -> None:
    weight, x = torch.randn(3, 5), batch()

    def loss(weight: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(x @ weight.T, y)

    expected = torch.func.grad(loss)(weight, x, TARGET)
    with observed() as recorder:
        assert torch.equal(torch.func.grad(loss)(weight, x, TARGET), expected)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weight, x[:, None], TARGET.clamp(min=0)[:, None])
        assert each.shape == (4, 3, 5)
    assert rows(recorder, "loss") == []


def test_a_gradient_of_the_gradient_does_not_count_twice() -> None:
    net, x = model(), batch().requires_grad_()
    with observed() as recorder:
        loss = F.cross_entropy(net(x), TARGET)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()
        (numbers,) = backwards(recorder)
    assert [(entry["units"], entry["high"]) for entry in numbers["losses"]] == [(3, pytest.approx(1 / 3))]
    assert numbers["covered"] is False


def test_a_window_keeps_no_losses_of_its_elements() -> None:
    """Tensors as large as the unreduced loss die with the graph, before the window closes."""
    net, x = model(), batch()
    with observed() as recorder:
        gc.collect()
        before = {id(each) for each in gc.get_objects()}
        for _ in range(3):
            (F.mse_loss(net(x), torch.zeros(4, 3), reduction="none").mean() / 3).backward()
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (4, 3) and id(each) not in before]
        assert kept == []
        assert len(rows(recorder, "loss")) == 3
