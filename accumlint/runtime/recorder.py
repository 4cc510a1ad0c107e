"""What happens in one process of a run, in order, with the user's line for each event.

Numbers that live on a device stay there until the window closes: nothing here waits for a device inside a window.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from accumlint.runtime.microbatches import MicroBatches
from accumlint.runtime.objects import Objects, WrapperInfo
from accumlint.runtime.optimizers import Optimizers
from accumlint.runtime.places import Site, site, user_frames
from accumlint.runtime.settings import Settings
from accumlint.runtime.turns import Turns
from accumlint.trace import Kind, Role, Wrapper

PASS_ENDS = "pass-ends"  # a loader was exhausted; not an event of the trace, but it tells which turn was the last
MAX_TROUBLES = 20


@dataclass(slots=True)
class Row:
    """One event. The fields are those of `accumlint.trace.Event`, with objects as numbers; `at` is an index into the stacks."""

    index: int
    kind: str
    at: int = -1
    micro_batch: int = 0
    model: int | None = None
    scaler: int | None = None
    targets: list[int] = field(default_factory=list)
    sync: bool | None = None
    bypass: bool = False
    forwards: list[int] = field(default_factory=list)
    reaches: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    retains_graph: bool = False
    scaled: bool | None = None
    options: list[str] = field(default_factory=list)
    note: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    turns: list[list[int]] = field(default_factory=list)


class Listener:
    """What a probe may want to know of. Nothing here may raise into the user's program, or wait for a device inside a window."""

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        """Before `torch.autograd.backward` runs on these tensors."""

    def backward_ends(self, row: Row) -> None:
        """After it has returned."""

    def parameter_gradient(self, parameter: Any, gradient: Any) -> None:
        """What this backward contributes to a parameter, before it is added to `.grad`."""

    def change_begins(self, row: Row) -> None:
        """Before an UNSCALE, CLIP or STEP takes effect."""

    def change_ends(self, row: Row) -> None:
        """After it."""

    def zeroed(self, row: Row) -> None:
        """After a ZERO."""

    def window_closes(self, row: Row) -> None:
        """After a real update; `row` is its STEP. Waiting for the device is allowed."""

    def settled(self) -> None:
        """What was kept on the devices has been read."""

    def release(self) -> None:
        """The probes are taken out; let go of everything."""


class Leaver(Protocol):
    """What ends the run after its last update."""

    def update_done(self) -> None: ...

    def passing(self) -> None: ...


class Recorder:
    """The events of one process. `updates` counts those of the optimizer that stepped first."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.script = os.path.realpath(sys.argv[0]) if sys.argv and sys.argv[0] else ""  # before the script can change its folder
        self.active = True
        self.rows: list[Row] = []
        self.stacks: list[list[Site]] = []
        self.listeners: list[Listener] = []
        self.objects = Objects()
        self.optimizers = Optimizers(self)
        self.stepping: int | None = None  # the scaler whose step is running
        self.in_backward: Row | None = None
        self.stopper: Leaver | None = None
        self.facts: list[dict[str, Any]] = []
        self.limits: list[str] = []
        self.census: dict[str, Any] = {}  # what the run holds, counted at the last update
        self.troubles: list[str] = []
        self.progress: list[Callable[[], None]] = []  # called at every backward and update
        self.updates = 0
        self.settled = 0  # rows before this one have no numbers left on a device
        self._by_site: dict[tuple[Site, ...], int] = {}
        self._turns = Turns()
        self._pending: list[tuple[dict[str, Any], str, Any]] = []
        self._leading: int | None = None
        self._micro_batches = MicroBatches()
        self._releases: list[Callable[[], None]] = []
        self.thread = threading.get_ident()

    def event(self, kind: Kind | str, **fields: Any) -> Row:
        """Adds an event that happens now, at the user's line that is running."""
        row = Row(len(self.rows), kind.value if isinstance(kind, Kind) else kind, **fields)
        running = self.in_backward
        if running is not None and threading.get_ident() != self.thread:
            # On a thread of the engine none of the user's frames is on the stack.
            row.at, row.turns = running.at, running.turns
        elif row.at < 0:
            frames = user_frames(2)
            row.turns = self._turns.of(frames)
            row.at = self._stack(tuple(site(frame) for frame in frames))
        stack = self.stacks[row.at] if row.at >= 0 else []
        row.micro_batch = self._micro_batches.number(row, stack[0] if stack else None)
        self.rows.append(row)
        return row

    def here(self) -> int:
        """The stack at this moment, as an index into the stacks, for an event that may be added later."""
        return self._stack(tuple(site(frame) for frame in user_frames(2)))

    def uid(self, thing: object, role: Role, **fields: Any) -> int:
        """The number of an object; the first call names and describes it."""
        return self.objects.uid(thing, role, **fields)

    def register_wrapper(self, module: Any, kind: Wrapper, inner: Any, options: frozenset[str], sync: Callable[[], bool]) -> WrapperInfo:
        """Makes a data-parallel wrapper known: `sync()` reads its flag."""
        return self.objects.register_wrapper(module, kind, inner, options, sync)

    def wrapper_of(self, module: Any) -> WrapperInfo | None:
        return self.objects.wrapper_of(module)

    def later(self, numbers: dict[str, Any], key: str, tensor: Any) -> None:
        """Keeps a small tensor on its device; it becomes a float, or a list of floats, when the window closes."""
        self._pending.append((numbers, key, tensor.detach()))

    def fact(self, name: str, text: str) -> None:
        """Evidence by name, with the line that is running; each is kept once."""
        frames = user_frames(2)
        fact = {"name": name, "text": text, "at": self._stack(tuple(site(frame) for frame in frames))}
        if fact not in self.facts:
            self.facts.append(fact)

    def limit(self, text: str) -> None:
        """What could not be observed, and why."""
        if text not in self.limits:
            self.limits.append(text)

    def trouble(self, text: str) -> None:
        """An internal problem: the run goes on, and the report says so."""
        if text not in self.troubles and len(self.troubles) < MAX_TROUBLES:
            self.troubles.append(text)

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls every listener; what one of them raises is noted, and never reaches the user's program."""
        for listener in self.listeners:
            try:
                getattr(listener, method)(*arguments)
            except Exception as error:
                self.trouble(f"{type(listener).__name__}.{method}: {type(error).__name__}: {error}")

    def lead(self, uid: int) -> None:
        """The updates of this optimizer are those that count."""
        self._leading = uid

    def closes_window(self, row: Row) -> None:
        """After a real update by a STEP."""
        self.tell("window_closes", row)
        if self.in_backward is None:
            self.settle()
        if self._leading is None:
            self._leading = row.targets[0] if row.targets else -1
        if row.targets and row.targets[0] == self._leading:
            self.updates += 1
            self.moved()
            if self.stopper is not None:
                self.stopper.update_done()

    def moved(self) -> None:
        """There is progress."""
        for each in self.progress:
            each()

    def passing(self) -> None:
        """Something begins that no longer belongs to the last update; the run may end here."""
        if self.stopper is not None:
            self.stopper.passing()

    def settle(self) -> None:
        """Reads what is left on the devices."""
        pending, self._pending = self._pending, []
        for numbers, key, tensor in pending:
            try:
                numbers[key] = tensor.tolist()
            except Exception as error:
                numbers[key] = None
                self.trouble(f"{key}: {type(error).__name__}: {error}")
        self.settled = len(self.rows)
        self.tell("settled")

    def on_release(self, action: Callable[[], None]) -> None:
        self._releases.append(action)

    def release(self) -> None:
        """Takes the probes out; the user's program goes on without them."""
        self.active = False
        self.tell("release")
        while self._releases:
            self._releases.pop()()

    def events(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [asdict(row) for row in self.rows]

    def _stack(self, sites: tuple[Site, ...]) -> int:
        found = self._by_site.get(sites)
        if found is None:
            found = self._by_site[sites] = len(self.stacks)
            self.stacks.append(list(sites))
        return found


def installed_torch() -> Any:
    """The torch that the process has imported."""
    return sys.modules["torch"]
