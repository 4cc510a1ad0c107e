"""Where the imports of a project lead: to its own files, and never out of it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from accumlint.source.reading.imports import Imports
from accumlint.source.reading.leads import Leads
from accumlint.source.reading.library import Definition, Library

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Makes files (empty, or with a text), below a folder that marks a project."""

    def made(*names: str, **texts: str) -> Path:
        root = tmp_path / "project"
        root.mkdir(exist_ok=True)
        (root / "pyproject.toml").write_text("")
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        for name, text in texts.items():
            (root / f"{name}.py").write_text(text, encoding="utf-8")
        return root

    return made


def found(root: Path, path: str, dotted: str, level: int = 0, configured: tuple[str, ...] = ()) -> str | None:
    """What a module is that `path` imports, relative to the root."""
    answer = Imports([str(root / each) for each in configured]).module(str(root / path), dotted, level)
    if answer is None:
        return None
    return Path(answer).relative_to(root).as_posix() + ("/" if answer.endswith("/") else "")


@pytest.mark.parametrize(
    ("path", "dotted", "expected"),
    [
        ("train.py", "engine", "engine.py"),
        ("tools/run.py", "engine", "engine.py"),  # a script below the root, started from there
        ("tools/run.py", "helper", "tools/helper.py"),  # its own folder comes first
        ("train.py", "helper", None),
        ("train.py", "kit", "src/kit/__init__.py"),
        ("src/kit/loop.py", "kit.optim", "src/kit/optim.py"),
        ("train.py", "spaces.inner.part", "spaces/inner/part.py"),  # packages without `__init__.py`
        ("train.py", "spaces.inner", "spaces/inner/"),
        ("train.py", "torch.nn", None),
        ("train.py", "engine.part", None),  # a module is no package
    ],
)
def test_absolute_imports(tree: Tree, path: str, dotted: str, expected: str | None) -> None:
    root = tree(
        "train.py", "engine.py", "tools/run.py", "tools/helper.py", "src/kit/__init__.py", "src/kit/optim.py", "spaces/inner/part.py"
    )
    assert found(root, path, dotted) == expected


@pytest.mark.parametrize(
    ("path", "dotted", "level", "expected"),
    [
        ("kit/loop.py", "optim", 1, "kit/optim.py"),
        ("kit/loop.py", "", 1, "kit/__init__.py"),
        ("kit/inner/part.py", "optim", 2, "kit/optim.py"),
        ("kit/inner/part.py", "", 2, "kit/__init__.py"),
        ("kit/loop.py", "inner.part", 1, "kit/inner/part.py"),
        ("kit/loop.py", "train", 1, None),  # not below the package
        ("kit/loop.py", "train", 2, "train.py"),
        ("kit/loop.py", "outside", 3, None),  # above the root
        ("train.py", "outside", 2, None),
    ],
)
def test_relative_imports(tree: Tree, path: str, dotted: str, level: int, expected: str | None) -> None:
    root = tree("train.py", "kit/__init__.py", "kit/loop.py", "kit/optim.py", "kit/inner/__init__.py", "kit/inner/part.py")
    (root.parent / "outside.py").touch()
    assert found(root, path, dotted, level) == expected


def test_configured_roots_count_inside_of_the_project_only(tree: Tree) -> None:
    root = tree("train.py", "libs/parts/engine.py")
    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere" / "engine.py").touch()
    assert found(root, "train.py", "engine") is None
    assert found(root, "train.py", "engine", configured=("libs/parts",)) == "libs/parts/engine.py"
    assert found(root, "train.py", "engine", configured=("../elsewhere",)) is None


def test_a_package_goes_before_a_module_and_a_folder_after_it(tree: Tree) -> None:
    root = tree("train.py", "one.py", "one/__init__.py", "two.py", "two/part.py")
    assert found(root, "train.py", "one") == "one/__init__.py"
    assert found(root, "train.py", "two") == "two.py"


def test_a_module_of_a_later_root_goes_before_a_bare_folder_of_an_earlier_one(tree: Tree) -> None:
    root = tree("tools/run.py", "tools/engine/notes.txt", "engine.py")
    assert found(root, "tools/run.py", "engine") == "engine.py"


def test_what_a_folder_without_a_mark_of_a_project_reaches(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    for name in ("kit/__init__.py", "kit/loop.py", "engine.py"):
        (tmp_path / name).touch()
    imports = Imports()
    if imports.folders.root(str(tmp_path)) != str(tmp_path):
        pytest.skip("the folder for temporary files lies in a project")
    assert imports.module(str(tmp_path / "kit" / "loop.py"), "engine") == str(tmp_path / "engine.py")


def test_answers_name_the_folders_that_they_rest_on_every_time(tree: Tree) -> None:
    root = tree("train.py", "src/kit/__init__.py", "src/kit/optim.py")
    imports = Imports()
    for _ in range(2):
        imports.asked.clear()
        assert imports.module(str(root / "train.py"), "kit.optim") == str(root / "src" / "kit" / "optim.py")
        assert imports.asked >= {str(root), str(root / "src"), str(root / "src" / "kit")}


# Names, through the modules that pass them on.


def meant(root: Path, statement: str, path: str = "train.py") -> Definition | None:
    """What the first name of an import statement is."""
    node = ast.parse(statement).body[0]
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    library = Library(Leads(Imports()))
    (root / path).write_text(statement)
    outline = library.outline(str(root / path))
    assert outline is not None
    answer = library.target(outline, node, node.names[0])
    if answer is None or not answer.path:
        return answer
    return Definition(Path(answer.path).relative_to(root).as_posix(), answer.name)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("from engine import fit", Definition("engine.py", "fit")),
        ("from facade import fit", Definition("engine.py", "fit")),
        ("from facade import learn", Definition("engine.py", "fit")),  # under another name
        ("from everything import fit", Definition("engine.py", "fit")),  # through a star
        ("from twice import fit", Definition("engine.py", "fit")),  # through two
        ("import engine", Definition("engine.py")),
        ("import engine as parts", Definition("engine.py")),
        ("from facade import parts", Definition("engine.py")),  # a module passed on
        ("from kit import loop", Definition("kit/loop.py")),
        ("import kit.loop", Definition("kit/__init__.py")),
        ("from facade import Adam", Definition(dotted="torch.optim.Adam")),
        ("from facade import nothing", None),
        ("from ring import spin", None),  # two modules that ask each other
        ("from torch.optim import Adam", Definition(dotted="torch.optim.Adam")),
        ("from choice import fit", Definition("engine.py", "fit")),  # of alternatives the one that is tried first
    ],
)
def test_names(tree: Tree, statement: str, expected: Definition | None) -> None:
    root = tree(
        "kit/__init__.py",
        "kit/loop.py",
        engine="def fit():\n    pass\n",
        facade="import engine as parts\nfrom engine import fit\nfrom engine import fit as learn\nfrom torch.optim import Adam\n",
        everything="from engine import *\n",
        twice="from everything import *\n",
        ring="from gnir import spin\n",
        gnir="from ring import spin\n",
        choice="try:\n    from engine import fit\nexcept ImportError:\n    from facade import Adam as fit\n",
    )
    assert meant(root, statement) == expected


def test_a_package_without_init_is_found_from_inside_where_nothing_marks_the_root(tmp_path: Path) -> None:
    for name in ("work/seq/train/trainer.py", "work/seq/train/parts.py", "work/seq/data.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    imports = Imports()
    assert imports.module(str(tmp_path / "work/seq/train/trainer.py"), "seq.train.parts") == str(tmp_path / "work/seq/train/parts.py")
    assert imports.module(str(tmp_path / "work/seq/train/trainer.py"), "seq.data") == str(tmp_path / "work/seq/data.py")
    assert imports.module(str(tmp_path / "work/seq/train/trainer.py"), "other.data") is None


@pytest.mark.parametrize(("package", "followed"), [("torch", False), ("torchlike", True)])
def test_the_files_of_torch_itself_are_not_followed(tmp_path: Path, package: str, followed: bool) -> None:
    folder = tmp_path / package / "optim"
    folder.mkdir(parents=True)
    for path in (tmp_path / package / "__init__.py", folder / "__init__.py", folder / "adam.py", folder / "sgd.py"):
        path.write_text("")
    imports = Imports()
    for dotted, level in ((f"{package}.optim.sgd", 0), ("sgd", 1), ("optim.sgd", 2)):
        found = imports.module(str(folder / "adam.py"), dotted, level)
        assert (found == str(folder / "sgd.py")) is followed
        assert (found is None) is not followed
