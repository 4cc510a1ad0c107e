"""The comparison over several ranks.

Every rank leaves its sums, and rank 0 its gradient as well: in files of the run's folder, or as sketches in their reports.
torch is needed for files only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accumlint.runtime.reference.verdicts import NOT_OBSERVED, compare_sketches, distance

CHUNK = 1 << 22  # elements in memory at once
PREFIX = "reference-"

Reference = dict[str, Any]


def compare(folder: str, reports: Sequence[Mapping[str, Any]]) -> dict[int, Reference]:
    """For each update of rank 0 that waits for the other ranks: the finished numbers, by the index of its STEP event.

    `reports` are those of all ranks. The files are deleted.
    """
    try:
        ranks = {int(report["rank"]): _references(report) for report in reports}
        world = max((int(report.get("world") or 1) for report in reports), default=1)
        found = {}
        for where, (index, own) in ranks.get(0, {}).items():
            if waits(own):
                found[index] = _finished(folder, own, [ranks.get(rank, {}).get(where, (0, {}))[1] for rank in range(world)])
        return found
    finally:
        delete(folder)


def finish(folder: str, rows: Sequence[Any], reports: Sequence[Mapping[str, Any]]) -> bool:
    """Puts the finished numbers into rank 0's rows; whether there were any."""
    found = compare(folder, reports)
    for index, reference in found.items():
        rows[index].numbers["reference"] = reference
    return bool(found)


def waits(reference: Mapping[str, Any]) -> bool:
    """Whether a reference is one rank's part only."""
    return "file" in reference or "sums" in reference


def delete(folder: str) -> None:
    """Removes the files of all ranks."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def _references(report: Mapping[str, Any]) -> dict[tuple[int, ...], tuple[int, Reference]]:
    """The references of a rank by the place of their window: optimizer, and number of the update."""
    found = {}
    for event in report["events"]:
        reference = event["numbers"].get("reference")
        if event["kind"] == "step" and reference and "window" in reference:
            found[tuple(reference["window"])] = (int(event["index"]), reference)
    return found


def _finished(folder: str, own: Reference, every: list[Reference]) -> Reference:
    kept = {key: own[key] for key in ("kind", "dtype", "window")}
    for rank, reference in enumerate(every):
        if not waits(reference) or reference["kind"] != own["kind"]:
            why = reference.get("why") or ("it made no such update" if not reference else "it keeps another kind of reference")
            return {**kept, "kind": NOT_OBSERVED if waits(reference) else reference.get("kind", NOT_OBSERVED), "why": f"rank {rank}: {why}"}
    kept.update(why="", units=sum(reference["units"] for reference in every), bytes=max(reference["bytes"] for reference in every))
    if "sums" in own:
        return {**kept, **compare_sketches([(reference["sums"], reference["units"]) for reference in every], own["gradient"])}
    try:
        return {**kept, **distance(_measured(folder, own, every, kept["units"]))}
    except OSError as error:
        return {**kept, "kind": NOT_OBSERVED, "why": f"a rank's sums could not be read: {error}"}


def _measured(folder: str, own: Reference, every: list[Reference], units: float) -> list[tuple[str, float, float, float]]:
    with contextlib.ExitStack() as stack:

        def part(name: str, layout: list[list[Any]]) -> _Part:
            return _Part(stack.enter_context(open(os.path.join(folder, name), "rb")), layout)

        parts = [part(reference["file"], reference["layout"]) for reference in every]
        gradient = part(own["gradient_file"], own["layout"])
        return [_parameter(index, parts, gradient, units) for index in _indices(parts)]


@dataclass(slots=True)
class _Part:
    """The file of one rank, and where in it each parameter lies."""

    file: Any
    layout: list[list[Any]]

    def place(self, index: int) -> tuple[int, str, int, str] | None:
        """Offset in bytes, name, number of elements and format."""
        offset = 0
        for number, name, elements, dtype in self.layout:
            if number == index:
                return offset, name, elements, dtype
            offset += elements * _size(dtype)
        return None

    def read(self, index: int, begin: int, count: int) -> Any:
        """Some elements as float64, None where the rank has none."""
        import torch

        place = self.place(index)
        if place is None:
            return None
        offset, _, _, dtype = place
        self.file.seek(offset + begin * _size(dtype))
        data = bytearray(self.file.read(count * _size(dtype)))
        if len(data) != count * _size(dtype):
            raise OSError("the file is too short")
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).to(torch.float64)


def _indices(parts: list[_Part]) -> list[int]:
    return sorted({entry[0] for part in parts for entry in part.layout})


def _parameter(index: int, parts: list[_Part], gradient: _Part, units: float) -> tuple[str, float, float, float]:
    """Name, distance, norm of the reference and largest difference."""
    _, name, elements, _ = next(place for part in parts if (place := part.place(index)) is not None)
    apart = size = largest = 0.0
    for begin, count in _chunks(elements):
        given = [each for part in parts if (each := part.read(index, begin, count)) is not None]
        expected = sum(given[1:], start=given[0]) / units
        real = gradient.read(index, begin, count)
        difference = expected - real if real is not None else expected
        apart += float(difference.square().sum())
        size += float(expected.square().sum())
        largest = max(largest, float(difference.abs().max()))  # not finite: the norms tell
    return name, apart**0.5, size**0.5, largest


def _chunks(elements: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, elements, CHUNK):
        yield begin, min(CHUNK, elements - begin)


def _size(dtype: str) -> int:
    """Bytes of an element."""
    return 8 if dtype == "float64" else 4
