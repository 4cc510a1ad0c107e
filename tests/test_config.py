"""Settings: where they come from, what overrides what, and what is said of a mistake in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint import config
from accumlint.config import ConfigError, Configuration, Selection, Settings, check_selector, described, known_rules, nearest, read_toml
from accumlint.rule import catalogue
from tests.conftest import Write


def test_the_names_of_rule_files_are_the_catalogue() -> None:
    assert known_rules() == {code: rule.name for code, rule in catalogue().items()}


def test_every_key_is_read(write: Write, project: Path) -> None:
    write(
        "pyproject.toml",
        """
        [tool.accumlint]
        select = ["ACC2", "ACC001"]
        extend-select = ["ACC000"]
        ignore = ["acc201"]
        exclude = ["old"]
        extend-exclude = ["gen/*.py"]
        src = ["lib"]
        max-warnings = 3
        objective = "sequence"
        accumulation-names = ["inner"]
        output-format = "concise"
        cache-dir = "tmp/cache"
        [tool.accumlint.per-file-ignores]
        "tests/*" = ["ALL"]
        [tool.accumlint.wrappers]
        "lib.Scaler.__call__" = ["backward", "clip", "step"]
        [tool.accumlint.severity]
        ACC202 = "error"
        """,
    )
    settings = nearest(str(project))
    assert settings.selection == Selection(("ACC2", "ACC001"), ("ACC000",), ("ACC201",))
    assert settings.excluded == ("old", "gen/*.py")
    assert settings.source_roots == (str(project / "lib"),)
    assert settings.max_warnings == 3
    assert settings.objective == "sequence"
    assert settings.accumulation_names == ("inner",)
    assert settings.output_format == "concise"
    assert settings.cache_dir == "tmp/cache"
    assert settings.per_file_ignores == (("tests/*", ("ALL",)),)
    assert settings.wrappers == (("lib.Scaler.__call__", ("backward", "clip", "step")),)
    assert settings.severities() == {"ACC202": "error"}
    assert set(config._READERS) == set(
        "select extend-select ignore per-file-ignores exclude extend-exclude src max-warnings objective accumulation-names "
        "wrappers severity output-format cache-dir".split()
    )


def test_the_nearest_file_wins_and_nothing_is_merged(write: Write, project: Path) -> None:
    write("pyproject.toml", '[tool.accumlint]\nignore = ["ACC202"]\nmax-warnings = 1\n')
    write("inner/accumlint.toml", "max-warnings = 2\n")
    write("inner/deep/pyproject.toml", "[tool.ruff]\nline-length = 100\n")
    settings = nearest(str(project / "inner" / "deep"))
    assert settings.max_warnings == 2
    assert settings.selection == Selection()
    assert settings.root == str(project / "inner")


def test_accumlint_toml_goes_before_pyproject(write: Write, project: Path) -> None:
    write("pyproject.toml", "[tool.accumlint]\nmax-warnings = 1\n")
    write("accumlint.toml", "max-warnings = 2\n")
    assert nearest(str(project)).max_warnings == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('slect = ["ACC1"]', "accumlint.toml: unknown key `slect`, did you mean `select`?"),
        ('select = ["ACC208x"]', "accumlint.toml: `select`: no rule is called `ACC208x`, did you mean `ACC208`?"),
        ('select = ["mean-of-mean"]', "no rule is called `mean-of-mean`, did you mean `mean-of-means`?"),
        ('select = "ACC1"', "`select` must be a list of strings, not a string"),
        ("select = [1]", "`select` must hold nothing but strings, not a number"),
        ('max-warnings = "3"', "`max-warnings` must be a whole number, 0 or more"),
        ("max-warnings = true", "`max-warnings` must be a whole number, 0 or more"),
        ('objective = "tokens"', "`objective` is `tokens`, did you mean `token`?"),
        ('output-format = "xml"', "`output-format` is `xml`; known are `concise`"),
        ('[severity]\nACC202 = "fatal"', "`severity` of ACC202 is `fatal`; known are `error`, `info`, `warning`"),
        ('[severity]\nACC2 = "error"', "`severity` takes whole codes, not `ACC2`"),
        ('[wrappers]\n"a.b" = ["backwards"]', "did you mean `backward`?"),
        ('[wrappers]\n"a.b" = ["no-sync"]', "`wrappers` a.b is `no-sync`, did you mean `no_sync`?"),
        ('[wrappers]\n"a.b" = ["fly"]', "known are `accumulate`, `average`, `backward`, `clip`, `divide`"),
        ('[wrappers]\n"a.b()" = ["step"]', '`wrappers`: `a.b()` is no dotted name such as "mylib.amp.Scaler.__call__"'),
        ('[wrappers]\n"a.b" = "step"', "`wrappers` a.b must be a list of strings, not a string"),
        ('per-file-ignores = ["x"]', "`per-file-ignores` must be a table, not a list"),
        ("select = [", "accumlint.toml: not valid TOML"),
    ],
)
def test_mistakes_are_named_with_the_nearest_valid_word(write: Write, project: Path, line: str, said: str) -> None:
    write("accumlint.toml", line + "\n")
    with pytest.raises(ConfigError) as caught:
        nearest(str(project))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value).split("not valid TOML")[0]


def test_not_utf8(write: Write, project: Path) -> None:
    write("accumlint.toml", b"src = ['\xff']")
    with pytest.raises(ConfigError, match="not UTF-8"):
        nearest(str(project))


def test_selectors_are_canonical() -> None:
    assert check_selector("acc2", "x") == "ACC2"
    assert check_selector("All", "x") == "ALL"
    assert check_selector("Mean-Of-Means", "x") == "mean-of-means"


@pytest.mark.parametrize(
    ("selection", "code", "by_default", "on"),
    [
        (Selection(), "ACC202", True, True),
        (Selection(), "ACC210", False, False),
        (Selection(("ACC2",)), "ACC210", False, True),
        (Selection(("ACC2",)), "ACC301", True, False),
        (Selection(extend_select=("ACC210",)), "ACC210", False, True),
        (Selection(extend_select=("ACC210",)), "ACC301", True, True),
        (Selection(ignore=("ACC2",)), "ACC202", True, False),
        (Selection(("ACC202",), ignore=("ACC2",)), "ACC202", True, True),
        (Selection(("ACC2",), ignore=("ACC202",)), "ACC202", True, False),
        (Selection(("ACC202",), ignore=("ACC202",)), "ACC202", True, False),
        (Selection(("ALL",), ignore=("mean-of-means",)), "ACC201", True, False),
        (Selection(("mean-of-means",)), "ACC201", True, True),
        (Selection(ignore=("ALL",)), "ACC201", True, False),
    ],
)
def test_the_more_specific_selector_wins(selection: Selection, code: str, by_default: bool, on: bool) -> None:
    assert selection.enabled(code, by_default=by_default) is on


def test_a_select_on_top_starts_anew() -> None:
    below = Settings().with_table({"select": ["ACC1"], "ignore": ["ACC202"]}, "file")
    assert below.with_table({"select": ["ACC2"]}, "command line").selection == Selection(("ACC2",))
    assert below.with_table({"ignore": ["ACC203"]}, "command line").selection == Selection(("ACC1",), (), ("ACC202", "ACC203"))


def test_what_is_on_top_holds_in_every_folder(write: Write, project: Path) -> None:
    write("a/accumlint.toml", "max-warnings = 2\nobjective = 'sample'\n")
    configuration = Configuration(lambda settings: settings.with_table({"max-warnings": 5}, "command line"))
    settings = configuration.of(str(project / "a"))
    assert (settings.max_warnings, settings.objective) == (5, "sample")
    assert configuration.of(str(project)).max_warnings == 5


def test_described_settings_are_a_configuration(write: Write, project: Path) -> None:
    write("accumlint.toml", 'select = ["ACC2"]\nmax-warnings = 2\n[per-file-ignores]\n"a/*" = ["ACC201"]\n[severity]\nACC202 = "error"\n')
    settings = nearest(str(project))
    again = Settings(settings.root, settings.origin).with_table(read_toml(described(settings).encode(), "again"), "again")
    assert again == settings
