"""Which versions of a framework a project allows, and where that is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accumlint.source.reading.specifiers import NEWEST, OLDEST, Range, allowed, requirement, version
from accumlint.source.reading.versions import Allowed
from accumlint.source.reading.versions import allowed as asked
from tests.conftest import Write

Ask = Callable[..., Allowed]


@pytest.mark.parametrize(
    ("specifier", "oldest", "newest"),
    [
        ("", OLDEST, NEWEST),
        ("*", OLDEST, NEWEST),
        ("!=4.50", OLDEST, NEWEST),
        ("==4.46.1", (4, 46, 1), (4, 46, 1)),
        ("===4.46.1", (4, 46, 1), (4, 46, 1)),
        ("4.46.1", (4, 46, 1), (4, 46, 1)),
        ("==4.46.*", (4, 46, 0), (4, 46, 9999)),
        ("=4.46", (4, 46, 0), (4, 46, 9999)),
        (">=4.40,<4.46", (4, 40, 0), (4, 45, 9999)),
        (">= 4.40, < 4.46.0", (4, 40, 0), (4, 45, 9999)),
        (">=4.40 <4.46", (4, 40, 0), (4, 45, 9999)),
        ("(>=4.40,<4.46)", (4, 40, 0), (4, 45, 9999)),
        ("<=4.46.2,!=4.45.1", OLDEST, (4, 46, 2)),
        ("<4.46.2", OLDEST, (4, 46, 1)),
        ("<5", OLDEST, (4, 9999)),
        ("<1.0.0", OLDEST, (0, 9999)),
        (">2.0", (2, 0, 0), NEWEST),
        ("~=4.46", (4, 46, 0), (4, 9999)),
        ("~=4.46.1", (4, 46, 1), (4, 46, 9999)),
        ("~4.46.1", (4, 46, 1), (4, 46, 9999)),
        ("~4", (4, 0, 0), (4, 9999)),
        ("^4.46.1", (4, 46, 1), (4, 9999)),
        ("^0.34.2", (0, 34, 2), (0, 34, 9999)),
        ("^0.0.3", (0, 0, 3), (0, 0, 3)),
        ("^4.40 || ^5.1", (4, 40, 0), (5, 9999)),
        (">=1.13,<2|>=2.1", (1, 13, 0), NEWEST),
        (">=4.47.0.dev0", (4, 47, 0), NEWEST),
        ("==2.4.0+cu121", (2, 4, 0), (2, 4, 0)),
        ("=2.4.1=py3.11_cuda12.1", (2, 4, 1), (2, 4, 1)),
        ("@ git+https://example.org/x/transformers.git@v4.46.1", (4, 46, 1), (4, 46, 1)),
        ("@ git+https://example.org/x/transformers.git@main", OLDEST, NEWEST),
        ("@ https://example.org/transformers-4.46.1-py3-none-any.whl", (4, 46, 1), (4, 46, 1)),
        ("what is this", OLDEST, NEWEST),
    ],
)
def test_specifiers(specifier: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> None:
    assert allowed(specifier) == Range(oldest, newest)


def test_the_newest_below_a_release_is_older_than_it() -> None:
    for text in ("4.46", "4.46.0", "4.46.2", "5", "1.0.0"):
        assert allowed(f"<{text}").newest < version(text)


@pytest.mark.parametrize(
    ("line", "name", "oldest"),
    [
        ("transformers>=4.40  # the trainer", "transformers", (4, 40, 0)),
        ("pytorch_lightning == 2.1.0 ; python_version > '3.8'", "pytorch-lightning", (2, 1, 0)),
        ("transformers[torch, sentencepiece]~=4.41", "transformers", (4, 41, 0)),
        ("accelerate==1.2.0 --hash=sha256:00 --hash=sha256:11", "accelerate", (1, 2, 0)),
        ("conda-forge::accelerate=1.2", "accelerate", (1, 2, 0)),
        ("torch", "torch", OLDEST),
    ],
)
def test_requirements(line: str, name: str, oldest: tuple[int, ...]) -> None:
    found = requirement(line)
    assert found is not None
    assert (found.name, found.range.oldest) == (name, oldest)


@pytest.mark.parametrize("line", ["", "a sentence about torch", "https://example.org/x.whl", "./local", "torch two"])
def test_what_names_no_distribution(line: str) -> None:
    assert requirement(line) is None


@pytest.fixture
def ask(write: Write, project: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What is allowed of a package to a script in the folder `pkg` of a repository that holds these files."""
    monkeypatch.setattr("accumlint.source.reading.versions._installed", lambda name: "")

    def answer(package: str, **_: str) -> Allowed:
        return asked(str(project / "pkg" / "train.py"), package)

    write(".git/HEAD", "")
    write("pkg/train.py")
    return answer


@pytest.mark.parametrize("name", ["uv.lock", "poetry.lock", "pdm.lock", "pylock.toml"])
def test_lock_files(name: str, write: Write, ask: Ask) -> None:
    table = "packages" if name == "pylock.toml" else "package"
    write(
        name,
        f'version = 1\n\n[[{table}]]\nname = "accelerate"\nversion = "1.2.1"\n\n[[{table}]]\nname = "transformers"\nversion = "4.57.1"\n',
    )
    write("pyproject.toml", '[project]\ndependencies = ["transformers>=4.40"]\n')
    found = ask("transformers")
    assert (found.oldest, found.newest, found.origin) == ((4, 57, 1), (4, 57, 1), name)
    assert ask("accelerate").newest == (1, 2, 1)
    assert ask("lightning").origin == "newest"


def test_several_locked_versions(write: Write, ask: Ask) -> None:
    package = '[[package]]\nname = "torch"\nversion = "{}"\nsource = {{ registry = "r" }}\n\n'
    write("uv.lock", package.format("2.4.1") + package.format("2.6.0+cu126"))
    assert (ask("torch").oldest, ask("torch").newest) == ((2, 4, 1), (2, 6, 0))


def test_pipfile(write: Write, ask: Ask) -> None:
    write("Pipfile", '[packages]\ntransformers = ">=4.40"\ntorch = "*"\n')
    assert ask("transformers").oldest == (4, 40, 0)


def test_pipfile_lock(write: Write, ask: Ask) -> None:
    write("Pipfile.lock", '{"_meta": {"hash": {}}, "default": {"transformers": {"hashes": [], "version": "==4.46.3"}}}')
    assert (ask("transformers").newest, ask("transformers").origin) == ((4, 46, 3), "Pipfile.lock")


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-gpu.txt", "requirements/base.txt", "constraints.txt"])
def test_requirements_files(name: str, write: Write, ask: Ask) -> None:
    write(name, "-r other.txt\n# transformers==1.0\ntransformers>=4.40, \\\n  <4.46\n")
    found = ask("transformers")
    assert (found.oldest, found.newest) == ((4, 40, 0), (4, 45, 9999))
    assert found.origin.startswith(f"{name}: transformers>=4.40,")
    assert not found.may_be(4, 46)
    assert found.may_be(4, 45)
    assert found.is_at_least(4, 40)
    assert not found.is_at_least(4, 41)


@pytest.mark.parametrize(
    "text",
    [
        '[project]\ndependencies = ["accelerate", "transformers >=4.41, <4.50"]\n',
        '[project]\n[project.optional-dependencies]\ntrain = ["transformers>=4.41,<4.50"]\n',
        '[dependency-groups]\ndev = [{include-group = "x"}, "transformers>=4.41,<4.50"]\n',
        '[tool.poetry.dependencies]\ntransformers = {version = ">=4.41,<4.50", extras = ["torch"]}\n',
        '[tool.poetry.group.train.dependencies]\ntransformers = [{version = ">=4.41,<4.45"}, {version = "^4.44,<4.50"}]\n',
    ],
)
def test_pyproject(text: str, write: Write, ask: Ask) -> None:
    write("pyproject.toml", text)
    found = ask("transformers")
    assert (found.oldest, found.newest) == ((4, 41, 0), (4, 49, 9999))


def test_setup_cfg(write: Write, ask: Ask) -> None:
    write(
        "setup.cfg",
        "[options]\ninstall_requires =\n    torch>=2.1\n    transformers<4.46\n[options.extras_require]\nx =\n    accelerate==1.0\n",
    )
    assert ask("torch").oldest == (2, 1, 0)
    assert ask("transformers").newest == (4, 45, 9999)
    assert ask("accelerate").newest == (1, 0, 0)


def test_setup_py_is_read_and_not_run(write: Write, ask: Ask) -> None:
    write("setup.py", 'raise SystemExit\nsetup(name="mine", install_requires=["torch>=2.1", f"x{1}"], classifiers=["Topic :: Torch"])\n')
    assert ask("torch").oldest == (2, 1, 0)


def test_conda_environment(write: Write, ask: Ask) -> None:
    write("environment.yml", "name: x\ndependencies:\n  - python=3.11\n  - pytorch::pytorch=2.4\n  - pip:\n      - transformers==4.46.0\n")
    assert (ask("torch").oldest, ask("torch").newest) == ((2, 4, 0), (2, 4, 9999))
    assert ask("transformers").newest == (4, 46, 0)


def test_the_sources_of_a_framework_are_its_newest_version(write: Write, ask: Ask) -> None:
    write("setup.py", 'setup(name="accelerate", version="1.9.0.dev0", extras_require={"test": ["accelerate"]})\n')
    assert (ask("accelerate").oldest, ask("accelerate").newest) == (NEWEST, NEWEST)


def test_the_nearest_folder_wins_and_the_repository_ends_the_search(write: Write, project: Path, ask: Ask) -> None:
    write("requirements.txt", "transformers==4.30\naccelerate==0.20\n")
    write("pkg/requirements.txt", "transformers>=4.40\n")
    assert ask("transformers").origin == "pkg/requirements.txt: transformers>=4.40".removeprefix("pkg/")
    assert ask("accelerate").newest == (0, 20, 0)
    write("inner/.git/HEAD", "")
    assert asked(str(project / "inner" / "train.py"), "accelerate").origin == "newest"


def test_a_lock_above_chooses_within_what_the_nearest_folder_allows(write: Write, ask: Ask) -> None:
    write("pkg/pyproject.toml", '[project]\ndependencies = ["transformers>=4.40", "accelerate<1"]\n')
    lock = '[[package]]\nname = "{}"\nversion = "{}"\n\n'
    write("uv.lock", lock.format("transformers", "4.57.1") + lock.format("accelerate", "1.2.0"))
    assert ask("transformers").newest == (4, 57, 1)
    assert ask("accelerate").newest == (0, 9999), "the lock is another project's"


def test_without_a_repository_the_first_project_ends_the_search(write: Write, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accumlint.source.reading.versions._installed", lambda name: "")
    write("requirements.txt", "transformers==4.30\n")
    write("a/setup.cfg", "[options]\ninstall_requires = torch>=2.1\n")
    write("a/b/train.py")
    assert asked(str(project / "a" / "b" / "train.py"), "transformers").origin == "newest"
    assert asked(str(project / "c" / "train.py"), "transformers").newest == (4, 30, 0)


def test_bounds_of_another_file_count_before_a_bare_mention(write: Write, ask: Ask) -> None:
    write("requirements.txt", "transformers\ntorch\n")
    write("setup.cfg", "[options]\ninstall_requires = transformers>=4.40\n")
    assert ask("transformers").origin == "setup.cfg: transformers>=4.40"
    found = ask("torch")
    assert (found.oldest, found.newest, found.origin) == (OLDEST, NEWEST, "requirements.txt: torch")


def test_other_names_of_the_same_package(write: Write, ask: Ask) -> None:
    write("requirements.txt", "pytorch_lightning==1.9.5\n")
    assert ask("lightning").newest == (1, 9, 5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[project\n"),
        ("pyproject.toml", 'project = 1\ntool = "x"\n'),
        ("setup.py", "def (\n"),
        ("setup.cfg", "no section\n"),
        ("Pipfile.lock", "{"),
        ("uv.lock", "\0\xff"),
        ("requirements.txt", "==1\n\x00\n[x]\n"),
    ],
)
def test_broken_files_say_nothing(name: str, text: str, write: Write, ask: Ask) -> None:
    write(name, text)
    assert ask("transformers").origin == "newest"


def test_the_installed_version_is_asked_last_and_without_an_import(write: Write, project: Path) -> None:
    write(".git/HEAD", "")
    before = set(sys.modules)
    found = asked(str(project / "train.py"), "pytest")
    assert found.origin == f"installed {pytest.__version__}"
    assert found.newest == version(pytest.__version__)
    assert not {name for name in set(sys.modules) - before if name.startswith("_pytest.")}
    assert asked(str(project / "train.py"), "no-such-distribution").newest == NEWEST


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Allowed("x", (4, 57, 1), (4, 57, 1), "uv.lock"), "4.57.1, from uv.lock"),
        (Allowed("x", (4, 57, 1), (4, 57, 1), "installed 4.57.1"), "4.57.1, installed"),
        (Allowed("x", (4, 0, 0), NEWEST, "setup.cfg: x>=4"), "as in setup.cfg: x>=4"),
        (Allowed("x", NEWEST, NEWEST, "newest"), "the newest release: neither the project nor the environment names one"),
        (Allowed("x", NEWEST, NEWEST, "setup.py: the project is x"), "as in setup.py: the project is x"),
    ],
)
def test_described(found: Allowed, text: str) -> None:
    assert found.described == text
