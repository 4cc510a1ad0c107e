"""The gradient that a window should have had, by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from tests.runtime.ledger.observed import observed, rows  # noqa: E402

SPANS = (2, 6, 4, 8)  # targets of four micro-batches


def linear(dtype: Any = torch.float64) -> Any:
    torch.manual_seed(42)
    return torch.nn.Linear(4, 3, dtype=dtype)


def data(dtype: Any = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(2026)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (20,), generator=generator)


def parts(dtype: Any = torch.float64) -> Any:
    x, y = data(dtype)
    return list(zip(x.split(SPANS), y.split(SPANS), strict=True))


def full(dtype: Any = torch.float64) -> list[Any]:
    """The gradient of the mean over all twenty targets."""
    model, (x, y) = linear(dtype), data(dtype)
    F.cross_entropy(model(x), y).backward()
    return [parameter.grad for parameter in model.parameters()]


def errors(model: Any, reference: list[Any], scale: float = 1.0) -> tuple[float, float]:
    """Largest and relative L2 distance of a model's gradients from these."""
    flat = torch.cat([(parameter.grad / scale).reshape(-1) for parameter in model.parameters()])
    expected = torch.cat([each.reshape(-1) for each in reference])
    return float((flat - expected).abs().max()), float((flat - expected).norm() / expected.norm())


def window(loss: Any, reference: str = "exact", dtype: Any = torch.float64, **given: Any) -> tuple[Any, Any, dict[str, Any]]:
    """One update of four micro-batches; the model, its gradients before the step, and the numbers of the STEP."""
    model = linear(dtype)
    with observed(reference, **given) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in parts(dtype):
            loss(model(x), y).backward()
        optimizer.step()
        (step,) = rows(recorder, "step")
    return model, step, step.numbers["reference"]


RIGHT = lambda out, y: F.cross_entropy(out, y, reduction="sum") / 20  # noqa: E731


@pytest.mark.parametrize(
    ("loss", "max_abs"),
    [
        (lambda out, y: F.cross_entropy(out, y) / 4, 9.4838e-02),
        (lambda out, y: F.cross_entropy(out, y) / 2, 4.0723e-01),
        (lambda out, y: F.cross_entropy(out, y, reduction="sum") / 40, 1.6416e-01),
        (RIGHT, 0.0),
        (lambda out, y: F.cross_entropy(out, y, reduction="none").sum() * (1 / 20), 0.0),
    ],
)
def test_the_error_of_a_window_is_that_against_the_full_batch(loss: Any, max_abs: float) -> None:
    model, _, found = window(loss)
    largest, relative = errors(model, full())
    assert found["kind"] == "exact"
    assert found["max_abs"] == pytest.approx(max_abs, rel=1e-4, abs=1e-15)
    assert found["max_abs"] == pytest.approx(largest, rel=1e-9, abs=1e-15)
    assert found["relative"] == pytest.approx(relative, rel=1e-9, abs=1e-15)
    assert (found["dtype"], found["bytes"], found["units"]) == ("float64", 15 * 8, 20)
    if max_abs:
        by_parameter = {name: float((p.grad - g).norm() / g.norm()) for (name, p), g in zip(model.named_parameters(), full(), strict=True)}
        expected = sorted(by_parameter.items(), key=lambda pair: -pair[1])
        assert found["worst"] == [[name, pytest.approx(value)] for name, value in expected]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_other_formats_have_the_noise_of_their_own(dtype: Any, tolerance: float) -> None:
    _, _, found = window(RIGHT, dtype=dtype)
    assert found["relative"] < tolerance
    model, _, wrong = window(lambda out, y: F.cross_entropy(out, y) / 4, dtype=dtype)
    assert wrong["relative"] == pytest.approx(errors(model, full(dtype))[1], abs=tolerance)
    assert wrong["relative"] > 0.3
    assert found["dtype"] == str(dtype).removeprefix("torch.")


def test_the_second_window_starts_anew() -> None:
    model = linear()
    with observed("exact", steps=3) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for x, y in parts():
                RIGHT(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [step.numbers["reference"] for step in rows(recorder, "step")]
    assert [each["relative"] < 1e-14 for each in found] == [True] * 3
    assert [each["window"] for each in found] == [[0, 0], [0, 1], [0, 2]]


def test_clearing_that_was_forgotten_shows() -> None:
    model = linear()
    with observed("exact") as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            for x, y in parts():
                RIGHT(model(x), y).backward()
            optimizer.step()
        found = [step.numbers["reference"]["relative"] for step in rows(recorder, "step")]
    assert found == [pytest.approx(0, abs=1e-14), pytest.approx(1)]


def test_clearing_inside_the_window_shows() -> None:
    model = linear()
    with observed("exact") as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in parts():
            optimizer.zero_grad()
            RIGHT(model(x), y).backward()
        largest, relative = errors(model, full())
        optimizer.step()
        (step,) = rows(recorder, "step")
    assert step.numbers["reference"]["max_abs"] == pytest.approx(largest)
    assert step.numbers["reference"]["relative"] == pytest.approx(relative)


def test_division_after_the_backwards_and_before_the_clip_belongs_to_the_gradient() -> None:
    model = linear()
    with observed("exact") as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in parts():
            F.cross_entropy(model(x), y, reduction="sum").backward()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / 20)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        (step,) = rows(recorder, "step")
    assert step.numbers["reference"]["relative"] < 1e-14


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("reference", ["exact", "sketch"])
def test_a_loss_scale_is_no_error(unscale: bool, clip: bool, reference: str) -> None:
    model = linear(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with observed(reference) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in parts(torch.float32):
            scaler.scale(RIGHT(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        step = rows(recorder, "step")[-1]
    assert step.numbers["reference"]["relative"] < 1e-6


def test_a_fused_optimizer_gets_gradients_that_are_still_scaled() -> None:
    model = linear(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with observed("exact") as recorder:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for x, y in parts(torch.float32):
            scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
        largest, relative = errors(model, full(torch.float32), 512.0)
        scaler.step(optimizer)
        step = rows(recorder, "step")[-1]
    assert step.numbers["reference"]["max_abs"] == pytest.approx(largest, rel=1e-5)
    assert step.numbers["reference"]["relative"] == pytest.approx(relative, rel=1e-5)


def test_an_update_that_the_scaler_left_out_is_dropped_with_its_gradients() -> None:
    model = linear(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with observed("exact") as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for factor in (float("inf"), 1.0):
            for x, y in parts(torch.float32):
                scaler.scale(RIGHT(model(x), y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        step = rows(recorder, "step")[-1]
    assert (step.numbers["reference"]["units"], step.numbers["reference"]["relative"]) == (20, pytest.approx(0, abs=1e-6))


def test_micro_batches_without_targets_are_passed_over() -> None:
    model, (x, y) = linear(), data()
    with observed("exact") as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for target in (torch.full_like(y, -100), y, torch.full_like(y, -100)):
            (F.cross_entropy(model(x), target, reduction="sum") / 20).backward()
        optimizer.step()
        (step,) = rows(recorder, "step")
    assert step.numbers["reference"]["relative"] < 1e-14
    assert step.numbers["reference"]["units"] == 20


def weight_decay(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y) + 0.1 * model.weight.pow(2).sum()


def two_terms(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y) + 0.1 * F.mse_loss(model(x), torch.zeros(20, 3, dtype=torch.float64))


def two_coefficients(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x)[:5], y[:5]) + F.cross_entropy(model(x)[5:], y[5:])


def weighted_units(model: Any, x: Any, y: Any) -> Any:
    return (F.cross_entropy(model(x), y, reduction="none") * torch.arange(20.0)).mean()


def weight_of_nothing(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y) * 0.0


def root_of_a_mean(model: Any, x: Any, y: Any) -> Any:
    return model(x).pow(2).mean().sqrt()


def nothing_valid(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), torch.full_like(y, -100), reduction="sum")


@pytest.mark.parametrize(
    ("root", "kind", "why"),
    [
        (weight_decay, "not separable", "PowBackward0"),
        (two_terms, "not separable", "terms of different kinds (cross_entropy, mse_loss)"),
        (two_coefficients, "not separable", "different coefficients"),
        (weighted_units, "not separable", "different coefficients"),
        (weight_of_nothing, "not separable", "the coefficient 0"),
        (root_of_a_mean, "not observed", "before any recorded loss"),
        (nothing_valid, "not observed", "no valid target"),
    ],
)
@pytest.mark.parametrize("reference", ["exact", "sketch"])
def test_what_cannot_be_told_apart_is_not_guessed(root: Any, kind: str, why: str, reference: str) -> None:
    model, (x, y) = linear(), data()
    with observed(reference) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        root(model, x, y).backward()
        optimizer.step()
        (step,) = rows(recorder, "step")
    assert step.numbers["reference"]["kind"] == kind
    assert why in step.numbers["reference"]["why"]
    assert "relative" not in step.numbers["reference"]


def test_sparse_gradients_are_not_observed() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    with observed("exact") as recorder:
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        F.cross_entropy(table(torch.tensor([0, 1])), torch.tensor([0, 1])).backward()
        optimizer.step()
        (step,) = rows(recorder, "step")
    assert step.numbers["reference"]["kind"] == "not observed"
    assert "sparse" in step.numbers["reference"]["why"]


@pytest.mark.parametrize(("reference", "objective", "kind"), [("off", "token", "off"), ("exact", "sequence", "not observed")])
def test_without_a_reference_nothing_is_kept(reference: str, objective: str, kind: str) -> None:
    _, step, found = window(RIGHT, reference, objective=objective)
    assert found["kind"] == kind
    assert step.numbers["reference"]["why"]


def test_each_optimizer_has_the_backwards_that_reach_it() -> None:
    """A generator's backward also reaches the discriminator, which clears what it gets from it."""
    torch.manual_seed(0)
    makes, judges = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
    noise, real = torch.randn(6, 2), torch.randn(6, 4)
    score = F.binary_cross_entropy_with_logits
    with observed("exact") as recorder:
        first, second = torch.optim.SGD(makes.parameters(), lr=0.1), torch.optim.SGD(judges.parameters(), lr=0.1)
        for _ in range(2):
            second.zero_grad()
            both = torch.cat([judges(real), judges(makes(noise).detach())])
            score(both, torch.cat([torch.ones(6, 1), torch.zeros(6, 1)])).backward()
            second.step()
            first.zero_grad()
            score(judges(makes(noise)), torch.ones(6, 1)).backward()
            first.step()
        found = [step.numbers["reference"] for step in rows(recorder, "step")]
    assert [each["units"] for each in found] == [12, 6, 12, 6]
    assert max(each["relative"] for each in found) < 1e-6


def test_a_sketch_estimates_the_distance_within_five_percent() -> None:
    def run(reference: str) -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
        x, y = torch.randn(40, 256), torch.randint(0, 64, (40,))
        with observed(reference) as recorder:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for span in (slice(0, 4), slice(4, 40)):
                (F.cross_entropy(model(x[span]), y[span]) / 2).backward()
            optimizer.step()
            (step,) = rows(recorder, "step")
        found: dict[str, Any] = step.numbers["reference"]
        return found

    exact, sketch = run("exact"), run("sketch")
    assert exact["relative"] > 0.1
    assert sketch["relative"] == pytest.approx(exact["relative"], rel=0.05)
    assert (sketch["kind"], sketch["max_abs"], sketch["units"]) == ("sketch", None, 40)


def test_an_optimizer_that_steps_inside_the_backward_is_not_observed() -> None:
    model, (x, y) = linear(), data()
    with observed("exact") as recorder:
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        found = [step.numbers["reference"] for step in rows(recorder, "step")]
    assert [(each["kind"], each["why"]) for each in found] == [("not observed", "the optimizer steps inside the backward")] * 4


def test_memory_does_not_grow_with_windows() -> None:
    """Tensors alive after 2 windows and after 20, once the numbers of each window have been read."""
    import gc

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    model, counts = linear(), []
    with observed("exact", steps=20) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, 21):
            for x, y in parts():
                RIGHT(model(x), y).backward()
            del x, y
            optimizer.step()
            optimizer.zero_grad()
            if number in {2, 20}:
                counts.append(tensors())
        assert len(rows(recorder, "step")) == 20
    assert counts[0] == counts[1]
