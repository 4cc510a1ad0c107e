"""Observing a block of a program that has made its model and optimizer already: what exists is made known to the probes."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from accumlint.runtime.agent import start
from accumlint.runtime.objects import parameters_of
from accumlint.runtime.patches import Patches
from accumlint.runtime.places import site, user_frames
from accumlint.runtime.probes import ddp
from accumlint.runtime.probes.apex import MODULE as APEX
from accumlint.runtime.probes.apex import Apex
from accumlint.runtime.probes.buckets import Buckets
from accumlint.runtime.probes.compiled import LIMIT
from accumlint.runtime.probes.fsdp1 import Flat
from accumlint.runtime.probes.fsdp2 import Groups
from accumlint.runtime.rankreport import report_of
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.runtime.settings import Settings
from accumlint.runtime.turns import Turns
from accumlint.trace import Kind, Role, Wrapper

Module: TypeAlias = torch.nn.Module
Optimizer: TypeAlias = torch.optim.Optimizer

FLAT = "torch.distributed.fsdp.fully_sharded_data_parallel"


def modules(given: object) -> list[Module]:
    """The argument as a list of modules; raises TypeError where it is none."""
    found = [given] if isinstance(given, Module) else list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not found or not all(isinstance(each, Module) for each in found):
        raise TypeError(f"watch() takes a torch.nn.Module as its model, or several of them, not {_told(given)}")
    return found


def optimizers(given: object) -> list[Optimizer]:
    """The argument as a list of optimizers, without wrappers around them; raises TypeError where it is none."""
    found = [given] if isinstance(given, Optimizer) else list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not found or not all(isinstance(each, Optimizer) for each in found):
        raise TypeError(f"watch() takes a torch.optim.Optimizer, or several of them, not {_told(given)}")
    return [_innermost(each) for each in found]


def _innermost(optimizer: Any) -> Optimizer:
    """What really steps, where a library has wrapped it."""
    inner = vars(optimizer).get("optimizer")
    return _innermost(inner) if isinstance(inner, Optimizer) and inner is not optimizer else optimizer


def _told(given: object) -> str:
    if isinstance(given, Iterable) and not isinstance(given, str):
        kinds = sorted({type(each).__name__ for each in given}) if isinstance(given, (list, tuple, set)) else []
        return f"a {type(given).__name__} of {', '.join(kinds)}" if kinds else f"a {type(given).__name__}"
    return f"a {type(given).__name__}"


class Observation:
    """The probes, from now until `end`. The first optimizer's updates are those that count."""

    def __init__(self, models: Sequence[Module], steppers: Sequence[Optimizer], settings: Settings) -> None:
        frames = user_frames(2)
        self._around = [turn[0] for turn in Turns().of(frames)]
        self._script = site(frames[0])[0] if frames else ""
        self.recorder = start(settings)
        self._patches = Patches()
        self.recorder.on_release(self._patches.undo)
        try:
            self._adopt(models, steppers)
        except BaseException:
            self.recorder.release()
            raise

    def end(self, error: BaseException | None) -> dict[str, Any]:
        """Takes the probes out, and returns this rank's report."""
        recorder, told = self.recorder, None
        if error is not None:
            told = {"type": type(error).__name__, "message": str(error), "text": "", "file": "", "line": 0}
        try:
            recorder.settle()
            report = report_of(recorder, ended="error" if error is not None else _ended(recorder.rows), error=told)
        finally:
            recorder.release()
        report.update(script=self._script or report["script"], argv=[])
        for row in report["events"]:
            # The loops around the watch go on behind it: what is judged begins inside of them.
            around = len(self._around)
            if [turn[0] for turn in row["turns"][:around]] == self._around:
                row["turns"] = row["turns"][around:]
        return report

    def _adopt(self, models: Sequence[Module], steppers: Sequence[Optimizer]) -> None:
        recorder = self.recorder
        for wrapped in (_data_parallel, _replicated, _flat, _grouped, _of_apex):
            try:
                wrapped(recorder, models)
            except Exception as error:
                recorder.trouble(f"a wrapper made before the watch: {type(error).__name__}: {error}")
        for model in models:
            entry = recorder.objects.entry(recorder.uid(model, Role.MODEL))
            entry.owns = entry.owns or parameters_of(model)
        numbers = [recorder.optimizers.watch(each) for each in steppers]
        recorder.lead(numbers[0])
        full = [uid for uid, optimizer in zip(numbers, steppers, strict=True) if _has_gradients(optimizer)]
        for uid in full:
            recorder.optimizers.found_full(uid)
        recorder.listeners.append(_Leftover(recorder, full))
        _run_eagerly(recorder, models, self._patches)


def _ended(rows: Sequence[Row]) -> str:
    """ "script" where a pass over the data is over with the block, "updates" where only its last window is.

    A loop that steps is a pass, and so is one that leaves micro-batches without a step.
    """
    trained = [row for row in rows if row.kind in {Kind.BACKWARD.value, Kind.STEP.value}]
    if not trained or trained[-1].kind == Kind.BACKWARD.value:
        return "script"
    last = next((row for row in reversed(trained) if row.kind == Kind.BACKWARD.value), None)
    loop = last.turns[-1][0] if last is not None and last.turns else None
    return "script" if loop in {turn[0] for turn in trained[-1].turns} else "updates"


class _Leftover(Listener):
    """Tells that the first window holds gradients of before, which nothing cleared."""

    def __init__(self, recorder: Recorder, full: list[int]) -> None:
        self.recorder = recorder
        self.full = full

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        full, self.full = self.full, []
        cleared = {uid for each in self.recorder.rows if each.kind == Kind.ZERO.value for uid in each.targets}
        if not cleared.issuperset(full):
            self.recorder.limit(
                "The gradients were not zero when the watch began, and nothing cleared them before its first backward: the first "
                "window holds more than was seen."
            )


def _has_gradients(optimizer: Optimizer) -> bool:
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    return any(bool(torch.any((each.to_local() if hasattr(each, "to_local") else each.detach()).to_dense() != 0)) for each in gradients)


def _listener(recorder: Recorder, kind: type[Any]) -> Any:
    return next(each for each in recorder.listeners if isinstance(each, kind))


def _within(models: Iterable[Module]) -> list[Any]:
    """All modules, inner ones before those around them."""
    return list(dict.fromkeys(part for model in models for part in reversed(list(model.modules()))))


def _data_parallel(recorder: Recorder, models: Sequence[Module]) -> None:
    """DistributedDataParallel, also where only the module in it was given."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.nn.parallel import DistributedDataParallel

    inside = _within(models)
    held = {id(part) for part in inside}
    found = [part for part in inside if isinstance(part, DistributedDataParallel)]
    if not found:
        every = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        found = [each for each in every if id(vars(each).get("_modules", {}).get("module")) in held]
    buckets, register = _listener(recorder, Buckets), dist._register_comm_hook  # type: ignore[attr-defined]
    for each in found:
        ddp.attach(recorder, buckets, each, getattr(register, "__wrapped__", register))


def _replicated(recorder: Recorder, models: Sequence[Module]) -> None:
    """`replicate`, which makes its hidden wrapper at the first forward, and keeps it in the module's state."""
    key = getattr(sys.modules.get("torch.distributed._composable.contract"), "STATE_KEY", None)
    if key is None or "torch.distributed._composable.replicate" not in sys.modules:
        return
    import torch.distributed as dist

    buckets, register = _listener(recorder, Buckets), dist._register_comm_hook  # type: ignore[attr-defined]
    for part in _within(models):
        for state in vars(part).get(key, {}).values():
            if type(state).__name__ != "_ReplicateState":
                continue
            buckets.composing = recorder.register_wrapper(part, Wrapper.DDP, part, frozenset(), functools.partial(_syncs, state))
            try:
                if hasattr(state, "_ddp"):
                    ddp.attach(recorder, buckets, state._ddp, getattr(register, "__wrapped__", register))
            finally:
                buckets.composing = None


def _syncs(state: Any) -> bool:
    return not state._no_sync


def _flat(recorder: Recorder, models: Sequence[Module]) -> None:
    kind = getattr(sys.modules.get(FLAT), "FullyShardedDataParallel", None)
    if kind is not None:
        flat = _listener(recorder, Flat)
        for part in _within(models):
            if isinstance(part, kind):
                flat.register(part)


def _grouped(recorder: Recorder, models: Sequence[Module]) -> None:
    """`fully_shard`: modules that were given to it together share a state."""
    together: dict[int, list[Any]] = {}
    for part, state in _states(models):
        if any(kind.__name__ == "FSDPState" for kind in type(state).__mro__):
            together.setdefault(id(state), []).append(part)
    for parts in together.values():
        _listener(recorder, Groups).register(tuple(parts))


def _of_apex(recorder: Recorder, models: Sequence[Module]) -> None:
    kind = getattr(sys.modules.get(APEX), "DistributedDataParallel", None)
    for part in _within(models) if kind is not None else ():
        if isinstance(part, kind):  # type: ignore[arg-type]
            _listener(recorder, Apex).register(part)


def _states(models: Sequence[Module]) -> Iterator[tuple[Any, Any]]:
    """The modules that a composable wrapper has marked, with what it keeps of them."""
    if "torch.distributed._composable_state" not in sys.modules:
        return
    from torch.distributed._composable_state import _get_module_state

    for part in _within(models):
        state = _get_module_state(part)
        if state is not None:
            yield part, state


def _run_eagerly(recorder: Recorder, models: Sequence[Module], patches: Patches) -> None:
    """Compiled code would run past the probes, or be compiled again with them in it."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    compiled = any(type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) for part in _within(models))
    if set_stance is None:
        if compiled:
            recorder.limit("Compiled code runs past the probes: watch the model before torch.compile, or with torch 2.6 or newer.")
        return
    stance = set_stance("force_eager")
    patches.on_undo(lambda: stance.__exit__(None, None, None))
    if compiled:
        recorder.limit(LIMIT.replace(" (TORCHDYNAMO_DISABLE=1)", ""))


def gathered(report: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    """The reports of all ranks of a group, on each of them: a collective. Raises RuntimeError without a process group."""
    import torch.distributed as dist

    from accumlint.runtime.reference import across

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("gather() needs a process group: torch.distributed is not initialised")
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    first = min(reports, key=lambda each: int(each["rank"]))
    with contextlib.suppress(KeyError):
        for index, reference in across.compare("", reports).items():
            first["events"][index]["numbers"]["reference"] = reference
    return reports
