"""Whatever is killed at whatever moment: no process, no file and no open port is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runtime.processes.scene import HERE, Scene, wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")

STUB = HERE / "stub"
ROUNDS = 48
AT_ONCE = 4
WORLD = 2
VICTIMS = {
    "rank": ("fast_rank.py", (signal.SIGKILL, signal.SIGSEGV)),
    "launcher": ("fast_launcher.py", (signal.SIGKILL, signal.SIGTERM)),
    "controller": ("driver.py", (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
}
# How a run may end when this one is killed: before the end, or when it was as good as over.
ENDINGS = {
    "rank": {"died", "updates"},
    "launcher": {"launcher", "updates"},
    "controller": {"interrupted", "updates"},
}


def fast(*words: str) -> dict[str, list[str]]:
    """A program whose ranks need no torch."""
    return {"launcher": [sys.executable, str(STUB / "fast_launcher.py"), str(WORLD), *words]}


def ports(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("port-*") if path.read_text()]


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def kill(scene: Scene, name: str, number: int, choice: random.Random) -> bool:
    """Kills one process of this name; whether there was one."""
    pids = sorted(scene.pids(name))
    if not pids:
        return False
    try:
        os.kill(choice.choice(pids), number)
    except ProcessLookupError:
        return False
    return True


def one_round(folder: Path, seed: int) -> tuple[bool, list[str]]:
    """Whether a process was hit while the ranks ran, and what is wrong after that, in words."""
    choice = random.Random(seed)
    victim = ("rank", "launcher", "controller")[seed % 3]
    name, numbers = VICTIMS[victim]
    number = choice.choice(numbers)
    scene = Scene(folder / str(seed), {"PYTHONPATH": str(STUB), "PYTHONFAULTHANDLER": ""})
    try:
        controller = scene.start(fast("60", "0.02"), steps=40, timeout=30)
        if choice.random() < 0.8:  # the others may hit before anything has started
            wait_for(lambda: len(ports(scene.folder)) == WORLD or controller.poll() is not None)
        time.sleep(choice.uniform(0, 1.0))
        known = len(ports(scene.folder)) == WORLD
        hit = kill(scene, name, number, choice) and known
        outcome = scene.end(controller)
        wrong = [f"left: {each}" for each in scene.left()]
        wrong += [f"port {port} is open" for port in ports(scene.folder) if is_open(port)]
        if outcome and hit and outcome["ending"] not in ENDINGS[victim]:
            wrong.append(f"ended as {outcome['ending']}: {outcome['problem']}")
        if not outcome and victim != "controller":
            wrong.append(f"no outcome: {scene.stderr[-500:]}")
        return hit, [f"round {seed}, {victim} by {signal.Signals(number).name}: {each}" for each in wrong]
    finally:
        scene.close()


def test_nothing_is_left_after_kills_at_random_moments(tmp_path: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rounds = list(pool.map(lambda seed: one_round(tmp_path, seed), range(ROUNDS)))
    assert [each for _, wrong in rounds for each in wrong] == []
    assert sum(hit for hit, _ in rounds) >= ROUNDS / 3


def test_a_program_that_ignores_signals_is_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    deaf = "import signal, time\nfor each in (1, 2, 15): signal.signal(each, signal.SIG_IGN)\nopen('deaf', 'w').close()\ntime.sleep(1000)"
    controller = scene.start({"launcher": [sys.executable, "-c", deaf]})
    wait_for(lambda: (scene.folder / "deaf").exists())
    os.kill(controller.pid, signal.SIGTERM)
    outcome = scene.end(controller)
    assert (outcome["ending"], outcome["interrupted_by"]) == ("interrupted", signal.SIGTERM)
    assert scene.left() == []


def test_an_interrupted_program_says_no_more(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    loud = (
        "import signal, sys, time\n"
        "for each in (1, 2, 15): signal.signal(each, lambda *_: sys.exit('asked to end'))\n"
        "open('loud', 'w').close()\ntime.sleep(1000)"
    )
    controller = scene.start({"launcher": [sys.executable, "-c", loud]})
    wait_for(lambda: (scene.folder / "loud").exists())
    os.kill(controller.pid, signal.SIGINT)
    outcome = scene.end(controller)
    assert (outcome["ending"], outcome["interrupted_by"], scene.stderr) == ("interrupted", signal.SIGINT, "")
    assert scene.left() == []


def test_what_a_program_leaves_running_is_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    outcome = scene.outcome({"launcher": ["sh", "-c", "sleep 1000 & setsid sleep 1000 & exit 0"]})
    assert (outcome["ending"], outcome["code"]) == ("unseen", 0)
    assert scene.left() == []


def test_a_command_that_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    controller = scene.start({"launcher": [str(tmp_path / "nothing-here")]})
    assert scene.end(controller) == {}
    assert "FileNotFoundError" in scene.stderr
    assert scene.left() == []
