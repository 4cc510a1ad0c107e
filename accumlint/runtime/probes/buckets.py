"""The buckets that DistributedDataParallel reduces, seen by a communication hook that averages as torch itself does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from accumlint.runtime.objects import WrapperInfo
from accumlint.runtime.probes.samples import strided
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind

Hook = Callable[[Any, Any], Any]


class _Gone:
    """Stands for the observer of a reducer that nobody observes any more."""

    active = False
    in_backward = None


class Tap:
    """The hook of one reducer: it records each bucket, then averages, or hands on to the user's own hook.

    Without a hook torch multiplies a gradient by 1/W while it copies it into the bucket, and divides it by W where the
    gradient lies in the bucket already. Both are repeated here, for they differ in the last bit unless W is a power of two.
    """

    def __init__(self, recorder: Recorder, buckets: Buckets, inner: Hook | None = None, state: Any = None) -> None:
        self.recorder: Recorder | _Gone = recorder
        self.buckets: Buckets | None = buckets
        self.inner = inner
        self.state = state
        self.model: int | None = None
        self.joining: Any = None  # the work that counts how many ranks have not run out of data
        self.stays = False  # backwards tell it what it has to know, also without an observer
        self._ddp: Callable[[], Any] = lambda: None
        self._lying: dict[int, int] = {}  # by id of a parameter, the memory that its gradient lies in as the backward begins

    def belongs_to(self, ddp: Any, model: int | None) -> None:
        self._ddp = weakref.ref(ddp)
        self.model = model

    def reduce(self, _: Any, bucket: Any) -> Any:
        """Called by the reducer for one bucket; returns the future of the averaged bucket."""
        row = self._before(bucket)
        future = self._average(bucket) if self.inner is None else self.inner(self.state, bucket)
        if row is not None and self.buckets is not None and self.recorder.in_backward is not None:
            self.buckets.running.append((row, future))
        return future

    def is_observed_by(self, buckets: Buckets) -> None:
        self.recorder, self.buckets = buckets.recorder, buckets

    def is_left(self) -> None:
        """A reducer never gives its hook back; without an observer it averages, and keeps nothing of what was seen."""
        self.recorder, self.buckets, self.model = _Gone(), None, None

    def group(self) -> Any:
        """The process group of the wrapper."""
        return self._ddp().process_group

    @property
    def tells_copies(self) -> bool:
        """Whether it has to know which gradients lie in their bucket already."""
        ddp = self._ddp()
        if ddp is None or self.inner is not None or not getattr(ddp, "gradient_as_bucket_view", False):
            return False
        return not _exact(ddp.process_group.size()) or self.joining is not None

    def backward_begins(self) -> None:
        if self.tells_copies:
            self._lying = {id(each): _memory(each.grad) for each in self._ddp().parameters() if each.grad is not None}

    def _before(self, bucket: Any) -> Row | None:
        recorder = self.recorder
        if isinstance(recorder, _Gone) or not recorder.active:
            return None
        try:
            buffer, backward = bucket.buffer(), recorder.in_backward
            row = recorder.event(Kind.REDUCE, model=self.model)
            row.numbers.update(bucket=bucket.index(), elements=buffer.numel(), backward=None if backward is None else backward.index)
            if backward is None:
                row.options.append("joined")  # a rank that has run out of data takes part with zeros
            elif not buffer.is_sparse:
                recorder.later(row.numbers, "before", strided(buffer))
            return row
        except Exception as error:
            recorder.trouble(f"bucket: {type(error).__name__}: {error}")
            return None

    def _average(self, bucket: Any) -> Any:
        ddp, buffer = self._ddp(), bucket.buffer()
        divisor = self._divisor(ddp)
        if buffer.is_sparse or getattr(ddp, "batched_grad_copy", False):
            buffer.div_(divisor)
        elif _exact(divisor) or not ddp.gradient_as_bucket_view:
            buffer.mul_(1.0 / divisor)
        else:
            memory = _memory(buffer)
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if self._lying.get(id(parameter)) == memory:
                    view.div_(divisor)
                else:
                    view.mul_(1.0 / divisor)
        return ddp.reducer._run_allreduce_hook(bucket).then(_first)

    def _divisor(self, ddp: Any) -> int:
        if self.joining is None or ddp._divide_by_initial_world_size:
            return int(ddp.process_group.size())
        self.joining.wait()  # as the reducer does
        return int(self.joining.result()[0].item())


class Buckets(Listener):
    """The taps of all reducers, and the buckets of the running backward."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.running: list[tuple[Row, Any]] = []
        self.composing: WrapperInfo | None = None  # the module that `replicate` wraps in place, while it makes its hidden wrapper
        self._taps: weakref.WeakKeyDictionary[Any, Tap] = weakref.WeakKeyDictionary()

    def tap_of(self, reducer: Any) -> Tap | None:
        return self._taps.get(reducer)

    def tap(self, reducer: Any, register: Callable[[Any, Any, Hook], object], inner: Hook | None = None, state: Any = None) -> Tap:
        """Registers a hook with a reducer that has none, or takes over the one that an earlier observer has left."""
        tap = _LEFT.pop(reducer, None)
        if tap is None:
            tap = Tap(self.recorder, self, inner, state)
            register(reducer, None, tap.reduce)
        else:
            tap.is_observed_by(self)
            if inner is not None:
                tap.inner, tap.state = inner, state
        self._taps[reducer] = tap
        return tap

    def notifying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For `Join.notify_join_context`, which returns the work that counts the ranks that take part."""

        @functools.wraps(original)
        def notify_join_context(joinable: Any) -> Any:
            work, reducer = original(joinable), getattr(joinable, "reducer", None)
            tap = None if reducer is None else self.tap_of(reducer)
            if tap is not None:
                tap.joining = work
            return work

        return notify_join_context

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        self.running.clear()
        for tap in self._taps.values():
            tap.backward_begins()

    def backward_ends(self, row: Row) -> None:
        # The reducer has waited for all of them by now.
        running, self.running = self.running, []
        for reduced, future in running:
            result = future.value()
            if not result.is_sparse:
                self.recorder.later(reduced.numbers, "after", strided(result))

    def release(self) -> None:
        self.running.clear()

    def stay(self) -> None:
        """After the probes have been taken out: a reducer keeps its hook, and some hooks have to know more than their bucket."""
        if any(tap.joining is not None for tap in self._taps.values()):
            from torch.distributed.algorithms.join import Join

            Join.notify_join_context = staticmethod(self.notifying(Join.notify_join_context))  # type: ignore[method-assign]
        _LEFT.update(self._taps)
        taps = [tap for tap in self._taps.values() if tap.tells_copies and not tap.stays]
        for tap in self._taps.values():
            tap.is_left()
        if not taps:
            return
        for tap in taps:
            tap.stays = True
        import torch

        original, running = torch.autograd.backward, [False]

        @functools.wraps(original)
        def backward(*arguments: Any, **options: Any) -> None:
            if running[0]:  # a checkpoint's, within another one
                original(*arguments, **options)
                return
            running[0] = True
            try:
                for tap in taps:
                    tap.backward_begins()
                original(*arguments, **options)
            finally:
                running[0] = False

        torch.autograd.backward = backward


# The hooks that observers have left, by reducer.
_LEFT: weakref.WeakKeyDictionary[Any, Tap] = weakref.WeakKeyDictionary()


def _first(future: Any) -> Any:
    return future.value()[0]


def _exact(divisor: int) -> bool:
    """Whether multiplying by 1 / divisor is dividing by it, to the last bit."""
    return divisor & (divisor - 1) == 0


def _memory(tensor: Any) -> int:
    return 0 if tensor.is_sparse else int(tensor.untyped_storage().data_ptr())
