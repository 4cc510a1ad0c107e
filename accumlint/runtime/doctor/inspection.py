"""Says as JSON what the torch of this Python has, a script that imports torch alone: names wanted on standard input."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def resolve(name: str) -> Any:
    """What a dotted name leads to, modules as far as there are any, then attributes; None for nothing."""
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:at]))
        except Exception:  # none of this name, or one that fails to import for lack of something else
            continue
        for part in parts[at:]:
            found = getattr(found, part, None)
        return found
    return None


def has(name: str) -> bool:
    return resolve(name) is not None


def devices() -> list[dict[str, Any]]:
    """CUDA devices: name, memory in bytes, compute capability."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": each.name, "memory": each.total_memory, "capability": f"{each.major}.{each.minor}"} for each in found]


def backends() -> dict[str, bool]:
    if not dist.is_available():
        return {}
    return {name: bool(getattr(dist, f"is_{name}_available", bool)()) for name in ("gloo", "nccl", "mpi")}


def main() -> None:
    wanted = json.load(sys.stdin)
    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "distributed": dist.is_available(),
        "backends": backends(),
        "devices": devices(),
        "found": [name for name in wanted if has(name)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
