"""Imports run one way, and a run imports no more than it needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = {"trace", "weight", "findings", "rule", "judge", "config", "verdict"}
MAY = {
    "core": {"core"},
    "rules": {"core", "rules"},
    "source": {"core", "source"},
    "report": {"core", "report"},
    "runtime": {"core", "runtime"},
    "joint": {"core", "rules", "source", "report", "runtime", "joint"},
}
HEAVY = {"torch": {"runtime"}, "libcst": {"source"}}


def files() -> list[Path]:
    return [*(ROOT / "accumlint").rglob("*.py"), *(ROOT / "rules").glob("*.py")]


def layer(module: str) -> str:
    """The layer of a module under `accumlint.`."""
    first = module.split(".")[1] if "." in module else ""
    if first in CORE or first == "":
        return "core"
    return first if first in {"rules", "source", "report", "runtime"} else "joint"


def module_of(path: Path) -> str:
    if path.is_relative_to(ROOT / "rules"):
        return f"accumlint.rules.{path.stem}"
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" if node.module == "accumlint" else node.module for alias in node.names)


def type_checking(tree: ast.Module) -> set[str]:
    """What is imported for annotations only."""
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for name in imported(ast.Module(node.body, []))
    }


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    own = layer(module_of(path))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name in imported(tree):
        top = name.split(".")[0]
        if top in HEAVY:
            assert own in HEAVY[top], f"{top} is not for {own}"
        if top == "accumlint" and name != "accumlint.__version__" and name not in type_checking(tree):
            assert layer(name) in MAY[own] or (own == "core" and name == "accumlint.rules"), f"{own} must not import {name}"


def loaded(project: Path, *arguments: str) -> set[str]:
    """The modules that a command line leaves imported."""
    script = "import sys; from accumlint.cli import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=project, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_an_unconcerned_file_imports_next_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("x = 1\n")
    modules = loaded(tmp_path, "plain.py")
    assert not modules & {"libcst", "torch", "pathspec", "multiprocessing", "tomllib", "rich"}
    assert not {name for name in modules if name.startswith(("accumlint.source.rehearsal.", "accumlint.rules.", "accumlint.report."))}
    assert not modules & {"accumlint.trace", "accumlint.findings", "accumlint.rule", "accumlint.source.reading.parse"}


def test_a_training_script_imports_neither_libcst_nor_torch(tmp_path: Path) -> None:
    from tests.planted import LOOP

    (tmp_path / "train.py").write_text(LOOP.format(end=""))
    modules = loaded(tmp_path, "train.py", "--no-cache")
    assert not modules & {"libcst", "torch"}
