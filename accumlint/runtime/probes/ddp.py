"""DistributedDataParallel and what is built on it: its flag, its hooks, its buckets."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.probes import replicate
from accumlint.runtime.probes.buckets import Buckets, Tap
from accumlint.runtime.probes.samples import strided
from accumlint.runtime.recorder import Recorder
from accumlint.trace import Kind, Wrapper

FLAG = "require_backward_grad_sync"
COMM_HOOK = "comm-hook"
STATIC = "static_graph"
NO_AVERAGING = "no-averaging"  # the divisor is not the number of ranks
MAX_DEPTH = 6  # frames between an assignment of the flag and the context manager that makes it
_OUTLIVING: set[int] = set()  # ids of process groups that are never let go


def install(recorder: Recorder, patches: Patches) -> None:
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_available():
        return
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    buckets, register = Buckets(recorder), dist._register_comm_hook
    recorder.listeners.append(buckets)
    recorder.on_release(buckets.stay)  # what was registered first is called last: after the patches are gone
    patches.replace(dist, "_register_comm_hook", lambda original: _registering(recorder, buckets, original))
    patches.replace(dist, "_register_builtin_comm_hook", lambda original: _registering_builtin(recorder, buckets, original))
    patches.replace(DistributedDataParallel, "__init__", lambda original: _constructing(recorder, buckets, original, register))
    patches.replace(DistributedDataParallel, "_set_static_graph", lambda original: _made_static(recorder, original))
    patches.replace(DistributedDataParallel, "_delayed_all_reduce_hook", lambda original: _delayed(recorder, original))
    patches.replace(Join, "notify_join_context", buckets.notifying)
    outer = vars(DistributedDataParallel).get(FLAG)
    setattr(DistributedDataParallel, FLAG, Flag(recorder, DistributedDataParallel.no_sync, outer))
    if outer is None:
        patches.on_undo(functools.partial(delattr, DistributedDataParallel, FLAG))
    else:
        patches.on_undo(functools.partial(setattr, DistributedDataParallel, FLAG, outer))
    replicate.install(recorder, patches, buckets)


class Flag:
    """The sync flag of DDP as a property, so that assignments to it are seen; the value stays where torch keeps it."""

    def __init__(self, recorder: Recorder, no_sync: Any, outer: Flag | None = None) -> None:
        self.recorder = recorder
        self.outer = outer  # of another observer
        self.context = getattr(no_sync, "__wrapped__", no_sync).__code__

    def __get__(self, ddp: Any, owner: Any) -> Any:
        if ddp is None:
            return self
        try:
            return ddp.__dict__[FLAG]
        except KeyError:
            raise AttributeError(FLAG) from None

    def __set__(self, ddp: Any, value: Any) -> None:
        if self.outer is None:
            ddp.__dict__[FLAG] = value
        else:
            self.outer.__set__(ddp, value)
        recorder = self.recorder
        if not recorder.active:
            return
        try:
            info = recorder.wrapper_of(ddp)
            if info is not None:
                kind = Kind.SYNC_ON if value else Kind.SYNC_OFF
                recorder.event(kind, model=info.uid, options=["context" if self._in_context() else "flag"])
        except Exception as error:
            recorder.trouble(f"sync flag: {type(error).__name__}: {error}")

    def __delete__(self, ddp: Any) -> None:
        del ddp.__dict__[FLAG]

    def _in_context(self) -> bool:
        frame = sys._getframe(2)
        for _ in range(MAX_DEPTH):
            if frame.f_code is self.context:
                return True
            if frame.f_back is None:
                break
            frame = frame.f_back
        return False


def _constructing(recorder: Recorder, buckets: Buckets, original: Callable[..., Any], register: Any) -> Callable[..., Any]:
    def construct(ddp: Any, *arguments: Any, **options: Any) -> None:
        original(ddp, *arguments, **options)
        if recorder.active:
            try:
                attach(recorder, buckets, ddp, register)
            except Exception as error:
                recorder.trouble(f"DistributedDataParallel: {type(error).__name__}: {error}")

    return construct


def attach(recorder: Recorder, buckets: Buckets, ddp: Any, register: Any) -> None:
    """Makes a wrapper known and puts the recording hook into its reducer."""
    tap = _tapped(recorder, buckets, ddp, register)
    held = weakref.ref(ddp)
    marks = {STATIC} if getattr(ddp, "static_graph", False) else set()
    marks |= {COMM_HOOK} if _has_own_hook(ddp, tap) else set()
    marks |= {"process_group"} if _is_own_group(ddp.process_group) else set()
    if buckets.composing is None:
        info = recorder.register_wrapper(ddp, Wrapper.DDP, ddp.module, frozenset(marks), lambda: bool(getattr(held(), FLAG, True)))
    else:
        info = buckets.composing
        recorder.objects.entry(info.uid).options = sorted(marks)
    recorder.objects.entry(info.uid).numbers.update(group_of(ddp.process_group))
    _outlive(ddp.process_group)
    if tap is not None:
        tap.belongs_to(ddp, info.uid)
        if tap.inner is not None:
            _note_hook(recorder, tap)


def _has_own_hook(ddp: Any, tap: Tap | None) -> bool:
    if tap is not None:
        return tap.inner is not None
    return hasattr(getattr(ddp, "reducer", None), "_run_allreduce_hook") and not getattr(ddp, "_use_python_reducer", False)


def _tapped(recorder: Recorder, buckets: Buckets, ddp: Any, register: Any) -> Tap | None:
    reducer = getattr(ddp, "reducer", None)
    if reducer is None:  # every parameter's reduction is delayed, so that there is no bucket
        return None
    if getattr(ddp, "_use_python_reducer", False):
        recorder.limit("buckets of DistributedDataParallel are not observed under compiled autograd")
        return None
    if not hasattr(reducer, "_run_allreduce_hook"):
        recorder.limit("buckets of DistributedDataParallel are not observed in this version of torch")
        return None
    try:
        return buckets.tap_of(reducer) or buckets.tap(reducer, register)
    except RuntimeError:  # a reducer takes one hook, once
        recorder.limit("buckets of DistributedDataParallel are not observed: a communication hook had been registered before")
        return None


def _registering(recorder: Recorder, buckets: Buckets, original: Callable[..., Any]) -> Callable[..., Any]:
    def register_comm_hook(reducer: Any, state: Any, hook: Any) -> Any:
        tap = buckets.tap_of(reducer)
        if tap is None and recorder.active:
            buckets.tap(reducer, original, hook, state)  # a wrapper under construction registers its own
            return None
        if tap is None or tap.inner is not None:
            return original(reducer, state, hook)  # which says that there is one already
        tap.inner, tap.state = hook, state
        _note_hook(recorder, tap)
        return None

    return register_comm_hook


def _registering_builtin(recorder: Recorder, buckets: Buckets, original: Callable[..., Any]) -> Callable[..., Any]:
    import torch.distributed

    dist: Any = torch.distributed

    def register_builtin_comm_hook(reducer: Any, kind: Any) -> Any:
        tap = buckets.tap_of(reducer)
        if tap is None or tap.inner is not None:
            return original(reducer, kind)
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        known = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        tap.inner, tap.state = known[kind], tap.group()
        _note_hook(recorder, tap)
        return None

    return register_builtin_comm_hook


def _note_hook(recorder: Recorder, tap: Tap) -> None:
    if tap.model is None:
        return
    entry = recorder.objects.entry(tap.model)
    entry.options = sorted({*entry.options, COMM_HOOK})
    entry.numbers["hook"] = getattr(tap.inner, "__qualname__", type(tap.inner).__name__)


def _made_static(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that is known already may be told later that its graph is static."""

    @functools.wraps(original)
    def set_static_graph(ddp: Any) -> Any:
        result = original(ddp)
        if recorder.active:
            try:
                info = recorder.wrapper_of(ddp)
                if info is not None:
                    entry = recorder.objects.entry(info.uid)
                    entry.options = sorted({*entry.options, STATIC})
            except Exception as error:
                recorder.trouble(f"static graph: {type(error).__name__}: {error}")
        return result

    return set_static_graph


def _delayed(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """The one reduction of the parameters whose reduction is delayed."""

    def all_reduce(ddp: Any, gradient: Any) -> Any:
        if recorder.active:
            try:
                _record_delayed(recorder, ddp)
            except Exception as error:
                recorder.trouble(f"delayed reduction: {type(error).__name__}: {error}")
        return original(ddp, gradient)

    return all_reduce


def _record_delayed(recorder: Recorder, ddp: Any) -> None:
    info, buffer, backward = recorder.wrapper_of(ddp), ddp._delay_grad_buffer, recorder.in_backward
    row = recorder.event(Kind.REDUCE, model=None if info is None else info.uid, options=["delayed"])
    row.numbers.update(bucket=-1, elements=buffer.numel(), backward=None if backward is None else backward.index)
    recorder.later(row.numbers, "before", strided(buffer))


def _outlive(group: Any) -> None:
    """Keeps a process group to the end of the process.

    Otherwise the reducer may be its last owner: it would then wait for the group's threads with the interpreter locked,
    and these may wait for the interpreter to let go of what a hook in Python has given them.
    """
    if id(group) not in _OUTLIVING:
        _OUTLIVING.add(id(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def group_of(group: Any) -> dict[str, Any]:
    """The number of ranks of a process group, and which they are."""
    import torch.distributed as dist

    return {"group_size": int(group.size()), "ranks": list(dist.get_process_group_ranks(group))}


def _is_own_group(group: Any) -> bool:
    import torch.distributed as dist

    return group is not dist.group.WORLD
