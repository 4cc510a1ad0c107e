"""A few values of a gradient before and after its reduction, copied on its device."""

from __future__ import annotations

from typing import Any

SIZE = 64  # values of one bucket


def strided(tensor: Any, size: int = SIZE) -> Any:
    """At most `size` values at positions that depend only on the number of elements."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // size)][:size].clone()


class Chunks:
    """Positions in the equal parts that a reduce-scatter cuts a flat tensor into, the same in each part.

    `chunk` is the number of elements of a part; the last one may be shorter, and only positions that it has are used.
    """

    def __init__(self, elements: int, parts: int, chunk: int, size: int = SIZE) -> None:
        self.parts, self.chunk = parts, chunk
        shortest = elements - chunk * (parts - 1)
        each = max(1, size // parts)
        self.stride = max(1, shortest // each)
        self.count = max(0, min(each, -(-shortest // self.stride)))

    def whole(self, tensor: Any) -> Any:
        """Values of the tensor that is to be cut, shape (parts, count)."""
        flat = tensor.detach().reshape(-1)
        return flat.as_strided((self.parts, self.count), (self.chunk, self.stride), flat.storage_offset()).clone()

    def part(self, tensor: Any) -> Any:
        """Values of one part, shape (count,)."""
        return tensor.detach().reshape(-1)[:: self.stride][: self.count].clone()
