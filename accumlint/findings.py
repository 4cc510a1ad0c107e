"""What a rule reports, and how sure it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from accumlint.trace import Event, Place, Trace, Window


class Severity(enum.IntEnum):
    """How bad it is. Only errors and warnings are on by default."""

    INFO = 0
    WARNING = 1
    ERROR = 2

    def __str__(self) -> str:
        return self.name.lower()


class Confidence(enum.IntEnum):
    """HIGH when every event that the finding rests on was followed, MEDIUM when an unknown call could have done the missing part."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2

    def __str__(self) -> str:
        return self.name.lower()


class Applicability(enum.Enum):
    """Whether a fix keeps the program's meaning (SAFE), changes it as the rule wants (UNSAFE), or is only shown."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    DISPLAY = "display"


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text between two places (1-based, end exclusive)."""

    place: Place
    content: str


@dataclass(frozen=True, slots=True)
class Fix:
    applicability: Applicability
    message: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Finding:
    """One mistake at one place.

    `message` is one sentence about this code, with its own names. `help` says what to write instead. `events` are those
    of the guilty window, in order, and `guilty` the indices of the marked ones.
    """

    code: str
    place: Place
    message: str
    help: str = ""
    confidence: Confidence = Confidence.HIGH
    events: tuple[Event, ...] = ()
    guilty: tuple[int, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    fix: Fix | None = None
    severity: Severity | None = None  # None: the rule's own
    trace: Trace | None = field(default=None, compare=False, repr=False)
    noqa_line: int | None = None  # where a suppression belongs, when not on the finding's own line

    @property
    def key(self) -> tuple[str, str, int, int]:
        return (self.place.path, self.code, self.place.line, self.place.column)


def at(
    code: str,
    event: Event,
    message: str,
    *,
    help: str = "",
    window: Window | None = None,
    confidence: Confidence = Confidence.HIGH,
    guilty: tuple[Event, ...] = (),
    place: Place | None = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding on an event (or on `place`), drawn with the window it happened in."""
    marked = guilty or (event,)
    events = window.events if window is not None else marked
    return Finding(code, place or event.place, message, help, confidence, events, tuple(one.index for one in marked), severity=severity)
