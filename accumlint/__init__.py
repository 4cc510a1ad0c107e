"""Finds mistakes in PyTorch gradient accumulation by rehearsing the training loop."""

from __future__ import annotations

__version__ = "0.1.0"
