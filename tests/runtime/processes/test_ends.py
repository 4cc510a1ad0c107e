"""How runs end, and what the outcome says of it; without torch, so that it takes no time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.processes.scene import Scene, wait_for
from tests.runtime.processes.stub.fast_rank import AGENT
from tests.runtime.processes.test_kills import STUB, WORLD, fast

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
RANK = STUB / "fast_rank.py"
EARLY = "import torch\nopen('/no/such/data')\n"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    set_up = Scene(tmp_path / "scene", {"PYTHONPATH": str(STUB)})
    yield set_up
    set_up.close()


def line_of(text: str) -> int:
    return next(at for at, line in enumerate(RANK.read_text().splitlines(), 1) if text in line)


def test_every_rank_stops_after_its_updates(scene: Scene) -> None:
    outcome = scene.outcome(fast("1000", "0.01"), steps=3)
    assert (outcome["ending"], outcome["code"], outcome["problem"]) == ("updates", 0, "")
    assert [(end["rank"], end["updates"], end["ended"]) for end in outcome["ends"]] == [(0, 3, "updates"), (1, 3, "updates")]
    assert not (scene.folder / "end-of-script").exists()
    assert not (scene.folder / "finally").exists()
    assert scene.left() == []


def test_graceful_runs_finally_blocks_and_nothing_else(scene: Scene) -> None:
    outcome = scene.outcome(fast("1000", "0.01"), steps=3, graceful=True)
    assert (outcome["ending"], outcome["code"]) == ("updates", 0)
    assert (scene.folder / "finally").exists()
    assert not (scene.folder / "end-of-script").exists()


def test_keep_going_runs_the_script_to_its_end(scene: Scene) -> None:
    outcome = scene.outcome(fast("5", "0.01"), steps=2, keep_going=True)
    assert (outcome["ending"], outcome["code"]) == ("updates", 0)
    assert [end["updates"] for end in outcome["ends"]] == [2, 2]
    assert (scene.folder / "end-of-script").exists()


def test_a_script_that_ends_before_its_updates(scene: Scene) -> None:
    outcome = scene.outcome(fast("2", "0.01"), steps=3)
    assert (outcome["ending"], outcome["code"]) == ("script", 0)
    assert outcome["problem"] == "The script ended after 2 updates; 3 were asked for."


def test_a_script_that_ends_with_its_updates(scene: Scene) -> None:
    outcome = scene.outcome(fast("2", "0.01"), steps=2)
    assert outcome["ending"] == "updates"


def test_an_error_is_told_with_its_line(scene: Scene) -> None:
    outcome = scene.outcome(fast("1000", "0.01", "error"), steps=900)
    assert (outcome["ending"], outcome["code"]) == ("error", 1)
    line = line_of("broken on purpose")
    assert outcome["problem"] == f"The script failed with ValueError: broken on purpose ({RANK}:{line})."
    assert "ValueError: broken on purpose" in scene.stderr
    shown = next(end["stack"] for end in outcome["ends"] if end["ended"] == "error")
    assert shown.startswith("Traceback (most recent call last):")
    assert f'File "{RANK}", line {line}' in shown
    assert shown.endswith("ValueError: broken on purpose\n")
    assert scene.left() == []


def test_an_error_before_anything_is_trained(scene: Scene) -> None:
    script = scene.folder / "early.py"
    script.write_text(AGENT + EARLY)
    outcome = scene.outcome({"script": str(script)}, steps=1)
    line = next(at for at, text in enumerate(script.read_text().splitlines(), 1) if text.startswith("open("))
    assert outcome["ending"] == "error"
    assert outcome["problem"].startswith("The script failed with FileNotFoundError: ")
    assert outcome["problem"].endswith(f"({script}:{line}).")


def test_a_program_that_a_rank_starts_is_no_rank(scene: Scene) -> None:
    outcome = scene.outcome(fast("1000", "0.05", "helper"), steps=5)
    assert "ZeroDivisionError" in scene.stderr
    assert (outcome["ending"], [end["rank"] for end in outcome["ends"]]) == ("updates", [0, 1])


def test_a_rank_that_leaves_early(scene: Scene) -> None:
    outcome = scene.outcome(fast("1000", "0.01", "leave"), steps=5)
    assert outcome["ending"] == "script"
    assert [(end["rank"], end["updates"], end["ended"]) for end in outcome["ends"]] == [(0, 5, "updates"), (1, 1, "script")]


def test_a_rank_that_exits_without_a_word(scene: Scene) -> None:
    outcome = scene.outcome(fast("1000", "0.01", "exit"), steps=900)
    assert outcome["ending"] == "died"
    assert outcome["problem"].startswith("Rank 1 vanished")
    assert "in update 2" in outcome["problem"]
    assert scene.left() == []


def test_a_vanished_rank_is_named_and_the_others_show_their_stacks(scene: Scene) -> None:
    controller = scene.start(fast("1000", "0.02"), steps=900, timeout=60)
    wait_for(lambda: (scene.folder / "port-1").exists() and len(scene.pids("fast_rank.py")) == WORLD)
    time.sleep(0.5)
    of_rank = {rank: pid for pid in scene.pids("fast_rank.py") for rank in (environment_of(pid)["RANK"],)}
    os.kill(of_rank["1"], signal.SIGKILL)
    outcome = scene.end(controller)
    assert outcome["ending"] == "died"
    assert outcome["problem"].startswith("Rank 1 vanished")
    assert [rank["rank"] for rank in outcome["missing"]] == [1]
    stacks = {end["rank"]: end["ended"] for end in outcome["ends"]}
    assert stacks[1] == "died"
    assert scene.left() == []


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text(errors="replace").rstrip("\0").split("\0")
    return dict(pair.split("=", 1) for pair in pairs)


def test_a_rank_that_hangs_is_named_with_its_line(scene: Scene) -> None:
    outcome = scene.outcome(fast("100", "0.02", "hang"), steps=50, timeout=2)
    assert outcome["ending"] == "stalled"
    (missing,) = [rank for rank in outcome["missing"] if rank["rank"] == 1]
    assert (missing["updates"], missing["last"]) == (1, "forward")
    assert "fast_rank.py" in missing["stack"]
    assert "in train" in missing["stack"]
    line = line_of("time.sleep(1000)")
    assert outcome["problem"].endswith(f"{RANK}:{line}.")
    assert scene.left() == []
