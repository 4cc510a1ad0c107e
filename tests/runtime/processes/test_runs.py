"""Real runs with torch: how they are started, stopped and gathered, and what is left of those that go wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.processes.scene import HERE, Scene, wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
pytest.importorskip("torch")

PROGRAMS = HERE / "programs"
RANKS = str(PROGRAMS / "ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def under_torchrun(mode: str = "") -> dict[str, Any]:
    return {"script": RANKS, "processes": 2, "arguments": [mode]}


def ends(outcome: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(end["rank"], end["updates"], end["ended"]) for end in outcome["ends"]]


def test_a_plain_script(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("MARK = 'shadowed'\n")
    scene = Scene(tmp_path / "scene", {"PYTHONPATH": str(site)})
    outcome = scene.outcome({"script": str(PROGRAMS / "plain.py"), "arguments": ["--lr", "1"]}, steps=2)
    assert (outcome["ending"], outcome["code"], outcome["troubles"]) == ("updates", 0, [])
    (report,) = outcome["reports"]  # the workers of the loaders are silent
    assert (report["ended"], report["updates"], report["argv"]) == ("updates", 2, ["--lr", "1"])
    assert any("torch.compile was switched off" in limit for limit in report["limits"])
    assert [event["kind"] for event in report["events"]].count("backward") == 4
    assert [event["kind"] for event in report["events"]][-1] == "zero"
    said = scene.stderr.splitlines()
    assert "arguments --lr 1" in said
    assert "site shadowed" in said
    assert "path []" in said
    assert "finally" not in said
    assert not (scene.folder / "checkpoint").exists()
    assert scene.left() == []


def test_ranks_under_torchrun_stop_though_one_would_wait_for_the_other(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    outcome = scene.outcome(under_torchrun(), steps=2)
    assert (outcome["ending"], outcome["code"]) == ("updates", 0)
    assert ends(outcome) == [(0, 2, "updates"), (1, 2, "updates")]
    assert not (scene.folder / "checkpoint").exists()
    assert scene.left() == []


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_that_the_script_starts_itself(tmp_path: Path, method: str) -> None:
    scene = Scene(tmp_path / "scene")
    outcome = scene.outcome({"script": str(PROGRAMS / "spawned.py"), "arguments": [method]}, steps=2)
    assert (outcome["ending"], outcome["code"]) == ("updates", 0)
    assert ends(outcome) == [(0, 2, "updates"), (1, 2, "updates")]
    assert not (scene.folder / "after").exists()
    assert scene.left() == []


def test_an_error_of_one_rank_is_told_as_the_cause(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    outcome = scene.outcome(under_torchrun("error"), steps=2)
    line = next(at for at, text in enumerate(Path(RANKS).read_text().splitlines(), 1) if "broken on purpose" in text)
    assert outcome["ending"] == "error"
    assert outcome["problem"] == f"The script failed with ValueError: broken on purpose ({RANKS}:{line})."
    assert scene.left() == []


def test_a_killed_rank_is_named_though_its_peer_fails_with_an_error(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    outcome = scene.outcome(under_torchrun("kill"), steps=2)
    assert outcome["ending"] == "died"
    assert outcome["problem"].startswith("Rank 1 vanished")
    assert scene.left() == []


def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    outcome = scene.outcome(under_torchrun("hang"), steps=2, timeout=5)
    assert outcome["ending"] == "stalled"
    assert "rank 1 fell behind in update 2" in outcome["problem"]
    stacks = {rank["rank"]: rank["stack"] for rank in outcome["missing"]}
    assert "in trouble" in stacks[1]
    assert "backward" in stacks[0]
    assert scene.left() == []


def test_two_nodes_report_over_the_store_of_the_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    scenes = [Scene(tmp_path / f"node-{node}") for node in range(2)]
    running = [
        scene.start({"launcher": [*TORCHRUN, *where, "--node-rank", str(node), RANKS]}, steps=2) for node, scene in enumerate(scenes)
    ]
    first, second = (scene.end(controller) for scene, controller in zip(scenes, running, strict=True))
    by_node = sorted((first, second), key=lambda outcome: not outcome["shows"])
    assert [outcome["shows"] for outcome in by_node] == [True, False]
    assert ends(by_node[0]) == [(0, 2, "updates"), (1, 2, "updates")]
    assert ends(by_node[1]) == [(1, 2, "updates")]
    assert [scene.left() for scene in scenes] == [[], []]


def test_controllers_that_are_ranks_themselves(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene")
    driver = ["-m", "tests.runtime.processes.driver", json.dumps({"script": RANKS}), json.dumps({"steps": 2})]
    launcher = scene.run([*TORCHRUN, "--standalone", "--log-dir", str(tmp_path / "logs"), "--nproc-per-node", "2", *driver])
    out, _ = launcher.communicate(timeout=240)
    outcomes = sorted((json.loads(line) for line in out.splitlines()), key=lambda outcome: not outcome["shows"])
    assert [outcome["shows"] for outcome in outcomes] == [True, False]
    assert ends(outcomes[0]) == [(0, 2, "updates"), (1, 2, "updates")]
    assert launcher.returncode == 0
    assert scene.left() == []


def one_kill(folder: Path, seed: int) -> list[str]:
    """What is wrong after one process of a run with torch was killed at a random moment."""
    choice = random.Random(seed)
    name, number = [
        ("ranks.py", signal.SIGKILL),
        ("driver.py", signal.SIGKILL),
        ("torch.distributed.run", signal.SIGKILL),
        ("driver.py", signal.SIGINT),
    ][seed % 4]
    scene = Scene(folder / str(seed))
    try:
        controller = scene.start(under_torchrun(), steps=19, timeout=60)
        wait_for(lambda: len(scene.pids("ranks.py")) >= 2 or controller.poll() is not None)
        time.sleep(choice.uniform(0, 6))
        pids = victims(scene, name)
        if pids:
            os.kill(choice.choice(pids), number)
        controller.communicate(timeout=240)
        return [f"round {seed}, {name} by {number.name}: {each}" for each in scene.left()]
    finally:
        scene.close()


def victims(scene: Scene, name: str) -> list[int]:
    """The launcher's command line names the script as well: what is meant is what the interpreter was given to run."""
    found = []
    for pid in scene.pids(name):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if name != "ranks.py" or "torch.distributed.run" not in line:
            found.append(pid)
    return sorted(found)


def test_nothing_is_left_after_kills_of_runs_with_torch(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [each for wrong in pool.map(lambda seed: one_kill(tmp_path, seed), range(6)) for each in wrong] == []
