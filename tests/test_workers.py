"""The pool of processes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from accumlint.workers import Lost, spread


def work(item: str) -> str:
    match item.split():
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["exit"]:
            os._exit(3)
        case ["sleep"]:
            time.sleep(60)
        case ["large"]:
            return "x" * 3_000_000
    return item.upper()


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_item_gets_its_answer(jobs: int) -> None:
    items = [f"item {number}" for number in range(20)]
    assert dict(spread(work, items, jobs, 30)) == {number: item.upper() for number, item in enumerate(items)}


def test_large_items_and_answers() -> None:
    items = ["large", "y" * 2_000_000] * 3
    answers = dict(spread(work, items, 2, 30))
    assert [len(str(answers[number])) for number in range(6)] == [3_000_000, 2_000_000] * 3


def test_a_dying_worker_costs_one_item() -> None:
    answers = dict(spread(work, ["a", "die", "b", "exit", "c", "die"], 2, 30))
    assert answers[1] == answers[5] == Lost("the process that read it died (signal 9)")
    assert answers[3] == Lost("the process that read it died (exit status 3)")
    assert [answers[number] for number in (0, 2, 4)] == ["A", "B", "C"]


def test_a_slow_item_is_ended() -> None:
    answers = dict(spread(work, ["a", "sleep", "b"], 2, 1))
    assert answers == {0: "A", 1: Lost("it took more than 1 seconds", late=True), 2: "B"}


def test_nothing_is_left_behind_when_the_reader_stops() -> None:
    import multiprocessing

    answers = spread(work, ["a", "sleep", "sleep"], 2, 30)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_no_items() -> None:
    assert list(spread(work, [], 4, 1)) == []
