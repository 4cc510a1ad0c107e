"""A file whose model is made elsewhere is looked at as those who use it run it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accumlint.cli import run
from accumlint.source.reading.callers import Callers
from accumlint.source.reading.imports import Imports
from accumlint.source.reading.leads import Leads
from tests.source.across.conftest import Lint

ENGINE = """\
import torch.nn.functional as F


def run_training(model, loader, optimizer, accum):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
MAIN = """\
import torch
from torch.nn.parallel import DistributedDataParallel
from {module} import {name}


def main(loader, accum):
    torch.distributed.init_process_group("gloo")
    model = {wrapper}(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {name}(model, loader, optimizer, accum)


if __name__ == "__main__":
    main(torch.utils.data.DataLoader([]), 4)
"""
WRAPPED = MAIN.format(module="engine", name="run_training", wrapper="DistributedDataParallel")
PLAIN = MAIN.format(module="engine", name="run_training", wrapper="torch.nn.Sequential")
FOUND = {("engine.py", "ACC103", "(F.cross_entropy(model(x), y) / accum).backward()")}


def test_the_wrapper_that_a_caller_makes_is_known(lint: Lint) -> None:
    assert lint({"engine.py": ENGINE}, "engine.py") == set()
    assert lint({"engine.py": ENGINE, "main.py": WRAPPED}, "engine.py") == FOUND


def test_what_is_found_in_the_callers_own_lines_is_left_to_them(lint: Lint) -> None:
    wrong = WRAPPED.replace("def main", ENGINE.partition("\n\n\n")[2].replace("run_training", "again") + "\n\ndef main")
    wrong = wrong.replace("    run_training(", "    again(model, loader, optimizer, accum)\n    run_training(")
    wrong = "import torch.nn.functional as F\n" + wrong
    assert {each[0] for each in lint({"engine.py": ENGINE, "main.py": wrong}, "engine.py")} == {"engine.py"}
    assert {each[0] for each in lint({"engine.py": ENGINE, "main.py": wrong}, "main.py")} == {"engine.py", "main.py"}


@pytest.mark.parametrize(
    "files",
    [
        {"pkg/__init__.py": "", "pkg/engine.py": ENGINE, "tools/train.py": WRAPPED.replace("from engine", "from pkg.engine")},
        {"pkg/__init__.py": "from .engine import *\n", "pkg/engine.py": ENGINE, "train.py": WRAPPED.replace("from engine", "from pkg")},
        {
            "pkg/__init__.py": "",
            "pkg/engine.py": ENGINE,
            "pkg/runner.py": "from . import engine\n\n\ndef fit(*args):\n    engine.run_training(*args)\n",
            "train.py": WRAPPED.replace("from engine", "from pkg.runner").replace("run_training", "fit"),
        },
    ],
    ids=["another folder", "re-exported", "over one more file"],
)
def test_callers_are_found_in_other_folders_and_through_other_files(lint: Lint, files: dict[str, str]) -> None:
    assert {each[:2] for each in lint(files, "pkg/engine.py")} == {("pkg/engine.py", "ACC103")}


@pytest.mark.parametrize(
    "other",
    [
        {"main.py": WRAPPED + "def broken(:\n"},
        {"test_main.py": WRAPPED},
        {"tests/main.py": WRAPPED},
        {"main.py": WRAPPED.replace("run_training", "evaluate")},
        {"main.py": "import engine\n\nengine.run_training = None\n"},
    ],
    ids=["does not parse", "a test", "in a folder of tests", "uses something else", "trains nothing"],
)
def test_other_files_are_no_callers(lint: Lint, other: dict[str, str]) -> None:
    assert lint({"engine.py": ENGINE, **other}, "engine.py") == set()


def test_files_that_import_each_other(lint: Lint) -> None:
    files = {"engine.py": f"import main\n{ENGINE}", "main.py": WRAPPED}
    assert {each[1] for each in lint(files, "engine.py")} == {"ACC103"}


def test_a_script_comes_before_a_module_and_the_first_that_trains_is_enough(lint: Lint) -> None:
    module = PLAIN.replace('if __name__ == "__main__":', "def start():")
    assert lint({"engine.py": ENGINE, "a_module.py": module, "z_script.py": WRAPPED}, "engine.py") == FOUND
    (unused,) = ({"a_script.py": 'from engine import run_training\n\nif __name__ == "__main__":\n    print(run_training)\n'},)
    assert lint({"engine.py": ENGINE, **unused, "z_script.py": WRAPPED}, "engine.py") == FOUND


def test_callers_in_order(tmp_path: Path) -> None:
    for name in ("pkg/engine.py", "pkg/near.py", "tools/b.py", "tools/a.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(ENGINE if "engine" in name else PLAIN.replace("from engine", "from pkg.engine"), encoding="utf-8")
    (tmp_path / "setup.py").write_text("", encoding="utf-8")
    near = tmp_path / "pkg/near.py"
    near.write_text(near.read_text(encoding="utf-8").partition("if __name__")[0], encoding="utf-8")
    found = Callers(Leads(Imports())).of(str(tmp_path / "pkg/engine.py"), ["run_training"])
    assert [os.path.relpath(each, tmp_path) for each in found.starts] == ["tools/a.py", "tools/b.py"]
    assert str(tmp_path / "tools") + os.sep in found.asked
    assert str(near) in found.asked


HELPED = """\
import torch.nn.functional as F
from helper import Update


def run_training(model, loader, optimizer, accum):
    update = Update()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / accum
        update(loss, optimizer, (i + 1) % accum == 0)
"""
HELPER = """\
class Update:
    def __call__(self, loss, optimizer, last):
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_what_the_loop_can_mend_is_found_where_it_calls_the_helper(lint: Lint) -> None:
    found = lint({"engine.py": HELPED, "helper.py": HELPER, "main.py": WRAPPED}, "engine.py")
    assert found == {("engine.py", "ACC103", "update(loss, optimizer, (i + 1) % accum == 0)")}


GATED = """\
def update(optimizer, i, accum):
    if (i + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
EPOCHS = """\
import torch.nn.functional as F
from helper import update


def fit(model, loader, optimizer, accum, epochs):
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / accum).backward()
            update(optimizer, i, accum)
"""


def test_a_tail_is_the_matter_of_the_loop(lint: Lint) -> None:
    assert lint({"main.py": EPOCHS, "helper.py": GATED}) == {("main.py", "ACC307", "update(optimizer, i, accum)")}


def test_what_is_wrong_in_the_helper_is_found_there(lint: Lint) -> None:
    helper = HELPER.replace("            optimizer.zero_grad", "        optimizer.zero_grad")
    found = lint({"engine.py": HELPED, "helper.py": helper, "main.py": WRAPPED}, "main.py")
    assert ("helper.py", "ACC302", "optimizer.zero_grad()") in found


BASE = """\
import torch


class Base:
    def __init__(self, loader, accum):
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader, self.accum = loader, accum

    def fit(self):
        for i, (x, y) in enumerate(self.loader):
            self.train_step(x, y)
            if (i + 1) % self.accum == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
"""
DERIVED = """\
import torch.nn.functional as F
from base import Base


class Trainer(Base):
    def train_step(self, x, y):
        loss = F.cross_entropy(self.model(x), y) / self.accum
        loss.backward()


if __name__ == "__main__":
    Trainer([], 4).fit()
"""


def test_a_method_of_the_same_object_is_no_helper(lint: Lint) -> None:
    assert lint({"base.py": BASE, "main.py": DERIVED}) == {("main.py", "ACC103", "loss.backward()")}


def write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
    os.utime(path, ns=(0, hash(text) % 10**9 + 10**9))


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    run(["check", *arguments, "--select", "ALL", "--output-format", "concise"])
    return [line.split(" ")[0] for line in capsys.readouterr().out.split("\n") if "ACC" in line]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("pyproject.toml", "")
    write("engine.py", ENGINE)


@pytest.mark.usefixtures("project")
def test_a_caller_that_comes_or_changes_is_looked_at_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "engine.py") == []
    write("main.py", WRAPPED)
    assert check(capsys, "engine.py") == check(capsys, "engine.py") == ["engine.py:7:9:"]
    write("main.py", PLAIN)
    assert check(capsys, "engine.py") == []


@pytest.mark.usefixtures("project")
def test_a_file_that_comes_to_import_it_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    write("main.py", "")
    assert check(capsys, "engine.py") == check(capsys, "engine.py") == []
    write("main.py", WRAPPED)
    assert check(capsys, "engine.py") == ["engine.py:7:9:"]


@pytest.mark.usefixtures("project")
def test_folders_that_are_no_packages_make_nothing_stale(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write("main.py", WRAPPED)
    assert check(capsys, "engine.py") == ["engine.py:7:9:"]
    for name in ("__pycache__", ".venv", "my-data"):
        os.mkdir(name)
    monkeypatch.setattr("accumlint.linter.examine", None)  # whoever looks again fails
    assert check(capsys, "engine.py") == ["engine.py:7:9:"]


@pytest.mark.usefixtures("project")
def test_whether_alone_or_with_the_whole_project_the_same_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    write("main.py", WRAPPED)
    for arguments in (["."], ["engine.py"], ["."], ["engine.py", "main.py"], ["engine.py"], ["main.py"], ["."], ["engine.py"]):
        assert check(capsys, *arguments) == ["engine.py:7:9:"]


@pytest.mark.usefixtures("project")
def test_a_whole_project_is_not_rehearsed_from_every_caller(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write("main.py", WRAPPED)
    monkeypatch.setattr("accumlint.looking.through_callers", None)  # whoever calls it fails
    assert check(capsys, ".", "--no-cache") == ["engine.py:7:9:"]


@pytest.mark.usefixtures("project")
def test_a_caller_that_is_named_too_is_rehearsed_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write("main.py", WRAPPED)
    taken: list[str] = []
    monkeypatch.setattr("accumlint.looking.through_callers", lambda path, starts, *rest: taken.extend(starts) or iter(()))
    assert check(capsys, "engine.py", "main.py", "--no-cache") == ["engine.py:7:9:"]
    assert taken == []
    assert check(capsys, "engine.py", "--no-cache") == []
    assert [os.path.basename(each) for each in taken] == ["main.py"]


@pytest.mark.usefixtures("project")
def test_a_folder_of_the_project_is_looked_at_with_the_callers_outside(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkdir("inner")
    os.replace("engine.py", "inner/engine.py")
    write("main.py", WRAPPED.replace("from engine", "from inner.engine"))
    assert check(capsys, "inner") == check(capsys, "inner") == ["inner/engine.py:7:9:"]


@pytest.mark.usefixtures("project")
def test_show_says_which_caller_was_taken(capsys: pytest.CaptureFixture[str]) -> None:
    write("main.py", WRAPPED)
    run(["show", "engine.py"])
    drawn = capsys.readouterr().out
    assert drawn.startswith("engine.py:6")
    assert "as main.py runs it" in drawn
    run(["show", "main.py"])
    assert "as main.py runs it" not in capsys.readouterr().out


ENGINES = """\
import torch.nn.functional as F
from contextlib import nullcontext


def backward(model, loss, settings):
    if settings["engine"] == "deepspeed":
        model.backward(loss)
    else:
        (loss / settings["accum"]).backward()


def update(model, optimizer, settings, i):
    if settings["engine"] == "deepspeed":
        model.step()
    elif (i + 1) % settings["accum"] == 0:
        optimizer.step()
        optimizer.zero_grad()


def main(loader, model, optimizer, settings):
    for i, (x, y) in enumerate(loader):
        if settings["engine"] in ["ddp", "fsdp"] and (i + 1) % settings["accum"] != 0:
            context = model.no_sync
        else:
            context = nullcontext
        with context():
            backward(model, F.cross_entropy(model(x), y), settings)
        update(model, optimizer, settings, i)
"""


def test_a_setting_is_not_one_of_a_list_and_another_value_at_once(lint: Lint) -> None:
    assert lint({"main.py": ENGINES}) == set()


QUIET = """\
def silence(is_master):
    import builtins as __builtin__

    builtin_print = __builtin__.print

    def print(*args, force=False):
        if is_master or force:
            builtin_print(*args)

    __builtin__.print = print
"""


def test_a_print_of_the_projects_own_trains_nothing(tmp_path: Path) -> None:
    from accumlint.config import Settings
    from accumlint.linter import library_for
    from accumlint.source.reading.index import Index
    from accumlint.source.reading.parse import Source, parse
    from accumlint.source.reading.program import program_of

    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "quiet.py").write_text(QUIET + "\n\n" + HELPER, encoding="utf-8")
    text = "from quiet import Update, silence\nsilence(True)\nprint(1)\nupdate = Update()\nupdate(loss, optimizer, True)\n"
    source = parse(text.encode(), str(tmp_path / "main.py"))
    assert isinstance(source, Source)
    index = Index(program_of(source, library_for(Settings())).tree())
    assert [bool(index.kinds(node)) for node in source.tree.body] == [False, False, False, False, True]


def test_a_model_given_to_a_parameter_of_its_class_is_asked_for(lint: Lint) -> None:
    net = "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x\n\n\n"
    engine = net + ENGINE.replace("def run_training(model,", "def run_training(model: Net,")
    main = WRAPPED.replace("import run_training", "import Net, run_training").replace("torch.nn.Linear(4, 2)", "Net()")
    assert lint({"engine.py": engine}, "engine.py") == set()
    assert lint({"engine.py": engine, "main.py": main}, "engine.py") == FOUND
