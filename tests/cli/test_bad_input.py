"""Whatever lies in a tree: one clear line for what cannot be linted, the rest linted, in bounded time, and nothing executed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

SECONDS = 60  # the most that one file may take, on a machine with other things to do

GUILTY = """\
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y) / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
"""
FINDING = "ACC302"
CONCISE = ("--no-cache", "--isolated", "--output-format", "concise")
LOOP = GUILTY[GUILTY.index("for ") :]
INDENTED = "".join(f"    {line}\n" for line in LOOP.splitlines())


class Run(NamedTuple):
    status: int
    out: str
    err: str
    seconds: float

    def of(self, name: str) -> list[str]:
        """The lines of output about one file."""
        return [line for line in (self.out + self.err).splitlines() if name in line]


Lint = Callable[..., Run]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "guilty.py").write_text(GUILTY)
    return tmp_path


@pytest.fixture
def lint(tree: Path) -> Lint:
    """Lints the tree; whatever else lies there, the guilty file's finding must be among what is found."""

    def run(*arguments: str, expect_finding: bool = True, stdin: bytes = b"") -> Run:
        command = [sys.executable, "-m", "accumlint", *(arguments or (".", *CONCISE))]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=tree, capture_output=True, timeout=60, input=stdin, env={**os.environ, "NO_COLOR": "1"})
        outcome = Run(done.returncode, done.stdout.decode(), done.stderr.decode(), time.perf_counter() - started)
        assert "Traceback" not in outcome.out + outcome.err
        assert "internal error" not in outcome.err
        if expect_finding:
            assert any(FINDING in line for line in outcome.of("guilty.py")), outcome
        return outcome

    return run


UNREADABLE = {
    "not UTF-8": (LOOP.encode() + b"name = '\xe9'\n", "not UTF-8 (byte 0xe9), and no other encoding is declared"),
    "UTF-16": (LOOP.encode("utf-16"), "not UTF-8: the file is UTF-16, which Python does not read"),
    "null bytes": (LOOP.encode() + b"x = '\0'\n", "not Python source: the file contains null bytes"),
    "unknown encoding": (b"# coding: klingon\n" + LOOP.encode(), "unknown encoding: klingon"),
    "Python 2": (f"{LOOP}    print 'loss', loss\n".encode(), "looks like Python 2: print statement"),
    "syntax error": (f"{LOOP}def f(:\n    pass\n".encode(), "syntax error: invalid syntax"),
    "tabs and spaces": (f"{LOOP}if step:\n\tx = 1\n        y = 2\n".encode(), "syntax error: inconsistent use of tabs and spaces"),
    "3000 parentheses": (f"{LOOP}x = {'(' * 3_000}1{')' * 3_000}\n".encode(), "nested too deeply to follow"),
    "1000 calls": (f"{LOOP}x = {'f(' * 1_000}1{')' * 1_000}\n".encode(), "nested too deeply to follow"),
    "1000 blocks": (
        (LOOP + "".join(" " * depth + "if x:\n" for depth in range(1_000)) + " " * 1_000 + "y = 1\n").encode(),
        "nested too deeply to follow",
    ),
    "100000 operators": (f"{LOOP}x = {' + '.join(['a'] * 100_000)}\n".encode(), "nested too deeply to follow"),
    "too large": (LOOP.encode() + b"# " + b"x" * 5_000_000 + b"\n", "too large: 5.0 MB, the limit is 5 MB"),
    "too many lines": (LOOP.encode() + b"x = 1\n" * 200_001, "too large: 200,0"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_one_line_and_an_error(tree: Path, lint: Lint, name: str) -> None:
    data, message = UNREADABLE[name]
    (tree / "bad.py").write_bytes(data)
    outcome = lint()
    assert outcome.status == 1
    assert outcome.seconds < SECONDS
    (line,) = outcome.of("bad.py")
    assert "ACC000" in line
    assert message in line
    place = line.split(":")
    assert int(place[1]) >= 1
    assert int(place[2]) >= 1


@pytest.mark.parametrize("name", UNREADABLE)
def test_show_refuses_it_in_one_line(tree: Path, lint: Lint, name: str) -> None:
    data, message = UNREADABLE[name]
    (tree / "bad.py").write_bytes(data)
    outcome = lint("show", "bad.py", expect_finding=False)
    assert outcome.status == 2
    assert outcome.out == ""
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_every_format_says_that_a_file_cannot_be_read(tree: Path, lint: Lint) -> None:
    (tree / "bad.py").write_bytes(UNREADABLE["null bytes"][0])
    for form in ("full", "concise", "json", "json-lines", "sarif", "github"):
        outcome = lint(".", "--no-cache", "--isolated", "--output-format", form, expect_finding=False)
        assert outcome.status == 1
        assert "ACC000" in outcome.out
        assert FINDING in outcome.out


READABLE = {
    "mark": b"\xef\xbb\xbf" + GUILTY.encode(),
    "CRLF": GUILTY.replace("\n", "\r\n").encode(),
    "CR": GUILTY.replace("\n", "\r").encode(),
    "mixed line ends": GUILTY.replace("\n", "\r\n", 3).replace("\n", "\r", 5).encode(),
    "form feeds": GUILTY.replace("\nfor", "\n\x0cfor").encode(),
    "declared encoding": b"# -*- coding: latin-1 -*-\nname = '\xe9'\n" + GUILTY.encode(),
    "no line end": GUILTY.rstrip().encode(),
    "100000 lines": (GUILTY + "def f(x):\n    y = x + 1\n    return [y for _ in range(x)]\n\n" * 25_000).encode(),
}

# Code that stands before the guilty loop, harmless where a person reads it and not where a program does.
AROUND = {
    "long sum": f"total = {' + '.join(['a'] * 2_500)}\n",
    "long elif": "if a == 0: pass\n" + "".join(f"elif a == {at}: pass\n" for at in range(1_000)),
    "long concatenation": "text = (\n" + "    'line'\n" * 3_000 + ")\n",
    "wide table": f"table = [{'1, ' * 100_000}]\n",
    "recursive function": "def f(n):\n    return f(n - 1) if n else g(n)\n\ndef g(n):\n    return f(n)\n\nf(3)\n",
    "recursive training": f"def train(model, loader):\n{INDENTED}    train(model, loader)\n\ntrain(model, loader)\n",
    "recursive class": "class A(A):\n    def f(self):\n        return self.f()\n\nA().f()\n",
    "recursive values": "a = []\na.append(a)\nd = {}\nd['d'] = d\nf(a, d).backward()\n",
    "endless loop": "while True:\n    f(x).backward()\n    optimizer.step()\n    optimizer.zero_grad(set_to_none=True)\n    f(y)\n",
    "endless loop that does nothing": "def wait():\n    while True:\n        pass\n\nwait()\n",
    "endless generator": "def batches():\n    while True:\n        yield 1, 2\n\nfor x, y in batches():\n    pass\n",
    "long range": "for i in range(10 ** 12):\n    for j in range(10 ** 12):\n        f(i * j).backward()\n",
    "huge numbers": "x = 10 ** 10 ** 10\ny = 'a' * 10 ** 12\nz = 1 << 10 ** 12\nw = [0] * 10 ** 12\nv = list(range(10 ** 12))\n",
    "growing values": "x, s, n = [1], 'a', 3\nfor i in range(200):\n    x = x + x\n    s = s + s\n    n *= n\n    f(x, s, n)\n",
    "division by zero": "a = 1 // 0\nb = 1 % 0\nc = 0.0 ** -1\nfor i in range(0):\n    f(a, b, c).backward()\n",
    "many settings": "".join(f"if args.a{at}:\n    optimizer.zero_grad(set_to_none=True)\n" for at in range(60)),
    "nested loops": "def deep():\n"
    + "".join("    " * at + f"for i{at} in range(5):\n" for at in range(1, 13))
    + "    " * 13
    + "f(x).backward()\n",
}
READABLE |= {name: (code + GUILTY).encode() for name, code in AROUND.items()}


@pytest.mark.parametrize("name", READABLE)
def test_what_python_reads_is_linted(tree: Path, lint: Lint, name: str) -> None:
    (tree / "odd.py").write_bytes(READABLE[name])
    outcome = lint()
    assert outcome.seconds < SECONDS
    assert not any("ACC000" in line for line in outcome.of("odd.py")), outcome
    lines = READABLE[name].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    guilty = 1 + max(at for at, line in enumerate(lines) if line == b"    optimizer.zero_grad()")
    assert any(FINDING in line and line.split(":")[1] == str(guilty) for line in outcome.of("odd.py")), outcome


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b"   ", b"# nothing\n"])
def test_an_empty_file_is_fine(tree: Path, lint: Lint, data: bytes) -> None:
    (tree / "empty.py").write_bytes(data)
    assert lint().of("empty.py") == []
    named = lint("empty.py", "--no-cache", "--isolated", expect_finding=False)
    assert named.status == 0
    shown = lint("show", "empty.py", expect_finding=False)
    assert shown.status == 0
    assert len(shown.out.splitlines()) == 1


def test_an_empty_folder_is_fine(tree: Path, lint: Lint) -> None:
    (tree / "empty").mkdir()
    outcome = lint("empty", "--no-cache", "--isolated", expect_finding=False)
    assert outcome.status == 0
    assert len((outcome.out + outcome.err).splitlines()) <= 2


def test_links_that_lead_in_circles(tree: Path, lint: Lint) -> None:
    (tree / "package").mkdir()
    (tree / "package" / "up").symlink_to(tree, target_is_directory=True)
    (tree / "self.py").symlink_to(tree / "self.py")
    (tree / "nothing.py").symlink_to(tree / "missing.py")
    (tree / "a").symlink_to(tree / "b")
    (tree / "b").symlink_to(tree / "a")
    outcome = lint()
    assert len([line for line in outcome.of("guilty.py") if FINDING in line]) == 1
    assert outcome.seconds < SECONDS


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="everything is readable here")
def test_an_unreadable_file_is_one_line_and_exit_2(tree: Path, lint: Lint) -> None:
    (tree / "secret.py").write_text(GUILTY)
    (tree / "secret.py").chmod(0)
    outcome = lint()
    assert outcome.status == 2
    (line,) = outcome.of("secret.py")
    assert "permission denied" in line


def test_a_missing_path_is_one_line_and_exit_2(lint: Lint) -> None:
    outcome = lint("missing", "guilty.py", *CONCISE)
    assert outcome.status == 2
    (line,) = outcome.of("missing")
    assert "no such file" in line


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_not_waited_for(tree: Path, lint: Lint) -> None:
    os.mkfifo(tree / "pipe.py")
    lint()
    named = lint("pipe.py", "guilty.py", *CONCISE)
    assert named.status == 2
    assert len(named.of("pipe.py")) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_beside_a_file_are_not_waited_for(tree: Path, lint: Lint) -> None:
    (tree / "sub").mkdir()
    for name in ("pipe.py", "sub/inner.py", ".gitignore", "requirements.txt", "__init__.py"):
        os.mkfifo(tree / name)
    assert lint("guilty.py", *CONCISE).of("guilty.py")


def test_a_folder_called_like_a_file_or_a_command(tree: Path, lint: Lint) -> None:
    for name in ("package.py", "verify", "check", "rule"):
        (tree / name).mkdir()
        (tree / name / "inner.py").write_text(GUILTY)
    outcome = lint()
    assert len(outcome.of("inner.py")) == 4
    for name in ("package.py", "verify/", "./verify", "./check"):
        assert lint(name, *CONCISE, expect_finding=False).of("inner.py")
    assert lint("check", "verify", *CONCISE, expect_finding=False).of("inner.py")


def test_control_characters_never_reach_the_terminal(tree: Path, lint: Lint) -> None:
    spoiled = GUILTY.replace("optimizer.zero_grad()", "optimizer.zero_grad()  # \x1b[31mred\x07\x9b2J \u202e").replace(
        "loader", "load\u0435r"
    )
    (tree / "spoiled.py").write_text(spoiled)
    (tree / "broken.py").write_text(f"{LOOP}x = '\x1b]0;title\x07\n")
    outputs = [
        lint(".", "--no-cache", "--isolated", "--output-format", form, expect_finding=form == "concise") for form in ("full", "concise")
    ]
    outputs += [lint("show", "spoiled.py", expect_finding=False), lint("show", "broken.py", expect_finding=False)]
    for outcome in outputs:
        assert not any(sign in outcome.out + outcome.err for sign in "\x1b\x07\x9b\u202e")


def test_odd_file_names(tree: Path, lint: Lint) -> None:
    for name in ("two words.py", "line\nend.py", "\x1b[31m.py", "-q.py", "é.py", "*.py", "[a].py"):
        (tree / name).write_text(GUILTY)
    if os.name == "posix":
        Path(os.fsdecode(os.fsencode(tree) + b"/\xff.py")).write_text(GUILTY)
    outcome = lint()
    assert outcome.out.count(FINDING) == 9
    assert "\x1b" not in outcome.out
    for form in ("full", "json", "sarif", "github"):
        lint(".", "--no-cache", "--isolated", "--output-format", form, expect_finding=False)


def test_nothing_is_executed_or_imported(tree: Path, lint: Lint) -> None:
    trap = "import pathlib\npathlib.Path('executed').touch()\n"
    (tree / "trap.py").write_text(f"{trap}import setup_trap\n{GUILTY}")
    for name in ("setup_trap.py", "conftest.py", "sitecustomize.py", "click.py", "torch.py", "json.py"):
        (tree / name).write_text(trap)
    command = [str(Path(sys.executable).with_name("accumlint"))]
    if not Path(command[0]).exists():
        pytest.skip("accumlint is not installed as a command")
    done = subprocess.run([*command, ".", "--no-cache"], cwd=tree, capture_output=True, timeout=60)
    assert FINDING.encode() in done.stdout
    assert not (tree / "executed").exists()


def test_a_damaged_cache_costs_nothing_but_time(tree: Path, lint: Lint) -> None:
    first = lint(".", "--isolated", "--output-format", "concise")
    assert lint(".", "--isolated", "--output-format", "concise").out == first.out
    for file in (tree / ".accumlint_cache").iterdir():
        if file.suffix == ".json":
            file.write_bytes(b'{"rows": [[[')
    assert lint(".", "--isolated", "--output-format", "concise").out == first.out


def test_standard_input_that_cannot_be_read(lint: Lint) -> None:
    for name, (data, message) in UNREADABLE.items():
        if name.startswith("too"):
            continue
        outcome = lint("-", "--isolated", "--output-format", "concise", stdin=data, expect_finding=False)
        assert outcome.status == 1
        assert message in outcome.out


def test_an_interrupt_while_the_program_is_imported_is_one() -> None:
    script = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'accumlint.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop)\n"
        "from accumlint.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
