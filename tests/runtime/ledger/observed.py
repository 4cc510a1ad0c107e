"""A process observed by the ledger and the reference alone, for the tests here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accumlint.runtime.agent import start
from accumlint.runtime.recorder import Recorder, Row
from accumlint.runtime.settings import Settings


@contextmanager
def observed(reference: str = "off", folder: str = "", steps: int = 2, objective: str = "token") -> Iterator[Recorder]:
    """Observes until the block ends, and fails where the probes had troubles of their own."""
    recorder = start(Settings("test", folder, steps=steps, reference=reference, objective=objective))
    try:
        yield recorder
        recorder.settle()
        assert recorder.troubles == []
    finally:
        recorder.release()


def rows(recorder: Recorder, kind: str) -> list[Row]:
    return [row for row in recorder.rows if row.kind == kind]


def backwards(recorder: Recorder) -> list[dict[str, Any]]:
    """The numbers of every backward, read from the device."""
    recorder.settle()
    return [row.numbers for row in rows(recorder, "backward")]


def only_loss(recorder: Recorder) -> dict[str, Any]:
    """The one loss of the one backward."""
    (numbers,) = backwards(recorder)
    (loss,) = numbers["losses"]
    assert numbers["covered"] is True
    found: dict[str, Any] = loss
    return found
