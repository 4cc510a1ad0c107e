"""What the model, its gradients and the optimizer hold."""

from __future__ import annotations

from accumlint.runtime.checks.context import Run, confirmed, unobserved
from accumlint.verdict import Check, Topic

NAMES = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer state", "peak_allocated": "peak allocated"}


def memory(run: Run) -> Check:
    """Bytes on rank 0; the peak where the device counts its allocations."""
    held = run.reports[0]["memory"] if run.reports else {}
    if not held.get("parameters"):
        return unobserved(Topic.MEMORY, "No optimizer's parameters were there to be counted.")
    told = ", ".join(f"{name} {_size(held[key])}" for key, name in NAMES.items() if held.get(key))
    peak = "" if "peak_allocated" in held else " A CPU does not count a peak."
    return confirmed(Topic.MEMORY, f"{told[0].upper()}{told[1:]}.{peak}", (), held)


def _size(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return ""
