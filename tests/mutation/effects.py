"""What a mutant does to a run: `python -m tests.mutation.effects` fills in the table for mutants that are not in it yet.

A script and its mutants run in processes forked from this one, which has imported torch already, with the same random
state each; their optimizers' final parameters and the number of buckets that were reduced are compared.
"""

from __future__ import annotations

import argparse
import array
import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.bases import Base, bases, key

TABLE = Path(__file__).with_name("effects.json")
TIMEOUT = 20
TOLERANCE = 1e-4  # of the length of the parameters; half precision and the order of a sum stay below it

NONE, PARAMETERS, BUCKETS, RAISES, HANGS = "none", "parameters", "buckets", "raises", "hangs"
ACCUMULATES, PLAIN = "accumulates", "steps after every backward"  # of the scripts themselves


class Observed(NamedTuple):
    """What one rank's run ended with."""

    status: str  # "done", "raised" or "hung"
    buckets: int = 0
    accumulates: bool = False
    parameters: array.array[float] = array.array("d")


def table() -> dict[str, str]:
    """The known effects by mutant."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8"))) if TABLE.exists() else {}


def effect(base: list[Observed], mutant: list[Observed]) -> str:
    if any(each.status == "hung" for each in mutant):
        return HANGS
    if any(each.status == "raised" for each in mutant):
        return RAISES
    if any(_differ(one.parameters, other.parameters) for one, other in zip(base, mutant, strict=True)):
        return PARAMETERS
    if [each.buckets for each in base] != [each.buckets for each in mutant]:
        return BUCKETS
    return NONE


def _differ(one: array.array[float], other: array.array[float]) -> bool:
    if len(one) != len(other):
        return True
    distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))
    return not distance <= TOLERANCE * math.sqrt(sum(a * a for a in one))


def observe(text: str, processes: int) -> list[Observed]:
    """Runs a script in forked processes, one a rank."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        script = Path(folder, "train.py")
        script.write_text(text, encoding="utf-8")
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        children = []
        for rank in range(processes):
            child = os.fork()
            if child == 0:
                _run(script, rank, processes, port)
            children.append(child)
        finished = _wait(children)
        return [_read(Path(folder, f"{rank}.bin"), finished=finished) for rank in range(processes)]


def _wait(children: list[int]) -> bool:
    """Whether all ended by themselves; once one has failed, the others have little to wait for."""
    deadline = time.monotonic() + TIMEOUT
    left = set(children)
    while left and time.monotonic() < deadline:
        for child in tuple(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.discard(child)
                if status:
                    deadline = min(deadline, time.monotonic() + 2)
        time.sleep(0.01)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not left


def _read(path: Path, *, finished: bool) -> Observed:
    if not path.exists():
        return Observed("raised" if finished else "hung")
    values = array.array("d", path.read_bytes())
    return Observed("done", int(values[0]), bool(values[1]), values[2:])


def _run(script: Path, rank: int, processes: int, port: int) -> None:
    """One rank, in its own process; never returns."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.chdir(script.parent)
    if processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    failed = 1
    try:
        recorder = _Recorder()
        _execute(script)
        failed = 0
        values = array.array("d", [recorder.buckets, recorder.accumulates, *recorder.parameters()])
        script.with_name(f"{rank}.part").write_bytes(values.tobytes())
        script.with_name(f"{rank}.part").rename(script.with_name(f"{rank}.bin"))
    finally:
        os._exit(failed)


def _execute(script: Path) -> None:
    import runpy

    sys.argv = [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise


class _Recorder:
    """Keeps every optimizer that is made, and counts reductions."""

    def __init__(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self.buckets = 0
        self.backwards = 0
        self.steps: dict[int, int] = {}
        self.optimizers: list[Any] = []
        self._watch_optimizers(torch.optim.Optimizer)
        self._watch_backward(torch.autograd)
        self._watch_ddp(DistributedDataParallel)
        if torch.distributed.is_available():
            self._watch_shards(torch.distributed)

    @property
    def accumulates(self) -> bool:
        return self.backwards > max(self.steps.values(), default=0)

    def parameters(self) -> list[float]:
        seen: dict[int, Any] = {
            id(each): each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]
        }
        values: list[float] = []
        for parameter in seen.values():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            values.extend(local.detach().double().flatten().tolist())
        return values

    def _watch_optimizers(self, optimizer: Any) -> None:
        construct = optimizer.__init__

        def record(this: Any, *arguments: Any, **options: Any) -> None:
            construct(this, *arguments, **options)
            self.optimizers.append(this)

        def count(this: Any, *_: Any) -> None:
            self.steps[id(this)] = self.steps.get(id(this), 0) + 1

        from torch.optim.optimizer import register_optimizer_step_post_hook

        optimizer.__init__ = record
        register_optimizer_step_post_hook(count)

    def _watch_backward(self, autograd: Any) -> None:
        backward = autograd.backward

        def counted(*arguments: Any, **options: Any) -> None:
            self.backwards += 1
            backward(*arguments, **options)

        autograd.backward = counted

    def _watch_ddp(self, ddp: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        register, forward = ddp.register_comm_hook, ddp.forward

        def counted(hook: Any) -> Any:
            def count(state: Any, bucket: Any) -> Any:
                self.buckets += 1
                return hook(state, bucket)

            # torch checks these annotations.
            count.__annotations__ = getattr(hook, "__annotations__", {})
            return count

        def register_counted(this: Any, state: object, hook: Any) -> None:
            this._counts_buckets = True
            register(this, state, counted(hook))

        def forward_counted(this: Any, *arguments: Any, **options: Any) -> Any:
            if not getattr(this, "_counts_buckets", False):
                register_counted(this, None, allreduce_hook)
            return forward(this, *arguments, **options)

        ddp.register_comm_hook, ddp.forward = register_counted, forward_counted

    def _watch_shards(self, distributed: Any) -> None:
        # The process ends anyway, and taking a group down now and then waits for a rank that has gone.
        distributed.destroy_process_group = lambda *_: None
        scatter = distributed.reduce_scatter_tensor

        def counted(*arguments: Any, **options: Any) -> Any:
            self.buckets += 1
            return scatter(*arguments, **options)

        distributed.reduce_scatter_tensor = counted


def warm_up() -> None:
    """Imports what scripts use, once; nothing here may start a thread, for threads do not survive a fork."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.nn.parallel
    import torch.optim.lr_scheduler
    import torch.utils.data

    torch.set_num_threads(1)


def effects_of(base: Base, known: dict[str, str], deadline: float = math.inf) -> dict[str, str]:
    """The effects of a script's mutants that are not known yet; empty where the script itself does not run."""
    missing = [mutant for mutant in base.mutants if key(mutant.text) not in known]
    if (not missing and key(base.text) in known) or time.monotonic() > deadline:
        return {}
    reference = observe(base.text, base.processes)
    if effect(reference, observe(base.text, base.processes)) != NONE or any(each.status != "done" for each in reference):
        print(f"{base}: does not run, or not twice the same", flush=True)
        return {}
    found = {key(base.text): ACCUMULATES if any(each.accumulates for each in reference) else PLAIN}
    for mutant in missing:
        if time.monotonic() > deadline:
            break
        found[key(mutant.text)] = effect(reference, observe(mutant.text, base.processes))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; what is known by then is kept")
    parser.add_argument("--only", default="", help="only scripts whose name holds this")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    warm_up()
    known = table()
    chosen = bases()
    current = {key(each.text) for base in chosen for each in (base, *base.mutants)}
    for base in chosen:
        if arguments.only in base.name:
            new = effects_of(base, known, deadline)
            known |= new
            if new:
                print(f"{base}: {len(new) - 1} mutants run", flush=True)
                kept = {name: what for name, what in sorted(known.items()) if name in current}
                TABLE.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    print(f"{sum(name in known for name in current)} of {len(current)} scripts and mutants known")
    return 0


if __name__ == "__main__":
    sys.exit(main())
