"""The command and the environment of a run, and what the injected module does to an interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from accumlint.runtime.launch import INJECT, Program, is_rank, observed, prepare
from accumlint.runtime.settings import ENV, Settings

SETTINGS = Settings("token", "/folder", steps=3)
STUB = Path(__file__).parent / "stub"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("train.py", arguments=("--lr", "1")), ["PYTHON", "train.py", "--lr", "1"]),
        (Program(module="package.train"), ["PYTHON", "-m", "package.train"]),
        (
            Program("train.py", arguments=("a",), processes=8),
            ["PYTHON", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "--", "train.py", "a"],
        ),
        (
            Program(module="train", processes=1),
            ["PYTHON", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "--", "train"],
        ),
        (Program(launcher=("bash", "run.sh")), ["bash", "run.sh"]),
    ],
)
def test_commands(program: Program, words: list[str]) -> None:
    assert program.command() == [sys.executable if word == "PYTHON" else word for word in words]


def test_options_of_the_script_that_resemble_those_of_torchrun_are_its_own() -> None:
    from torch.distributed.run import get_args_parser

    given = ("--logs", "here", "--", "--no", "5")
    for program in (Program("train.py", arguments=given, processes=2), Program(module="train.py", arguments=given, processes=2)):
        parsed = get_args_parser().parse_args(program.command()[3:])
        assert parsed.training_script == "train.py"
        assert parsed.training_script_args == list(given)
        assert parsed.nproc_per_node == "2"


def test_settings_survive_the_environment() -> None:
    assert Settings.from_json(SETTINGS.to_json()) == SETTINGS
    assert Settings.from_json(json.dumps({"token": "t", "folder": "f", "of a newer version": 1})) == Settings("t", "f")


@pytest.mark.parametrize(
    ("before", "after"), [(None, [INJECT]), ("", [INJECT]), ("/a:/b", [INJECT, "/a", "/b"]), ("/a:", [INJECT, "/a", ""])]
)
def test_the_path_of_the_run(before: str | None, after: list[str]) -> None:
    environment = {} if before is None else {"PYTHONPATH": before}
    assert observed(environment, SETTINGS)["PYTHONPATH"] == os.pathsep.join(after)


def test_trackers_are_off_unless_the_user_has_said_otherwise() -> None:
    assert observed({}, SETTINGS)["WANDB_MODE"] == "disabled"
    assert observed({"WANDB_MODE": "online"}, SETTINGS)["WANDB_MODE"] == "online"
    assert observed({"TORCHDYNAMO_DISABLE": "0"}, SETTINGS)["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("program", "environment", "rank", "shows"),
    [
        (Program("a.py"), {}, False, True),
        (Program("a.py"), {"RANK": "0", "WORLD_SIZE": "2"}, True, True),
        (Program("a.py"), {"RANK": "1", "WORLD_SIZE": "2"}, True, False),
        (Program(launcher=("torchrun", "a.py")), {"RANK": "1", "WORLD_SIZE": "2"}, False, True),
    ],
)
def test_which_controller_shows(program: Program, environment: dict[str, str], rank: bool, shows: bool) -> None:
    assert is_rank(program, environment) is rank
    launch = prepare(program, SETTINGS, environment)
    assert launch.shows is shows
    assert launch.settings.steps == 3


def test_every_run_has_its_own_token_and_folder() -> None:
    first, second = (prepare(Program("a.py"), SETTINGS, {}).settings for _ in range(2))
    assert first.token != second.token
    assert first.folder != second.folder
    assert not os.path.exists(first.folder)


def python(folder: Path, code: str, *, path: str = "", injected: bool = True, flags: tuple[str, ...] = ()) -> str:
    """What a line of Python prints under the injected module."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    settings = Settings("token", str(folder))
    paths = [each for each in (INJECT if injected else "", path) if each]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), ENV: settings.to_json()}
    done = subprocess.run([sys.executable, *flags, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


AGENT = """\
import sys, types
agent = types.ModuleType("accumlint.runtime.agent")
agent.observe = lambda settings: print("observed", settings.token)
sys.modules["accumlint.runtime.agent"] = agent
"""


def test_the_agent_starts_when_torch_is_imported(tmp_path: Path) -> None:
    code = AGENT + "print('before'); import torch; print('after'); import torch; print(torch.__spec__.loader.__dict__.get('exec_module'))"
    assert python(tmp_path, code, path=str(STUB)).splitlines() == ["before", "observed token", "after", "None"]


def test_asking_whether_there_is_torch_starts_nothing_and_hides_nothing(tmp_path: Path) -> None:
    code = AGENT + "import importlib.util; print(bool(importlib.util.find_spec('torch'))); print('asked'); import torch"
    assert python(tmp_path, code, path=str(STUB)).splitlines() == ["True", "asked", "observed token"]


def test_a_program_without_torch_loads_nothing_of_ours(tmp_path: Path) -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('accumlint') or name in ('json', 'traceback')])"
    assert python(tmp_path, code) == "[]"


def test_torch_that_is_missing_stays_missing(tmp_path: Path) -> None:
    hidden = "import sys\nsys.path[:] = [each for each in sys.path if 'packages' not in each]\n"
    assert python(tmp_path, hidden + "try: import torch\nexcept ModuleNotFoundError as error: print(error)") == "No module named 'torch'"


def test_the_path_of_the_program_is_its_own(tmp_path: Path) -> None:
    code = "import sys; print(sys.path)"
    assert python(tmp_path, code, path=str(STUB)) == python(tmp_path, code, path=str(STUB), injected=False)


def test_the_shadowed_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("MARK = 'theirs'")
    code = "import sitecustomize; print(sitecustomize.MARK, sitecustomize.__file__)"
    assert python(tmp_path, code, path=str(tmp_path)) == f"theirs {tmp_path / 'sitecustomize.py'}"


def test_an_agent_that_fails_is_noted_and_the_program_goes_on(tmp_path: Path) -> None:
    code = AGENT + "agent.observe = lambda settings: 1 / 0\nimport torch; print('went on')"
    assert python(tmp_path, code, path=str(STUB)) == "went on"
    (note,) = tmp_path.glob("trouble-*.txt")
    assert "ZeroDivisionError" in note.read_text()


def test_an_isolated_interpreter_is_left_alone(tmp_path: Path) -> None:
    assert python(tmp_path, "import sys; print(type(sys.meta_path[0]).__name__)", flags=("-I",)) != "_AfterTorch"


def test_the_stub_is_no_torch() -> None:
    """The tests around here must not find the stub in the place of torch."""
    torch: ModuleType = pytest.importorskip("torch")
    assert torch.__version__ != "0"
