"""The doctor: an experiment whose figures are known, and what it says when something is not as known."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from accumlint.cli.doctor import doctor
from accumlint.report.doctor import render
from accumlint.runtime.doctor import examine as examination
from accumlint.runtime.doctor import processes
from accumlint.runtime.doctor.outcome import judge, largest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a whole run, as a user gets it; it leaves no file."""
    folder = tmp_path_factory.mktemp("temporary")
    command = [sys.executable, "-m", "accumlint", "doctor", "--quick", "--output-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == []
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_known_figures(found: dict[str, Any]) -> None:
    cases = {case["name"]: case for case in found["experiment"]["cases"]}
    calls = [cases[name]["hook_calls"] for name in ("native", "sync-each", "sync-final", "backward-only", "mean-of-means")]
    assert calls == [[None, None], [2, 2], [1, 1], [2, 2], [1, 1]]
    for name in ("native", "sync-each", "sync-final", "backward-only"):
        assert cases[name]["gradient_max_abs_error"] < 1e-15
        assert cases[name]["weight_max_abs_error"] < 1e-15
    assert cases["mean-of-means"]["gradient_max_abs_error"] == pytest.approx(0.0948, abs=1e-4)
    assert all(case["between_ranks"] == 0 for case in cases.values())
    assert found["status"] == 0
    assert found["deviations"] == []


def test_the_wrong_mean_by_arithmetic(found: dict[str, Any]) -> None:
    """The error of the mean of means from the full batch alone: coefficients 1/(4n) in place of 1/20, one process."""
    torch.manual_seed(42)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2026)
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, 3, (20,), generator=generator)
    counts = torch.tensor([2] * 2 + [6] * 6 + [4] * 4 + [8] * 8, dtype=torch.float64)
    losses = torch.nn.functional.cross_entropy(model(inputs), classes, reduction="none")
    apart = torch.autograd.grad((losses * (1 / (4 * counts) - 1 / 20)).sum(), list(model.parameters()))
    expected = max(float(each.abs().max()) for each in apart)
    case = found["experiment"]["cases"][-1]
    assert case["gradient_max_abs_error"] == pytest.approx(expected, rel=1e-12)


def test_the_document_as_text(found: dict[str, Any]) -> None:
    text = render(found, 100, color=False)
    assert "sync-each: synchronised at every micro-batch" in text
    assert "0.09484" in text
    assert text.endswith("All as expected.\n")
    assert "\x1b" not in text


# ---- judging, without processes


def result(calls: dict[str, list[int] | None]) -> dict[str, Any]:
    full = {"loss": 1.0, "gradient": [0.5, -0.25], "weights": [1.0, 2.0]}
    cases = {name: {"calls": each, "gradient": [0.5, -0.25], "weights": [1.0, 2.0]} for name, each in calls.items()}
    cases["mean-of-means"]["gradient"] = [0.5 + 0.0948, -0.25]
    return {"full_batch": full, "cases": cases}


AS_KNOWN = {"native": None, "sync-each": [1, 1], "sync-final": [0, 1], "backward-only": [1, 1], "mean-of-means": [0, 1]}


def deviating(results: list[dict[str, Any]]) -> dict[str, str]:
    return {case.expected.name: "; ".join(case.deviations) for case in judge(results) if case.deviations}


def test_nothing_deviates_where_all_is_as_known() -> None:
    assert deviating([result(AS_KNOWN), result(AS_KNOWN)]) == {}


def test_one_call_too_many_on_one_rank() -> None:
    other = result(AS_KNOWN | {"sync-final": [1, 1]})
    assert deviating([result(AS_KNOWN), other]) == {"sync-final": "the hook was called 1 and 2 times on the ranks, not 1 on each"}


def test_a_wrong_gradient_a_right_mean_and_ranks_apart() -> None:
    one = result(AS_KNOWN)
    other = copy.deepcopy(one)
    for each in (one, other):
        each["cases"]["sync-each"]["gradient"] = [0.5, -0.25 + 2e-15]
        each["cases"]["mean-of-means"]["gradient"] = [0.5, -0.25]
    other["cases"]["backward-only"]["weights"] = [1.0, 2.5]
    said = deviating([one, other])
    assert set(said) == {"sync-each", "mean-of-means", "backward-only"}
    assert "gradient error 2e-15" in said["sync-each"]
    assert "not 0.0948" in said["mean-of-means"]
    assert "0.5 apart" in said["backward-only"]


def test_native_must_agree_with_the_hooked_window() -> None:
    results = [result(AS_KNOWN), result(AS_KNOWN)]
    for each in results:
        each["cases"]["sync-final"]["gradient"] = [0.5, 0.0]
    assert "from that of the same window with a hook" in deviating(results)["native"]


def test_what_is_no_number_is_far_away() -> None:
    assert largest([1.0, float("nan")], [1.0, 1.0]) == float("inf")
    assert largest([1.0], [1.0, 2.0]) == float("inf")
    assert largest([1.0, -2.0], [1.0, 2.0]) == 4.0


def test_a_missing_hook_point_is_named(found: dict[str, Any]) -> None:
    names = [name for point in examination.POINTS for name in point.names if name != "torch.autograd.backward"]
    run = examination.Experiment("gloo", "cpu", judge([result(AS_KNOWN), result(AS_KNOWN)]), 1.0)
    torch_found = {**found["torch"], "found": names}
    lacking = examination.Examination(torch_found, run, {})
    assert lacking.status == 1
    assert lacking.deviations == ("this torch has no torch.autograd.backward: not observed are backwards, micro-batches, windows",)
    text = render(examination.document(lacking), 100, color=False)
    assert "MISSING  backwards, micro-batches, windows" in text


# ---- processes


def test_without_torch_one_sentence_and_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "torch_is_installed", lambda: False)
    done = CliRunner().invoke(doctor, [], standalone_mode=False)
    assert done.return_value == 2
    assert done.output.count("\n") == 1
    assert "accumlint[verify]" in done.output


def test_no_device_and_status_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "inspect", lambda folder, timeout: {"devices": [], "backends": {"gloo": True}})
    done = CliRunner().invoke(doctor, ["--device", "cuda"], standalone_mode=False)
    assert done.return_value == 3
    assert "--device cpu" in done.output


def test_a_rank_that_fails_ends_the_other(tmp_path: Path) -> None:
    ranks = [
        processes.Process(tmp_path, "rank 0", ["-c", "import time; time.sleep(60)"]),
        processes.Process(tmp_path, "rank 1", ["-c", "raise ValueError('no such interface')"]),
    ]
    with (
        pytest.raises(processes.NotRunError, match="rank 1 ended with exit status 1: ValueError: no such interface"),
        processes.ended(ranks),
    ):
        processes.finish(ranks, 30)
    assert ranks[0].status == -signal.SIGKILL


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    ranks = [processes.Process(tmp_path, "rank 0", ["-c", "import time; time.sleep(60)"])]
    with pytest.raises(processes.NotRunError, match=r"No end after 0\.2 s: rank 0 still ran"), processes.ended(ranks):
        processes.finish(ranks, 0.2)
    assert ranks[0].status is not None


def test_an_interrupt_while_the_ranks_start_ends_those_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[processes.Process] = []

    def start(folder: Path, name: str, arguments: list[str]) -> processes.Process:
        if started:
            raise KeyboardInterrupt
        started.append(processes.Process(folder, name, ["-c", "import time; time.sleep(60)"]))
        return started[0]

    monkeypatch.setattr(examination, "Process", start)
    with pytest.raises(KeyboardInterrupt):
        examination.experiment(tmp_path, "gloo", "cpu", 30)
    assert started[0].status == -signal.SIGKILL


def test_another_launcher_s_variables_do_not_reach_the_ranks() -> None:
    kept = processes.environment({"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1", "PATH": "/bin"}, Path("there"))
    assert kept == {"PATH": "/bin", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "TMPDIR": "there"}


def children(pid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A doctor in a session of its own, with ranks that wait for ever, and temporary files below `tmp_path`."""
    script = (
        "import sys\nfrom accumlint.runtime.doctor import examine as e\n"
        "e.inspect = lambda *_: {'devices': [], 'backends': {'gloo': True}}\n"
        "from accumlint.runtime.doctor import processes as p\n"
        "inner = p.Process.__init__\n"
        "wait = 'import os, threading, time; threading.Thread(target=lambda: (os.read(0, 1), os._exit(1))).start(); time.sleep(60)'\n"
        "p.Process.__init__ = lambda self, folder, name, arguments: inner(self, folder, name, ['-c', wait])\n"
        "from accumlint.cli import main\nmain(['doctor'])\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job would have it ignored
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_when_it_is_ended(running: subprocess.Popen[bytes], tmp_path: Path, number: int, status: int) -> None:
    deadline = time.monotonic() + 60
    while len(ranks := children(running.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks) == 2
    running.send_signal(number)
    assert running.wait(30) == status
    while any(alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks)
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []
