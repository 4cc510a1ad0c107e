"""What `accumlint verify` says to a command line that cannot be: one sentence with the remedy, and exit status 2."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from accumlint.cli import run
from tests.runtime.processes.scene import HERE, Scene


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "There is no script. Write `accumlint verify train.py`"),
        ("--", "`--` stands without a command."),
        ("train.py --steps 0", "0 is not in the range x>=1"),
        ("train.py --nproc 0", "0 is not in the range x>=1"),
        ("train.py --timeout 0", "0.0 is not in the range x>=1"),
        ("train.py --lr 1", "No such option: --lr. The script's own arguments go after `--`"),
        ("train.py 5 6", "`5`: the script's own arguments go after `--`: accumlint verify train.py -- 5 6"),
        ("nowhere.py", "nowhere.py: no such file."),
        ("train.ipynb", "A notebook is not run as a script; measure its updates in a cell, with `accumlint.watch`."),
        ("sh", "A launcher's command line goes after `--`: accumlint verify -- sh"),
        ("train.py -m train", "A script and -m cannot stand together"),
        ("--nproc 2 -- sh run.sh", "--nproc is for a script"),
        ("-- no-such-launcher train.py", "no-such-launcher: no such command."),
        ("train.py --require weights,speed", "'speed' is none of weights, buckets, gradient, ranks."),
        ("train.py --graceful --keep-going", "choose one"),
    ],
)
def test_usage_errors(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", *line.split()]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_torch_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["verify", "train.py"]) == 2
    assert "pip install accumlint[verify]" in capsys.readouterr().err


def test_nproc_within_a_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["verify", "train.py", "--nproc", "2"]) == 2
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_the_report_alone_is_on_standard_output(tmp_path: Path) -> None:
    stub = HERE / "stub"
    scene = Scene(tmp_path / "scene", {"PYTHONPATH": os.fspath(stub)})
    talks = "print('this is the script')"
    ran = scene.run([sys.executable, "-m", "accumlint", "verify", "--output-format", "json", "--", sys.executable, "-c", talks])
    out, _ = ran.communicate(timeout=120)
    assert json.loads(out)
    assert ran.returncode == 3
    assert "this is the script" in scene.stderr
    assert scene.left() == []
