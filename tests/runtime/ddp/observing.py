"""The data-parallel probes alone, without what starts and ends a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def observed(*, observe: bool = True) -> Iterator[Any]:
    """A recorder with the probes installed, or None; taken out again at the end."""
    if not observe:
        yield None
        return
    from accumlint.runtime.agent import start
    from accumlint.runtime.settings import Settings

    recorder = start(Settings("0", "", steps=1000))
    try:
        yield recorder
    finally:
        recorder.release()


def bits(tensor: Any) -> bytes:
    """The very bits of a tensor, or of this rank's part of it."""
    import torch

    local = getattr(tensor, "_local_tensor", tensor).detach()
    dense = local.to_dense() if local.is_sparse else local
    return bytes(dense.contiguous().flatten().view(torch.uint8).tolist())
