"""`accumlint.watch`: measures the updates of a block of a program, as `accumlint verify` does for a script."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from accumlint.config import OBJECTIVES
from accumlint.findings import Severity
from accumlint.verdict import REQUIREMENTS, Measurement, RankEnd, State, Status, Verdict, judged

if TYPE_CHECKING:
    from accumlint.runtime.adopt import Module, Observation, Optimizer

__all__ = ["AccumulationError", "Window", "checked", "watch"]

Level = Literal["error", "warning", "info"]
References = Literal["auto", "exact", "sketch", "off"]

WIDTH = 100  # columns of a report

_running = threading.Lock()


class AccumulationError(AssertionError):
    """What was watched is wrong, or was not observed. The message is the whole report.

    :ivar report: the measurement, with its `findings` and `checks`.
    :ivar verdict: what it comes to, and in one sentence why.
    """

    def __init__(self, message: str, report: Measurement, verdict: Verdict) -> None:
        super().__init__(message)
        self.report = report
        self.verdict = verdict


class Window:
    """The updates that are made while its `with` block runs. Made by :func:`watch`; a window is entered once."""

    def __init__(
        self,
        models: Sequence[Module],
        optimizers: Sequence[Optimizer],
        updates: int,
        *,
        objective: str = "token",
        reference: str = "auto",
        expect_k: int | None = None,
        tolerance: float | None = None,
    ) -> None:
        self._made = (models, optimizers)
        self._updates = updates
        self._objective = objective
        self._reference = reference
        self._expect_k = expect_k
        self._tolerance = tolerance
        self._at_least: Level | None = None  # what is raised for at the end of the block
        self._observation: Observation | None = None
        self._own: Mapping[str, Any] | None = None
        self._measured: Measurement | None = None

    def __enter__(self) -> Window:
        if self._own is not None:
            raise RuntimeError("this window has been watched already: call accumlint.watch() again for the next one")
        if not _running.acquire(blocking=False):
            raise RuntimeError("another accumlint.watch() is running in this process: one window is watched at a time")
        try:
            from accumlint.runtime.adopt import Observation
            from accumlint.runtime.settings import Settings

            settings = Settings("watch", "", steps=self._updates, reference=self._reference, objective=self._objective)
            self._observation = Observation(*self._made, settings)
        except BaseException:
            _running.release()
            raise
        self._made = ((), ())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        __tracebackhide__ = True
        observation, self._observation = self._observation, None
        if observation is None:
            return
        try:
            self._own = observation.end(error)
        finally:
            _running.release()
        if error is None and self._at_least is not None:
            self.raise_for_violations(self._at_least)

    @property
    def report(self) -> Measurement:
        """What the window has shown: `checks`, `findings`, `updates`, one for each update and rank, and `limits`.

        Of several ranks it is this one's, and says "not observed" where the others' numbers are needed, until :meth:`gather`
        has been called. Judged at the first access: rules and suppressions are those configured for the watched file.

        :raises RuntimeError: while the `with` block runs, or before it.
        """
        if self._measured is None:
            own = self._finished()
            measured = self._judged([own])
            world, rank = int(own["world"]), int(own["rank"])
            if world > 1:
                from accumlint.runtime.apart import apart

                measured = apart(measured, rank, world)
            self._measured = measured
        return self._measured

    def gather(self, group: Any = None) -> Measurement:
        """Compares the ranks: every rank gets the report of all, which is :attr:`report` from now on.

        A collective over `group` (the default process group): every rank of it must call this, after the `with` block.

        :raises RuntimeError: without a process group, or before the end of the `with` block.
        """
        from accumlint.runtime.adopt import gathered

        self._measured = self._judged(gathered(dict(self._finished()), group))
        return self._measured

    def text(self, output_format: str = "full", *, width: int = WIDTH) -> str:
        """The report, `width` columns wide, in one of the formats of `accumlint verify --output-format`.

        :raises ValueError: for an unknown format.
        """
        return self._text(judged(self.report), output_format, width)

    def __str__(self) -> str:
        return self.text() if self._own is not None else repr(self)

    def __repr__(self) -> str:
        state = "running" if self._observation is not None else "not watched yet" if self._own is None else self._told()
        return f"<accumlint.Window: {state}>"

    def raise_for_violations(self, at_least: Level = "error") -> None:
        """Raises unless the window is right: no finding as bad as `at_least`, and as many updates as expected.

        A check that only warnings stand behind raises with `at_least="warning"`. A window of which nothing could be confirmed
        is not right either.

        :raises AccumulationError: with the report as its message.
        """
        __tracebackhide__ = True
        level = _level(at_least)
        bad = sorted({each.code for each in self.report.findings if (each.severity or Severity.ERROR) >= level})
        verdict = judged(self.report)
        if verdict.status is Status.VIOLATED:
            raise self._error(verdict)
        if bad:
            raise self._error(Verdict(Status.VIOLATED, f"There are findings to raise for: {', '.join(bad)}."))
        if verdict.status is not Status.CONFIRMED:
            raise self._error(verdict)

    def require(self, *names: str) -> None:
        """Raises unless each of these was confirmed: "weights", "buckets", "gradient", "ranks".

        :raises AccumulationError: where one is violated or was not observed, with the report as its message.
        :raises ValueError: for an unknown name.
        """
        __tracebackhide__ = True
        for name in names:
            if name not in REQUIREMENTS:
                raise ValueError(f"require() takes {_quoted(REQUIREMENTS)}, not {name!r}")
        topics = [topic for name in names for topic in REQUIREMENTS[name]]
        states = {topic: check.state if (check := self.report.check(topic)) else State.NOT_OBSERVED for topic in topics}
        if any(state is State.VIOLATED for state in states.values()):
            wrong = [topic.value for topic, state in states.items() if state is State.VIOLATED]
            raise self._error(Verdict(Status.VIOLATED, f"Wrong, though required: {', '.join(wrong)}."))
        unseen = [topic.value for topic, state in states.items() if state is State.NOT_OBSERVED]
        if unseen:
            raise self._error(Verdict(Status.UNPROVED, f"Not observed, though required: {', '.join(unseen)}."))

    def _finished(self) -> Mapping[str, Any]:
        if self._own is None:
            raise RuntimeError("the window has no report yet: it is there when the `with` block has ended")
        return self._own

    def _told(self) -> str:
        return str(judged(self.report).status)

    def _judged(self, reports: Sequence[Mapping[str, Any]]) -> Measurement:
        from accumlint.cli.measured import selected
        from accumlint.cli.rehearsed import rehearsed
        from accumlint.rule import catalogue
        from accumlint.runtime.measure import Question, measurement

        question = Question(self._updates, tuple(catalogue().values()), self._expect_k, self._tolerance, keep=selected)
        ends = [_end(each) for each in sorted(reports, key=lambda each: int(each["rank"]))]
        return measurement(reports, question, rehearsed=rehearsed(reports), ends=ends, problem=self._problem(ends))

    def _problem(self, ends: Sequence[RankEnd]) -> str:
        raised = next((end for end in ends if end.ended == "error"), None)
        if raised is not None:
            return f"The watched block raised an error on rank {raised.rank}: {raised.detail}"
        least = min(ends, key=lambda end: end.updates)
        if least.updates >= self._updates:
            return ""
        noun = "update was" if self._updates == 1 else "updates were"
        of = f" on rank {least.rank}" if len(ends) > 1 else ""
        return f"{self._updates} {noun} expected, and {least.updates} seen{of} before the watch ended."

    def _text(self, verdict: Verdict, output_format: str = "full", width: int = WIDTH) -> str:
        from accumlint.cli.measured import source
        from accumlint.report.verify import FORMATS, every_rank, render
        from accumlint.rule import catalogue

        if output_format not in FORMATS:
            raise ValueError(f"text() writes {_quoted(FORMATS)}, not {output_format!r}")
        return render(
            self.report,
            catalogue(),
            source(),
            output_format=output_format,
            width=width,
            color=False,
            root=Path.cwd(),
            interactive=False,
            ranks=every_rank,
            verdict=verdict,
        )

    def _error(self, verdict: Verdict) -> AccumulationError:
        return AccumulationError(self._text(verdict).rstrip(), self.report, verdict)


def watch(
    model: Module | Iterable[Module],
    optimizer: Optimizer | Iterable[Optimizer],
    updates: int = 1,
    *,
    objective: Literal["token", "sample", "sequence"] = "token",
    reference: References = "auto",
    expect_k: int | None = None,
    tolerance: float | None = None,
) -> Window:
    """Measures what a `with` block trains: the weight of every target, the order of the update's events, the gradient.

    Nothing of what is trained changes, to the last bit, and all probes are taken out at the end of the block::

        >>> import accumlint, torch
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def train_step(k=4):
        ...     for _ in range(k):
        ...         inputs, targets = torch.randn(6, 8), torch.randint(4, (6,))
        ...         loss = torch.nn.functional.cross_entropy(model(inputs), targets) / k
        ...         loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> with accumlint.watch(model, optimizer) as window:
        ...     train_step()
        >>> window.raise_for_violations()
        >>> window.report.updates[0].micro_steps
        4

    A `DistributedDataParallel` that was made before keeps a communication hook that averages as torch does, for torch takes
    none back: register one of your own before. `torch.compile` is switched off inside the block.

    :param model: the model that is trained, wrapped or not, or several.
    :param optimizer: the optimizer that steps, or several; the updates of the first count.
    :param updates: how many updates are expected. Fewer are a violation, for what was expected was not observed.
    :param objective: what is to weigh the same. The reference gradient is that of "token".
    :param reference: "exact" holds one more copy of the gradients, "sketch" a few kilobytes, "auto" chooses by size, "off" has none.
    :param expect_k: micro-batches of a window; another number violates the window's boundary.
    :param tolerance: relative L2 error of the gradient that is allowed, in the place of the one for its dtype.
    :raises TypeError: where `model` is no module, or `optimizer` no optimizer.
    :raises ValueError: for `updates` below 1, or an unknown `objective` or `reference`.
    """
    from accumlint.runtime import adopt
    from accumlint.runtime.settings import REFERENCES

    models, optimizers = adopt.modules(model), adopt.optimizers(optimizer)
    for name, number in (("updates", updates), ("expect_k", expect_k)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name} must be a whole number, not a {type(number).__name__}")
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    for name, value, known in (("objective", objective, OBJECTIVES), ("reference", reference, REFERENCES)):
        if value not in known:
            raise ValueError(f"{name} must be {_quoted(known)}, not {value!r}")
    return Window(models, optimizers, updates, objective=objective, reference=reference, expect_k=expect_k, tolerance=tolerance)


def checked(
    model: Module | Iterable[Module],
    optimizer: Optimizer | Iterable[Optimizer],
    updates: int = 1,
    *,
    at_least: Level = "error",
    **options: Any,
) -> Window:
    """:func:`watch`, with :meth:`Window.raise_for_violations` at the end of a block that raised nothing itself."""
    _level(at_least)
    window = watch(model, optimizer, updates, **options)
    window._at_least = at_least
    return window


def _end(report: Mapping[str, Any]) -> RankEnd:
    error = report.get("error")
    if error is None:
        return RankEnd(int(report["rank"]), int(report["updates"]), "watch")
    return RankEnd(int(report["rank"]), int(report["updates"]), "error", f"{error['type']}: {error['message']}")


def _level(name: str) -> Severity:
    try:
        return Severity[name.upper()]
    except (KeyError, AttributeError):
        raise ValueError(f"at_least must be 'error', 'warning' or 'info', not {name!r}") from None


def _quoted(names: Iterable[str]) -> str:
    *others, last = [repr(name) for name in names]
    return f"{', '.join(others)} or {last}"
