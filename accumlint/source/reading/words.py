"""Names of wrappers, and patterns that are asked about the same names in every turn of every rehearsal: each name is looked at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

MOST_NAMES = 8_192  # that a pattern remembers


def found_in(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    """Asks whether a pattern is found in a name."""

    @lru_cache(MOST_NAMES)
    def found(name: str) -> bool:
        return pattern.search(name) is not None

    return found


DDP_NAMES = frozenset({"DistributedDataParallel", "DDP"})
FSDP_NAMES = frozenset({"FullyShardedDataParallel", "FSDP"})
WRAPPER_NAMES = DDP_NAMES | FSDP_NAMES  # torch's own, as they are imported
