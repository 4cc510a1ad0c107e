"""A run ends with the same parameters, optimizer state and losses, bit for bit, whether it is observed or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.ddp.ranks import run
from tests.runtime.equality.programs import outcome, train

VIEWS = {"gradient_as_bucket_view": True}
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"loss": "sum"},
    "none": {"loss": "none"},
    "mse": {"loss": "mse", "optimizer": "SGD"},
    "fused": {"optimizer": "fused"},
    "clip": {"clip": True},
    "zeros": {"set_to_none": False},
    "averaged": {"average": True},
    "float16 with a scaler": {"amp": "float16", "clip": True},
    "float16 with a scaler, fused": {"amp": "float16", "optimizer": "fused"},
    "bfloat16 autocast": {"amp": "bfloat16"},
    "batch normalisation": {"model": {"normalised": True}},
    "dropout": {"model": {"dropout": 0.3}},
    "checkpoint": {"model": {"checkpoint": False, "dropout": 0.3}},
    "reentrant checkpoint": {"model": {"checkpoint": True, "dropout": 0.3}},
    "unused": {"model": {"unused": True}},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "ddp": {"wrap": "ddp"},
    "ddp, no_sync": {"wrap": "ddp", "no_sync": True, "clip": True},
    "ddp, small buckets": {"wrap": "ddp", "no_sync": True, "options": {"bucket_cap_mb": 0.002}},
    "ddp, views": {"wrap": "ddp", "options": VIEWS},
    "ddp, views kept": {"wrap": "ddp", "options": VIEWS, "set_to_none": False},
    "ddp, views kept, no_sync": {"wrap": "ddp", "options": VIEWS, "set_to_none": False, "no_sync": True},
    "ddp, unused": {"wrap": "ddp", "options": {"find_unused_parameters": True}, "model": {"unused": True}},
    "ddp, static": {"wrap": "ddp", "options": {"static_graph": True}, "model": {"checkpoint": True}},
    "ddp, own hook": {"wrap": "ddp", "hook": True, "no_sync": True},
    "ddp, float16 with a scaler": {"wrap": "ddp", "amp": "float16", "clip": True, "no_sync": True},
    "ddp, bfloat16 autocast": {"wrap": "ddp", "amp": "bfloat16", "no_sync": True},
    "ddp, batch normalisation": {"wrap": "ddp", "model": {"normalised": True, "dropout": 0.3}, "no_sync": True},
    "ddp, checkpoint": {"wrap": "ddp", "model": {"checkpoint": False, "dropout": 0.3}, "no_sync": True},
    "ddp, sum": {"wrap": "ddp", "loss": "sum", "no_sync": True},
    "fsdp1": {"wrap": "fsdp1"},
    "fsdp1, no_sync": {"wrap": "fsdp1", "no_sync": True},
    "fsdp1, gradients sharded": {"wrap": "fsdp1", "options": {"strategy": "SHARD_GRAD_OP"}},
    "fsdp1, nothing sharded": {"wrap": "fsdp1", "options": {"strategy": "NO_SHARD"}, "no_sync": True},
    "fsdp2": {"wrap": "fsdp2"},
    "fsdp2, no sync": {"wrap": "fsdp2", "no_sync": True},
    "fsdp2, bfloat16 autocast, checkpoint": {"wrap": "fsdp2", "amp": "bfloat16", "model": {"checkpoint": False, "dropout": 0.3}},
}
REFERENCES = ("exact", "sketch", "off")
OBSERVED = {"forward", "loss", "backward", "step", "zero"}


def _all(programs: dict[str, dict[str, Any]], reference: str | None) -> dict[str, Any]:
    return {name: outcome(lambda done, options=options: train(done, **options), reference) for name, options in programs.items()}


def _pairs(programs: dict[str, dict[str, Any]], world: int, references: tuple[str, ...]) -> dict[tuple[str, str], list[Any]]:
    """By program and reference, what each rank ended with, unobserved and observed."""
    plain = run(lambda: _all(programs, None), world)
    found: dict[tuple[str, str], list[Any]] = {}
    for reference in references:
        observed = run(lambda reference=reference: _all(programs, reference), world)
        for name in programs:
            found[name, reference] = [(one[name], other[name]) for one, other in zip(plain, observed, strict=True)]
    return found


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], list[Any]]:
    return _pairs(ALONE, 1, REFERENCES)


@pytest.fixture(scope="module")
def two() -> dict[tuple[str, str], list[Any]]:
    return _pairs(TOGETHER, 2, ("exact", "sketch"))


@pytest.fixture(scope="module")
def three() -> dict[tuple[str, str], list[Any]]:
    return _pairs(TOGETHER, 3, ("exact",))


def _check(pairs: list[Any]) -> None:
    for rank, (plain, observed) in enumerate(pairs):
        assert observed["troubles"] == [], f"rank {rank}"
        assert observed["kinds"] >= OBSERVED, f"rank {rank}"
        for part, value in plain.items():
            assert observed[part] == value, f"{part} of rank {rank}"


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("name", ALONE)
def test_one_process(alone: dict[tuple[str, str], list[Any]], name: str, reference: str) -> None:
    _check(alone[name, reference])


@pytest.mark.parametrize("reference", ["exact", "sketch"])
@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks(two: dict[tuple[str, str], list[Any]], name: str, reference: str) -> None:
    _check(two[name, reference])


@pytest.mark.parametrize("name", TOGETHER)
def test_three_ranks(three: dict[tuple[str, str], list[Any]], name: str) -> None:
    _check(three[name, "exact"])
