"""The reference of several ranks: real ones under DistributedDataParallel, with the seeds' targets 2 and 6, 4 and 8."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from accumlint.runtime.rankreport import report_of  # noqa: E402
from accumlint.runtime.reference import choice  # noqa: E402
from accumlint.runtime.reference.across import compare  # noqa: E402
from accumlint.runtime.settings import Settings  # noqa: E402
from tests.runtime.ddp.ranks import run  # noqa: E402
from tests.runtime.ledger.observed import observed  # noqa: E402
from tests.runtime.ledger.test_reference import data, errors, full, linear  # noqa: E402

SPANS = ((slice(0, 2), slice(2, 8)), (slice(8, 12), slice(12, 20)))
NORMALISATIONS: dict[str, Any] = {
    "mean / K": (lambda out, y, local: F.cross_entropy(out, y) / 2, 9.4838e-02),
    "mean": (lambda out, y, local: F.cross_entropy(out, y), 4.0723e-01),
    "sum / N": (lambda out, y, local: F.cross_entropy(out, y, reduction="sum") / 20, 1.6416e-01),
    "sum / local N": (lambda out, y, local: F.cross_entropy(out, y, reduction="sum") / local, 4.2465e-02),
    "W sum / N": (lambda out, y, local: 2 * F.cross_entropy(out, y, reduction="sum") / 20, 0.0),
    "none": (lambda out, y, local: F.cross_entropy(out, y, reduction="none").sum() * 2 / 20, 0.0),
}


def rank(reference: str, folder: str) -> list[tuple[dict[str, Any], tuple[float, float]]]:
    """One update with each normalisation: this rank's report, and the true distance of its gradient."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    number, (x, y) = dist.get_rank(), data()
    found = []
    for loss, _ in NORMALISATIONS.values():
        place = Path(folder, str(len(found)))
        with observed(reference, str(place)) as recorder:
            model = DistributedDataParallel(linear())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for index, span in enumerate(SPANS[number]):
                model.require_backward_grad_sync = index == 1
                loss(model(x[span]), y[span], (8, 12)[number]).backward()
            distance = errors(model, full())
            optimizer.step()
            recorder.settle()
            found.append((report_of(recorder), distance))
    return found


@pytest.mark.parametrize("reference", ["auto", "sketch"])
def test_two_ranks_are_compared_with_the_full_batch(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for number in range(len(NORMALISATIONS)):
        (tmp_path / str(number)).mkdir()
    ranks = run(functools.partial(rank, reference, str(tmp_path)), 2)
    for number, (_, max_abs) in enumerate(NORMALISATIONS.values()):
        (first, distance), (second, _) = (found[number] for found in ranks)
        folder = tmp_path / str(number)
        assert len(os.listdir(folder)) == (3 if reference == "auto" else 0)
        (result,) = compare(str(folder), [second, first]).values()
        assert os.listdir(folder) == []
        assert result["units"] == 20
        assert distance[0] == pytest.approx(max_abs, rel=1e-4, abs=1e-15)
        if reference == "auto":
            assert result["kind"] == "exact"
            assert result["max_abs"] == pytest.approx(distance[0], rel=1e-9, abs=1e-15)
            assert result["relative"] == pytest.approx(distance[1], rel=1e-9, abs=1e-14)
            assert {name for name, _ in result["worst"]} <= {"weight", "bias"}
        else:
            # Fifteen elements have a bucket each: nothing is lost.
            assert result["kind"] == "sketch"
            assert result["relative"] == pytest.approx(distance[1], rel=1e-9, abs=1e-12)


def report(number: int, world: int, **reference: Any) -> dict[str, Any]:
    """What a rank reports of one update."""
    numbers = {"reference": {"window": [0, 0], **reference}}
    return {"rank": number, "world": world, "events": [{"kind": "step", "index": 7, "numbers": numbers}]}


PART = {"kind": "sketch", "dtype": "float32", "bytes": 8, "units": 2.0, "sums": [2.0, 0.0]}


def test_sketches_add_up(tmp_path: Path) -> None:
    first = report(0, 2, **PART, gradient=[1.0, 0.5])
    second = report(1, 2, **{**PART, "units": 6.0, "sums": [6.0, 0.0]})
    found = compare(str(tmp_path), [first, second])
    # (2 + 6) / (2 + 6) = 1 is what the first bucket should have been, 0 the second.
    assert found[7]["relative"] == pytest.approx(0.5)
    assert (found[7]["units"], found[7]["kind"]) == (8.0, "sketch")


@pytest.mark.parametrize(
    ("others", "kind", "why"),
    [
        ([], "not observed", "rank 1: it made no such update"),
        ([report(1, 2, kind="not separable", why="two terms")], "not separable", "rank 1: two terms"),
        ([report(1, 2, kind="exact", file="x", layout=[], units=1.0)], "not observed", "rank 1: it keeps another kind of reference"),
    ],
)
def test_a_rank_that_has_none_is_named(others: list[Any], kind: str, why: str, tmp_path: Path) -> None:
    found = compare(str(tmp_path), [report(0, 2, **PART, gradient=[1.0, 0.5]), *others])
    assert (found[7]["kind"], found[7]["why"]) == (kind, why)


def test_a_file_that_is_cut_short_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "reference-0.bin").write_bytes(bytes(8))
    (tmp_path / "keep").write_bytes(b"")
    own = {"kind": "exact", "dtype": "float32", "bytes": 8, "units": 1.0, "file": "reference-0.bin", "gradient_file": "reference-0.bin"}
    found = compare(str(tmp_path), [report(0, 1, **own, layout=[[0, "weight", 4, "float32"]])])
    assert found[7]["kind"] == "not observed"
    assert "too short" in found[7]["why"]
    assert os.listdir(tmp_path) == ["keep"]


def sharded(original: bool) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    x, y = data()
    with observed("exact", "/nowhere") as recorder:
        model = FullyShardedDataParallel(linear(), device_id=torch.device("cpu"), use_orig_params=original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        recorder.settle()
        (step,) = (row for row in recorder.rows if row.kind == "step")
        found: dict[str, Any] = step.numbers["reference"]
        return found


@pytest.mark.parametrize("original", [False, True])
def test_sharded_gradients_are_not_observed(original: bool) -> None:
    for found in run(functools.partial(sharded, original), 2):
        assert (found["kind"], found["why"]) == ("not observed", "the parameters are sharded, or their gradients pass no leaf hook")


@pytest.mark.parametrize("reference", ["auto", "exact"])
def test_without_a_folder_nothing_is_written(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings("test", "", reference=reference)
    monkeypatch.setattr(choice, "_position", lambda: (0, 2))
    assert choice.choose(settings)([torch.zeros(3)]).kind == "sketch"


@pytest.mark.parametrize(
    ("elements", "world", "local", "kind"),
    [
        (2**28, 1, None, "exact"),  # 1 GiB in place
        (2**29 + 1, 1, None, "sketch"),  # more than 2 GiB
        (2**27, 2, "2", "exact"),  # 512 MiB from each of two ranks for each of two updates
        (2**27 + 1, 2, "2", "sketch"),
        (2**10, 2, "1", "sketch"),  # a host each
    ],
)
def test_the_size_chooses(elements: int, world: int, local: str | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_position", lambda: (0, world))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    parameter = torch.empty(elements, device="meta")
    assert choice.choose(Settings("test", "/nowhere", steps=2))([parameter]).kind == kind
