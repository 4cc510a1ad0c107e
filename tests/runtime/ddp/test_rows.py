"""What the data-parallel probes write down, against counts known beforehand and values worked out from the samples."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.runtime.ddp.observing import observed
from tests.runtime.ddp.ranks import run

WORLD = 2


def _module() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def _report(recorder: Any) -> dict[str, Any]:
    recorder.settle()
    return {
        "rows": recorder.events(),
        "troubles": recorder.troubles,
        "limits": recorder.limits,
        "objects": [(entry.uid, entry.wrapper, entry.options, entry.numbers) for entry in recorder.objects.entries],
    }


def _loop(model: Any, contexts: Any, updates: int = 2) -> None:
    """Updates of as many micro-batches as there are contexts; a context is around the forward and around the backward."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(updates):
        for forward, backward in contexts:
            with forward():
                loss = model(torch.randn(4, 5, generator=generator)).square().sum()
            with backward():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _none() -> Any:
    return contextlib.nullcontext()


def _seen(report: dict[str, Any]) -> list[tuple[int, bool | None, bool | None]]:
    """For each backward: the reductions in it, the flag that its forward saw, and its own."""
    assert report["troubles"] == []
    rows = report["rows"]
    reductions = [row["numbers"]["backward"] for row in rows if row["kind"] == "reduce"]
    return [
        (reductions.count(row["index"]), rows[row["forwards"][0]]["sync"] if row["forwards"] else None, row["sync"])
        for row in rows
        if row["kind"] == "backward"
    ]


def _switches(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(row["kind"], row["options"]) for row in report["rows"] if row["kind"] in {"sync-off", "sync-on"}]


def _factor(reports: list[dict[str, Any]], at: int) -> list[float]:
    """The measured factor of one reduction: what came out over the sum of what all ranks put in, for each sample."""
    found = []
    reduced = [[row["numbers"] for row in report["rows"] if row["kind"] == "reduce"][at] for report in reports]
    for numbers in reduced:
        part = numbers.get("part")
        inputs = [each["before"] if part is None else each["before"][part] for each in reduced]
        sums = [sum(values) for values in zip(*inputs, strict=True)]
        assert len(sums) == len(numbers["after"]) > 0
        found += [after / before for after, before in zip(numbers["after"], sums, strict=True) if abs(before) > 0.05]
    return found


def _ddp(contexts: str) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    with observed() as recorder:
        model = DistributedDataParallel(_module())
        off = model.no_sync
        _loop(
            model,
            {
                "right": [(off, off), (_none, _none)],
                "backward only": [(_none, off), (_none, _none)],
                "forward only": [(off, _none), (_none, _none)],
                "never": [(off, off), (off, off)],
            }[contexts],
        )
        return _report(recorder)


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        ("right", [(0, False, False), (1, True, True)] * 2),
        ("backward only", [(1, True, False), (1, True, True)] * 2),  # the flag is read in the forward
        ("forward only", [(0, False, True), (1, True, True)] * 2),
        ("never", [(0, False, False), (0, False, False)] * 2),
    ],
)
def test_ddp(contexts: str, expected: list[tuple[int, bool, bool]]) -> None:
    for report in run(lambda: _ddp(contexts), WORLD):
        assert _seen(report) == expected


def test_the_factor_of_an_average_is_one_over_the_ranks() -> None:
    reports = run(lambda: _ddp("right"), 3)
    for at in range(2):
        assert _factor(reports, at) == pytest.approx([1 / 3] * len(_factor(reports, at)), rel=1e-5)


def test_a_hook_that_only_adds_up_has_factor_one() -> None:
    def work() -> dict[str, Any]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def add(state, bucket):  # torch looks at the annotations
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

        with observed() as recorder:
            model = DistributedDataParallel(_module())
            model.register_comm_hook(None, add)
            with pytest.raises(RuntimeError, match="can only be called once"):
                model.register_comm_hook(None, add)
            _loop(model, [(_none, _none)])
            return _report(recorder)

    reports = run(work, WORLD)
    assert _factor(reports, 0) == pytest.approx([1.0] * len(_factor(reports, 0)), rel=1e-6)
    assert all(("comm-hook" in options) == (wrapper == "DDP") for _, wrapper, options, _ in reports[0]["objects"] if wrapper != "none")


def test_a_flag_that_is_set_between_forward_and_backward() -> None:
    def work() -> dict[str, Any]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        with observed() as recorder:
            model = DistributedDataParallel(_module())
            for micro in range(3):
                loss = model(torch.ones(4, 5)).sum()
                model.require_backward_grad_sync = micro == 2
                loss.backward()
            return _report(recorder)

    for report in run(work, WORLD):
        assert _seen(report) == [(1, True, False), (0, False, False), (0, False, True)]
        assert _switches(report) == [("sync-off", ["flag"]), ("sync-off", ["flag"]), ("sync-on", ["flag"])]


def test_no_sync_is_told_from_a_flag() -> None:
    report = run(lambda: _ddp("right"), WORLD)[0]
    assert _switches(report)[:2] == [("sync-off", ["context"]), ("sync-on", ["context"])]


def test_a_group_of_its_own_is_described() -> None:
    def work() -> dict[str, Any]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        with observed() as recorder:
            _loop(DistributedDataParallel(_module(), process_group=groups[dist.get_rank() % 2]), [(_none, _none)])
            return _report(recorder)

    ranks = [next(numbers["ranks"] for _, wrapper, _, numbers in report["objects"] if wrapper == "DDP") for report in run(work, 3)]
    assert ranks == [[0, 2], [1], [0, 2]]


def test_replicate() -> None:
    def work() -> dict[str, Any]:
        import importlib

        with observed() as recorder:
            replicate = importlib.import_module("torch.distributed._composable.replicate").replicate
            model = replicate(_module())

            @contextlib.contextmanager
            def off() -> Any:
                model.set_requires_gradient_sync(False)
                yield
                model.set_requires_gradient_sync(True)

            _loop(model, [(off, _none), (_none, off), (_none, _none)])
            return _report(recorder)

    for report in run(work, WORLD):
        assert _seen(report) == [(0, False, True), (1, True, False), (1, True, True)] * 2
        assert not any(row["bypass"] for row in report["rows"])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1(strategy: str) -> None:
    def work() -> dict[str, Any]:
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        with observed() as recorder:
            model = FullyShardedDataParallel(
                _module(),
                device_id=torch.device("cpu"),
                sharding_strategy=ShardingStrategy[strategy],
                auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
                use_orig_params=True,
            )
            off = model.no_sync
            _loop(model, [(off, off), (_none, off), (off, _none), (_none, _none)])
            return _report(recorder)

    reports = run(work, WORLD)
    for report in reports:
        # The flag is read in the backward; the root has no parameters left for itself.
        assert _seen(report) == [(0, False, False), (0, True, False), (2, False, True), (2, True, True)] * 2
        assert _switches(report)[:2] == [("sync-off", ["context"]), ("sync-on", ["context"])]
    for at in range(4):
        assert _factor(reports, at) == pytest.approx([0.5] * len(_factor(reports, at)), rel=1e-4)


def _grouped(flag: str) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with observed() as recorder:
        model = _module()
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if flag == "sum":
            for part in (model, model[0], model[2]):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

        @contextlib.contextmanager
        def off() -> Any:
            model.set_requires_gradient_sync(requires_gradient_sync=False)
            yield
            model.set_requires_gradient_sync(True)

        _loop(model, [(_none, off), (off, _none), (_none, _none)])
        return _report(recorder)


@pytest.mark.parametrize(("flag", "factor"), [("average", 0.5), ("sum", 1.0)])
def test_fsdp2(flag: str, factor: float) -> None:
    reports = run(lambda: _grouped(flag), WORLD)
    for report in reports:
        assert report["limits"] == []
        assert _seen(report) == [(0, True, False), (2, False, True), (2, True, True)] * 2
        assert _switches(report)[:2] == [("sync-off", ["flag"]), ("sync-on", ["flag"])]
    for at in range(4):
        assert _factor(reports, at) == pytest.approx([factor] * len(_factor(reports, at)), rel=1e-4)


def test_the_norm_of_sharded_gradients_is_not_gathered() -> None:
    """Clipping gives a norm that no rank holds as a whole; it is left out, and is no trouble."""

    def work() -> dict[str, Any]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with observed() as recorder:
            model = fully_shard(_module(), mesh=init_device_mesh("cpu", (WORLD,)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model(torch.ones(4, 5)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return _report(recorder)

    for report in run(work, WORLD):
        assert report["troubles"] == []
        (clip,) = [row for row in report["rows"] if row["kind"] == "clip"]
        assert clip["numbers"]["limit"] == 1.0
        assert "norm" not in clip["numbers"]


@pytest.mark.parametrize("sizes", [(2, 2)])
def test_replicated_shards(sizes: tuple[int, int]) -> None:
    """Hybrid sharding: what comes out is an average over all ranks, replicas included."""

    def work() -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with observed() as recorder:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
            _loop(fully_shard(_module(), mesh=mesh), [(_none, _none)], updates=1)
            return _report(recorder)

    reports = run(work, 4)
    assert _factor(reports, 0) == pytest.approx([0.25] * len(_factor(reports, 0)), rel=1e-4)


def test_a_wrapper_within_a_module_of_the_user() -> None:
    def work() -> dict[str, Any]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        class Outer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = DistributedDataParallel(_module())

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return self.inner(inputs)

        with observed() as recorder:
            _loop(Outer(), [(_none, _none)])
            return _report(recorder)

    for report in run(work, WORLD):
        assert [reductions for reductions, _, _ in _seen(report)] == [1, 1]


def test_a_wrapper_that_nobody_holds_is_freed() -> None:
    def work() -> bool:
        import gc
        import weakref

        from torch.nn.parallel import DistributedDataParallel

        with observed() as recorder:
            model = DistributedDataParallel(_module())
            _loop(model, [(model.no_sync, _none), (_none, _none)])
            recorder.settle()
            held = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.reducer), weakref.ref(model.module[0].weight)]
            del model
            gc.collect()
            return all(each() is None for each in held)

    assert run(work, WORLD) == [True] * WORLD


def test_two_models_are_told_apart() -> None:
    def work() -> dict[str, Any]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        with observed() as recorder:
            one, other = DistributedDataParallel(_module()), DistributedDataParallel(_module())
            for last in (False, True):
                with contextlib.nullcontext() if last else one.no_sync():
                    loss = one(torch.ones(2, 5)).sum() + other(torch.ones(2, 5)).sum()
                    loss.backward()
            return _report(recorder)

    for report in run(work, WORLD):
        backwards = [row for row in report["rows"] if row["kind"] == "backward"]
        one, other = (uid for uid, wrapper, _, _ in report["objects"] if wrapper == "DDP")
        reduced = [(row["numbers"]["backward"], row["model"]) for row in report["rows"] if row["kind"] == "reduce"]
        assert sorted(reduced) == sorted([(backwards[0]["index"], other), (backwards[1]["index"], one), (backwards[1]["index"], other)])
        assert [row["sync"] for row in backwards] == [None, True]
