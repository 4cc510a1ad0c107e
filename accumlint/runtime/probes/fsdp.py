"""FullyShardedDataParallel and `fully_shard`: their flags and their reductions. Nothing of theirs is replaced but watched."""

from __future__ import annotations

from typing import Any

from accumlint.runtime.imports import when_imported
from accumlint.runtime.patches import Patches
from accumlint.runtime.probes.fsdp1 import Flat
from accumlint.runtime.probes.fsdp2 import Groups
from accumlint.runtime.recorder import Recorder

FLAT = "torch.distributed.fsdp"
GROUPS = (
    ("torch.distributed.fsdp._fully_shard", "_fully_shard"),
    ("torch.distributed._composable.fsdp", "fully_shard"),  # before torch 2.6
)


def install(recorder: Recorder, patches: Patches) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    flat, groups = Flat(recorder), Groups(recorder)
    recorder.listeners.extend((flat, groups))

    def watch(name: str, patch: Any) -> None:
        when_imported(recorder, patches, name, lambda module: patch(module, patches))

    watch(f"{FLAT}._runtime_utils", flat.watch_reductions)
    watch(f"{FLAT}.fully_sharded_data_parallel", flat.watch_wrapper)
    for package, public in GROUPS:
        watch(f"{package}._fsdp_param_group", groups.watch_reductions)
        watch(f"{package}._fsdp_state", groups.watch_states)
        watch(f"{package}.{public}", groups.watch_flags)
