"""Which files are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accumlint.config import Configuration, Settings
from accumlint.source.reading.files import Candidate, Unreadable, find, glob_regex, left_out, patterns
from tests.conftest import Write


def found(*arguments: str, force_exclude: bool = False, configuration: Configuration | None = None) -> list[str]:
    """The files that are found, from the current folder, in order."""
    those = find(arguments, configuration or Configuration(), force_exclude=force_exclude)
    return [os.path.relpath(each.path).replace(os.sep, "/") for each in those if isinstance(each, Candidate)]


def unreadable(*arguments: str) -> list[tuple[str, str]]:
    those = find(arguments, Configuration())
    return [(os.path.relpath(each.path), each.reason) for each in those if isinstance(each, Unreadable)]


def test_python_files_below_a_folder_in_order(write: Write) -> None:
    for name in ("b.py", "a.py", "sub/d.py", "sub/c.py", "stub.pyi", "note.txt", "nb.ipynb"):
        write(name)
    assert found(".") == ["a.py", "b.py", "nb.ipynb", "sub/c.py", "sub/d.py"]


def test_a_file_is_found_once(write: Write) -> None:
    write("a.py")
    assert found("a.py", ".", "./a.py") == ["a.py"]


def test_build_and_environment_folders_are_passed_over_below_a_named_one_only(write: Write) -> None:
    for name in ("a.py", ".venv/lib/b.py", "build/c.py", "node_modules/d.py", ".hidden/e.py"):
        write(name)
    assert found(".") == ["a.py", ".hidden/e.py"], "the files of a folder, then its folders"
    assert found("build", ".venv") == ["build/c.py", ".venv/lib/b.py"]


def test_named_files_are_read_whatever_excludes_say(write: Write) -> None:
    write("build/a.py")
    write("script")
    write(".gitignore", "build/\n")
    assert found("build/a.py", "script") == ["build/a.py", "script"]
    assert found("build/a.py", force_exclude=True) == []


def test_excludes_of_the_configuration(write: Write) -> None:
    write("accumlint.toml", 'extend-exclude = ["gen_*.py", "data/raw", "lib/**/old.py"]\n')
    for name in ("gen_x.py", "sub/gen_y.py", "data/raw/a.py", "x/data/raw/b.py", "lib/old.py", "lib/p/q/old.py", "lib/new.py"):
        write(name)
    assert found(".") == ["lib/new.py", "x/data/raw/b.py"]


def test_the_nearest_configuration_rules_each_folder(write: Write) -> None:
    write("accumlint.toml", 'extend-exclude = ["a.py"]\n')
    write("inner/pyproject.toml", '[tool.accumlint]\nextend-exclude = ["b.py"]\n')
    for name in ("a.py", "b.py", "inner/a.py", "inner/b.py"):
        write(name)
    assert found(".") == ["b.py", "inner/a.py"]


def test_gitignore(write: Write, project: Path) -> None:
    (project / ".git").mkdir()
    write(".gitignore", "# comment\n*.gen.py\n/out/\n!keep.gen.py\nsub/deep\n")
    write("sub/.gitignore", "local.py\n!x.gen.py\n")
    for name in ("a.py", "a.gen.py", "keep.gen.py", "out/b.py", "sub/out/c.py", "sub/local.py", "local.py", "sub/deep/d.py"):
        write(name)
    assert found(".") == ["a.py", "keep.gen.py", "local.py", "sub/out/c.py"]
    assert found("sub") == ["sub/out/c.py"]
    assert found("out") == ["out/b.py"], "a folder that is named is read though it is ignored"
    assert left_out(str(project / "sub" / "deep" / "d.py"), Configuration())
    assert not left_out(str(project / "sub" / "out" / "c.py"), Configuration())


def test_private_excludes_of_the_repository(write: Write) -> None:
    write(".git/info/exclude", "mine.py\n")
    write("mine.py")
    write("ours.py")
    assert found(".") == ["ours.py"]


def test_symbolic_links(write: Write, project: Path) -> None:
    write("real/a.py")
    (project / "real" / "loop").symlink_to(project / "real")
    (project / "real" / "dangling.py").symlink_to(project / "nowhere.py")
    (project / "real" / "linked.py").symlink_to(project / "real" / "a.py")
    (project / "real" / "self.py").symlink_to(project / "real" / "self.py")
    assert found("real") == ["real/a.py", "real/linked.py"]
    assert unreadable("real") == [("real/self.py", "a symbolic link that leads to itself")]


def test_what_cannot_be_read_is_said_and_the_rest_goes_on(write: Write, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.py")
    write("locked/b.py")
    scandir = os.scandir

    def refusing(path: str) -> object:
        if os.path.basename(path) == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert found(".") == ["a.py"]
    assert unreadable(".", "missing.py", "nul\0byte.py") == [
        ("locked", "permission denied"),
        ("missing.py", "no such file or folder"),
        ("nul\0byte.py", "not a valid path"),
    ]


def test_a_fixed_configuration_is_used_everywhere(write: Write) -> None:
    write("inner/accumlint.toml", "exclude = ['a.py']\n")
    write("inner/a.py")
    assert found("inner", configuration=Configuration(fixed=Settings())) == ["inner/a.py"]


def test_a_folder_deeper_than_the_recursion_limit(project: Path) -> None:
    here = os.open(project, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        there = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = there
    os.close(here)
    assert found(".") == []  # deeper than a path may be long: said, not crashed
    try:
        os.system(f"rm -rf '{project}/d'")
    finally:
        pass


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("*.py", "/r/a.py", True),
        ("*.py", "/r/sub/a.py", True),
        ("sub/*.py", "/r/sub/a.py", True),
        ("sub/*.py", "/r/sub/deep/a.py", False),
        ("sub/**", "/r/sub/deep/a.py", True),
        ("**/test_*.py", "/r/x/y/test_a.py", True),
        ("[ab].py", "/r/a.py", True),
        ("[!ab].py", "/r/a.py", False),
        ("a.py", "/r/xa.py", False),
        ("./sub/a.py", "/r/sub/a.py", True),
        ("/abs/*.py", "/abs/a.py", True),
        ("sub/", "/r/sub", True),
        ("[", "/r/[", True),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert patterns((glob,), "/r")(path) is matches


def test_a_root_with_glob_characters_is_a_plain_name() -> None:
    assert patterns(("sub/*.py",), "/r[1]")("/r[1]/sub/a.py")
    assert glob_regex("a.b") == r"a\.b"
