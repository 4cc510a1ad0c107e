"""Finds mistakes in PyTorch gradient accumulation: before the run, by rehearsing the training loop, and during it, by measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accumlint.watching import AccumulationError, Window, watch

__version__ = "0.1.0"
__all__ = ["AccumulationError", "Window", "__version__", "watch"]


def __getattr__(name: str) -> object:
    """The Python API is imported when it is used: the linter needs none of it."""
    if name in {"AccumulationError", "Window", "watch"}:
        import importlib

        return getattr(importlib.import_module("accumlint.watching"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
