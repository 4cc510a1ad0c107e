"""The checks on a CUDA device, where there is one; where there is none, that they say so."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.training import SCRIPTS

torch = pytest.importorskip("torch")
CHECK = Path(__file__).with_name("check")


def check(findings: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(CHECK), str(findings), *options], capture_output=True, text=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: tests/gpu/check was not run")
def test_everything_on_a_cuda_device(tmp_path: Path) -> None:
    done = check(tmp_path / "findings.json")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_that_nothing_was_done(tmp_path: Path) -> None:
    done = check(tmp_path / "findings.json")
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: torch")
    assert json.loads((tmp_path / "findings.json").read_text()).keys() == {"skipped"}


def test_only_the_overflowing_scripts_skip_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters stand still for one update; those of the others change at each."""
    for script in SCRIPTS:
        digests = tmp_path / script.name
        monkeypatch.setattr(sys, "argv", ["train.py", "cpu", str(digests)])
        deterministic = torch.are_deterministic_algorithms_enabled()
        with torch.random.fork_rng():
            space = {"__name__": "train"}
            begun = script.text.replace("for update in range(UPDATES):", _INITIAL + "\nfor update in range(UPDATES):")
            exec(compile(begun, script.name, "exec"), space)
        torch.use_deterministic_algorithms(deterministic)
        space["DIGESTS"].close()  # type: ignore[attr-defined]
        lines = digests.read_text().split()
        assert len(lines) == 5
        assert sum(one == other for one, other in itertools.pairwise(lines)) == script.skipped, script.name


_INITIAL = 'DIGESTS.write(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest() + "\\n")'
