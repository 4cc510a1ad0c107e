"""Checksums of gradients and parameters at an update, to compare the ranks that should hold the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind, Wrapper

BITS = 52  # of a checksum, which has to survive as a float
ODD = 0x9E3779B97F4A7C15 >> 12 | 1  # spreads the positions of the parameters
SHARDED = frozenset({Wrapper.FSDP1.value, Wrapper.FSDP2.value})


def install(recorder: Recorder, patches: Patches) -> None:
    import torch.distributed

    if torch.distributed.is_available():
        recorder.listeners.append(Checksums(recorder))


@dataclass(slots=True)
class _Scope:
    """Parameters of one optimizer that the same ranks replicate."""

    model: int | None
    wrapper: str
    ranks: list[int] | None  # None where no wrapper says: all of them
    parameters: list[Any] = field(default_factory=list)

    def described(self) -> dict[str, Any]:
        elements = sum(parameter.numel() for parameter in self.parameters)
        return {"model": self.model, "wrapper": self.wrapper, "ranks": self.ranks, "parameters": len(self.parameters), "elements": elements}


class Checksums(Listener):
    """Writes into a STEP's numbers "checksum_scope" (a list of groups of parameters), and a value for each of them in
    "grad_checksum" (as the step found the gradients) and "parameter_checksum" (as it left the parameters).

    "checksum_skipped" counts the parameters that no two ranks hold alike.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._scopes: list[_Scope] = []
        self._row: Row | None = None

    def change_begins(self, row: Row) -> None:
        if row.kind != Kind.STEP.value or self.recorder.in_backward is not None or not _many_ranks() or not row.targets:
            return
        if row.targets[0] in _shard_optimizers(self.recorder):
            row.options.append("shard")  # of an optimizer whose state is spread over the ranks: each steps its own part
            return
        self._row, self._scopes, skipped = row, *self._divided(row.targets[0])
        row.numbers["checksum_scope"] = [scope.described() for scope in self._scopes]
        if skipped:
            row.numbers["checksum_skipped"] = skipped
        self._note(row, "grad_checksum", [[parameter.grad for parameter in scope.parameters] for scope in self._scopes])

    def window_closes(self, row: Row) -> None:
        if row is not self._row:
            return
        self._note(row, "parameter_checksum", [scope.parameters for scope in self._scopes])
        self._row, self._scopes = None, []

    def release(self) -> None:
        self._row, self._scopes = None, []

    def _note(self, row: Row, key: str, groups: list[list[Any]]) -> None:
        import torch

        sums = [checksum(tensors) for tensors in groups]
        if sums:
            device = sums[0].device
            self.recorder.later(row.numbers, key, torch.stack([each.to(device, non_blocking=True) for each in sums]))

    def _divided(self, optimizer: int) -> tuple[list[_Scope], int]:
        """The parameters of an optimizer by wrapper, without those that are spread over ranks, and how many these are."""
        owners = self._owners()
        scopes: dict[int | None, _Scope] = {}
        skipped = 0
        for parameter in self.recorder.optimizers.parameters(optimizer):
            uid = owners.get(id(parameter))
            if _is_shard(parameter) or (uid is not None and self._shards(uid)):
                skipped += 1
                continue
            scope = scopes.get(uid)
            if scope is None:
                scope = scopes[uid] = self._scope(uid)
            scope.parameters.append(parameter)
        return list(scopes.values()), skipped

    def _scope(self, uid: int | None) -> _Scope:
        if uid is None:
            return _Scope(None, Wrapper.NONE.value, None)
        entry = self.recorder.objects.entry(uid)
        return _Scope(uid, entry.wrapper, entry.numbers.get("ranks"))

    def _shards(self, uid: int) -> bool:
        entry = self.recorder.objects.entry(uid)
        return entry.wrapper == Wrapper.FSDP1.value and "no_shard" not in entry.options

    def _owners(self) -> dict[int, int]:
        """By id of a parameter, the wrapper that it is in."""
        found: dict[int, int] = {}
        for info in self.recorder.objects.wrappers:
            module = info.module()
            if module is not None:
                # DDP leaves some to the user when asked to: no rank has to hold the same there.
                managed = getattr(module, "_module_parameters", None) or module.parameters()
                found.update((id(parameter), info.uid) for parameter in managed)
        return found


def checksum(tensors: Iterable[Any]) -> Any:
    """A 0-dimensional int64 tensor below 2^52 that changes with any bit of any of the tensors (None counts as absent).

    It does not depend on strides or on how the tensors are cut into buckets, and is computed where they are.
    """
    import torch

    given = list(tensors)
    present = [each for each in given if each is not None]
    pattern = zlib.crc32(bytes(each is None for each in given))
    if not present:
        return torch.tensor(pattern, dtype=torch.int64)
    device = present[0].device
    sums = torch.stack([_sum(each).to(device, torch.int64, non_blocking=True) for each in present])
    places = torch.arange(1, len(present) + 1, dtype=torch.int64, device=device)
    return ((sums * (2 * places * ODD + 1)).sum() + pattern) & ((1 << BITS) - 1)


def _sum(tensor: Any) -> Any:
    """The sum of the elements' bits, in whole numbers of their size, wrapping around."""
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values = getattr(tensor, "_local_tensor", tensor).detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() not in whole:
        values = values.double()
    kind = whole[values.element_size()]
    # A sum of a smaller type in int64 would first copy all of it.
    return values.view(kind).sum(dtype=kind)


def _is_shard(parameter: Any) -> bool:
    placements = getattr(parameter, "placements", None)
    return placements is not None and not all(placement.is_replicate() for placement in placements)


def _many_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_world_size() > 1


def _shard_optimizers(recorder: Recorder) -> set[int]:
    """The numbers of the optimizers that a ZeroRedundancyOptimizer steps for its own rank."""
    found: set[int] = set()
    for _, optimizer in recorder.optimizers.live():
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            uid = recorder.objects.known(getattr(optimizer, "optim", None))
            found |= set() if uid is None else {uid}
    return found
