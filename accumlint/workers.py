"""A small pool of processes that survives the death of a worker: a file that kills one costs that file and nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Lost(NamedTuple):
    """What became of an item whose worker died or had to be ended."""

    reason: str
    late: bool = False  # it was ended because it took too long


class _Worker(Generic[Item, Answer]):
    """One process and the pipe to it; `busy` is the number of the item that it works on."""

    def __init__(self, work: Callable[[Item], Answer]) -> None:
        # Forked workers start with everything imported; where fork is not safe, spawn them.
        if sys.platform == "linux":
            self.pipe, far = multiprocessing.get_context("fork").Pipe()
            self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=_serve, args=(work, far, self.pipe), daemon=True)
        else:
            self.pipe, far = multiprocessing.get_context("spawn").Pipe()
            self.process = multiprocessing.get_context("spawn").Process(target=_serve, args=(work, far, self.pipe), daemon=True)
        self.process.start()
        far.close()
        self.busy: int | None = None
        self.since = 0.0

    def give(self, number: int, item: Item) -> None:
        self.busy, self.since = number, time.monotonic()
        self.pipe.send(item)

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(work: Callable[[Item], Answer], pipe: Connection, near: Connection) -> None:
    near.close()  # so that the parent's end is the only one, and its death is seen here
    try:
        while True:
            pipe.send(work(pipe.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def spread(work: Callable[[Item], Answer], items: Sequence[Item], jobs: int, limit: float) -> Iterator[tuple[int, Answer | Lost]]:
    """The answers to the items, each with its number, in the order in which they arrive; none takes longer than `limit` seconds."""
    waiting = iter(enumerate(items))
    workers: list[_Worker[Item, Answer]] = []
    try:
        for _ in range(min(jobs, len(items))):
            workers.append(_Worker(work))
            _feed(workers[-1], waiting)
        while any(worker.busy is not None for worker in workers):
            for at, worker in enumerate(workers):
                if worker.busy is None or not (worker.pipe.poll() or _overdue(worker, limit) or not worker.process.is_alive()):
                    continue
                number = worker.busy
                answer = _answer(worker, limit)
                yield number, answer
                if isinstance(answer, Lost):
                    worker.end()
                    worker = workers[at] = _Worker(work)
                _feed(worker, waiting)
            awaited = [each for worker in workers if worker.busy is not None for each in (worker.pipe, worker.process.sentinel)]
            if awaited:  # waiting for nothing would last until the time-out
                wait(awaited, timeout=1)
    finally:
        for worker in workers:
            worker.end()


def _feed(worker: _Worker[Item, Answer], waiting: Iterator[tuple[int, Item]]) -> None:
    worker.busy = None
    for number, item in waiting:
        with contextlib.suppress(OSError):  # it died between two items; that is seen when its answer is waited for
            worker.give(number, item)
        return


def _overdue(worker: _Worker[Item, Answer], limit: float) -> bool:
    return time.monotonic() - worker.since > limit


def _answer(worker: _Worker[Item, Answer], limit: float) -> Answer | Lost:
    try:
        if worker.pipe.poll():
            answer: Answer = worker.pipe.recv()
            return answer
    except (EOFError, OSError):
        worker.process.join(1)
    if worker.process.is_alive():
        return Lost(f"it took more than {limit:.0f} seconds", late=True)
    code = worker.process.exitcode or 0
    return Lost(f"the process that read it died ({f'signal {-code}' if code < 0 else f'exit status {code}'})")
