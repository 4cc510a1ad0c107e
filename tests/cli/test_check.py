"""`accumlint check`: options, output, exit status. What is found is planted; the rehearsal has tests of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accumlint.cli import prepared, run
from accumlint.config import FORMATS
from tests.conftest import Write

Lint = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lint(project: Path, capsys: pytest.CaptureFixture[str]) -> Lint:
    """Runs a command line; returns exit status, standard output and standard error."""

    def ran(*arguments: str) -> tuple[int, str, str]:
        status = run(list(arguments))
        out, err = capsys.readouterr()
        return status, out, err

    return ran


@pytest.fixture
def concise(lint: Lint) -> Callable[..., list[str]]:
    """The findings of a command line, as `path:line CODE`."""

    def listed(*arguments: str) -> list[str]:
        _, out, _ = lint("check", "--output-format", "json", *arguments)
        return [f"{os.path.relpath(each['filename'])}:{each['location']['row']} {each['code']}" for each in json.loads(out)]

    return listed


def test_formats_are_those_of_the_reports() -> None:
    from accumlint import report

    assert FORMATS == report.FORMATS


def test_an_error_fails(plant: Write, lint: Lint) -> None:
    plant("src/train.py", "ACC301")
    status, out, err = lint("src", "--output-format", "concise")
    assert status == 1
    assert out.splitlines()[0] == "src/train.py:3:5: ACC301 error planted ACC301"
    assert err == ""


def test_nothing_found(plant: Write, lint: Lint) -> None:
    plant("train.py")
    assert lint(".") == (0, "Nothing found.\n", "")
    assert lint() == (0, "Nothing found.\n", ""), "no path means the current folder"
    assert lint(".", "-q") == (0, "", "")


def test_warnings_fail_only_beyond_their_limit(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC202")
    plant("b.py", "ACC202")
    assert lint(".")[0] == 0
    assert lint(".", "--max-warnings", "2")[0] == 0
    assert lint(".", "--max-warnings", "1")[0] == 1
    plant("accumlint.toml")
    Path("accumlint.toml").write_text("max-warnings = 0\n")
    assert lint(".")[0] == 1
    assert lint(".", "--exit-zero")[0] == 0


def test_selection(plant: Write, concise: Callable[..., list[str]]) -> None:
    plant("a.py", "ACC301")
    plant("b.py", "ACC202")
    assert concise(".") == ["a.py:3 ACC301", "b.py:3 ACC202"]
    assert concise(".", "--select", "ACC3") == ["a.py:3 ACC301"]
    assert concise(".", "--select", "ACC1,unnormalised-accumulation") == ["b.py:3 ACC202"]
    assert concise(".", "--ignore", "ACC3") == ["b.py:3 ACC202"]
    assert concise(".", "--select", "ACC1", "--extend-select", "ACC301") == ["a.py:3 ACC301"]
    assert concise(".", "--per-file-ignores", "a.py:ACC3,!a.py:ACC2") == []
    assert concise(".", "--min-severity", "error") == ["a.py:3 ACC301"]


def test_confidence(plant: Write, concise: Callable[..., list[str]]) -> None:
    plant("a.py", "ACC301 medium")
    assert concise(".") == []
    assert concise(".", "--min-confidence", "medium") == ["a.py:3 ACC301"]


def test_severity_of_the_configuration(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC202")
    assert lint(".", "--config", 'severity.ACC202 = "error"')[0] == 1
    assert lint(".", "--config", 'severity.unnormalised-accumulation = "info"') == (0, "Nothing found.\n", "")


def test_configuration_files(plant: Write, write: Write, concise: Callable[..., list[str]]) -> None:
    plant("a.py", "ACC301")
    plant("inner/b.py", "ACC301")
    write("inner/accumlint.toml", 'ignore = ["ACC301"]\n')
    write("other.toml", 'ignore = ["ACC3"]\n')
    assert concise(".") == ["a.py:3 ACC301"]
    assert concise(".", "--isolated") == ["a.py:3 ACC301", "inner/b.py:3 ACC301"]
    assert concise(".", "--config", "other.toml") == []
    assert concise(".", "--config", 'ignore = ["ACC3"]') == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--select", "ACC302x"], "`select`: no rule is called `ACC302x`, did you mean `ACC302`?"),
        (["--slect", "ACC3"], "No such option '--slect'."),
        (["--config", "nowhere.toml"], "nowhere.toml: cannot be read: No such file or directory"),
        (["--config", "what"], "--config 'what' is neither a file nor a setting"),
        (["--config", "maxwarnings = 1"], "unknown key `maxwarnings`, did you mean `max-warnings`?"),
        (["--config", "a = = b"], "not valid TOML"),
        (["--per-file-ignores", "a.py"], "write GLOB:CODE"),
        (["--output-format", "xml"], "'xml' is not one of"),
        (["-", "a.py"], "cannot stand beside other paths"),
        (["--jobs", "0"], "0 is not in the range"),
    ],
)
def test_bad_usage_is_one_line_and_2(write: Write, lint: Lint, arguments: list[str], said: str) -> None:
    write("a.py")
    status, out, err = lint(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("accumlint: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_path_that_cannot_be_read_is_2_and_the_rest_is_linted(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC301")
    status, out, err = lint("nowhere.py", "a.py", "--output-format", "concise")
    assert status == 2
    assert "a.py:3:5: ACC301" in out
    assert err == "accumlint: nowhere.py: no such file or folder\n"
    assert lint("nowhere.py")[1] == "", "nothing was read, so nothing is said to be clean"


def test_control_characters_of_a_path_do_not_reach_the_terminal(lint: Lint) -> None:
    assert "\x1b" not in lint("\x1b[31mx.py")[2]


def test_statistics(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC301")
    plant("b.py", "ACC202")
    plant("c.py", "ACC202")
    assert lint(".", "--statistics")[1] == "2  ACC202  unnormalised-accumulation\n1  ACC301  step-per-micro-batch\n"
    counted = json.loads(lint(".", "--statistics", "--output-format", "json")[1])
    assert counted[1] == {"code": "ACC301", "name": "step-per-micro-batch", "count": 1}


def test_into_a_file(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC301")
    assert lint(".", "--output-format", "concise", "-o", "report.txt", "--color", "always") == (1, "", "")
    assert Path("report.txt").read_text().startswith("a.py:3:5: ACC301 error")
    status, _, err = lint(".", "-o", "no/such/folder/x")
    assert status == 2
    assert "cannot be written" in err


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_with_and_without_findings(plant: Write, lint: Lint, name: str) -> None:
    plant("a.py", "ACC301")
    assert lint(".", "--output-format", name)[0] == 1
    plant("a.py")
    status, out, err = lint(".", "--output-format", name)
    assert (status, err) == (0, "")
    if name in {"json", "sarif"}:
        json.loads(out)


def test_quiet_leaves_the_summary_out(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC301")
    assert lint(".", "-q", "--output-format", "concise")[1] == "a.py:3:5: ACC301 error planted ACC301\n"


def test_colour(plant: Write, lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("a.py", "ACC301")
    assert "\x1b" not in lint(".")[1]
    assert "\x1b" in lint(".", "--color", "always")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in lint(".")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in lint(".")[1]


def test_standard_input(plant: Write, lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    data = plant("a.py", "ACC301").read_bytes()

    def given() -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    given()
    assert lint("-", "--output-format", "concise")[:2] == (1, "-:3:5: ACC301 error planted ACC301\nFound 1 error in 1 file.\n")
    given()
    assert "sub/b.py:3:5: ACC301" in lint("-", "--stdin-filename", "sub/b.py", "--output-format", "concise")[1]
    given()
    assert lint("-", "--stdin-filename", "build/b.py", "--force-exclude") == (0, "", "")
    given()
    assert lint("-", "--stdin-filename", "b.py", "--per-file-ignores", "b.py:ACC3")[0] == 0


def test_standard_input_is_what_is_shown(plant: Write, write: Write, lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    data = plant("a.py", "ACC301").read_bytes()
    write("a.py", "other content on the disk")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert "3 |     loss.backward()" in lint("-", "--stdin-filename", "a.py")[1]


def test_suppressions(plant: Write, concise: Callable[..., list[str]], lint: Lint) -> None:
    plant("a.py", "ACC301", "  # noqa: ACC301")
    assert concise(".") == []
    assert concise(".", "--ignore-noqa") == ["a.py:3 ACC301"]
    assert "1 finding suppressed" in lint(".", "-v")[2]


def test_unused_suppressions(plant: Write, concise: Callable[..., list[str]], lint: Lint) -> None:
    plant("a.py", extra="  # noqa: ACC301")
    assert concise(".") == ["a.py:3 ACC001"]
    assert lint(".")[0] == 0, "a warning"
    assert concise(".", "--ignore", "ACC301") == [], "the rule is off"
    assert concise(".", "--select", "ACC3") == [], "ACC001 is off"
    assert concise(".", "--ignore-noqa") == []
    plant("a.py", extra="  # noqa: ACC301, ACC001")
    assert concise(".") == []
    plant("a.py", extra="  # noqa: ACC301  # gave up")
    assert concise(".") == [], "the loop could not be followed"
    plant("a.py", "ACC301 medium", "  # noqa: ACC301")
    assert concise(".") == [], "it suppresses something, though not at this confidence"


def test_unused_suppressions_in_files_without_training_words(write: Write, concise: Callable[..., list[str]]) -> None:
    write("a.py", "x = 1  # accumlint: ignore[ACC301]\n")
    write("b.py", "x = '# accumlint: ignore[ACC301]'\n")
    assert concise(".") == ["a.py:1 ACC001"]


def test_add_ignore(plant: Write, lint: Lint) -> None:
    path = plant("a.py", "ACC301")
    plant("b.py", "ACC202")
    assert lint(".", "--add-ignore=looked at") == (0, "Added 2 suppressions in 2 files.\n", "")
    assert "# plant: ACC301  # accumlint: ignore[ACC301] looked at\n" in path.read_text()
    assert lint(".") == (0, "Nothing found.\n", "")


def test_add_ignore_keeps_mode_and_link(plant: Write, lint: Lint, project: Path) -> None:
    path = plant("real/a.py", "ACC301")
    path.chmod(0o755)
    (project / "link.py").symlink_to(path)
    assert lint("link.py", "--add-ignore")[0] == 0
    assert (project / "link.py").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o755
    assert "accumlint: ignore" in path.read_text()
    assert sorted(each.name for each in path.parent.iterdir()) == ["a.py"]


def test_add_ignore_without_a_reason_takes_no_path_for_one(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC301")
    assert lint("--add-ignore", "a.py")[1] == "Added 1 suppression in 1 file.\n"
    assert prepared(["--add-ignore", "--", "--add-ignore"]) == ["check", "--add-ignore=", "--", "--add-ignore"]


def test_show_files_and_settings(plant: Write, lint: Lint) -> None:
    plant("a.py", "ACC301")
    plant("build/b.py")
    assert lint("--show-files") == (0, "a.py\n", "")
    status, out, _ = lint("--show-settings", "--select", "ACC3")
    assert status == 0
    assert 'select = ["ACC3"]' in out


def test_the_cache_gives_the_same_answer(plant: Write, lint: Lint) -> None:
    path = plant("a.py", "ACC301")
    os.utime(path, ns=(10**18, 10**18))
    first = lint(".", "--output-format", "json")
    assert first == lint(".", "--output-format", "json")
    assert "1 of them known from the cache" in lint(".", "-v")[2]
    assert "0 of them known from the cache" in lint(".", "-v", "--no-cache")[2]
    os.utime(path, ns=(11 * 10**17, 11 * 10**17))
    assert "1 of them known from the cache" in lint(".", "-v")[2], "the content did not change"
    plant("a.py")
    assert lint(".")[1] == "Nothing found.\n"


def test_files_are_found_by_the_wrappers_of_the_project(write: Write, concise: Callable[..., list[str]]) -> None:
    body = ("loss = criterion(model(x), y) / accum", "scaler(loss, optimizer)", "optimizer.zero_grad()")
    loop = "for x, y in loader:\n" + "".join(f"        {line}\n" for line in body)
    write("train.py", f"from lib import Scaler\n\ndef train(model, loader, optimizer, accum):\n    scaler = Scaler()\n    {loop}")
    assert concise(".") == []
    write("accumlint.toml", '[wrappers]\n"lib.Scaler.__call__" = ["backward", "unscale", "step", "update"]\n')
    for _ in range(2):  # what the cache says without the wrappers does not hold with them
        assert concise(".") == ["train.py:7 ACC301"]


def test_a_result_rests_on_the_versions_that_the_project_allows(plant: Write, write: Write, lint: Lint) -> None:
    plant("pkg/a.py", "ACC301")
    write(".git/HEAD", "")
    write("requirements.txt", "transformers<4.46\n")
    lint(".")
    assert "1 of them known from the cache" in lint(".", "-v")[2]
    write("requirements.txt", "transformers>=4.46\n")
    assert "0 of them known from the cache" in lint(".", "-v")[2]


def test_where_the_cache_lies(plant: Write, lint: Lint) -> None:
    plant("sub/a.py")
    lint("sub")
    assert Path(".accumlint_cache/.gitignore").is_file()
    lint("sub", "--cache-dir", "elsewhere")
    assert Path("elsewhere/index.json").is_file()
    assert lint("sub", "--no-cache", "--cache-dir", "never")[0] == 0
    assert not Path("never").exists()


def test_from_another_folder_the_cache_shows_other_names(plant: Write, write: Write, lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    write("accumlint.toml", "")
    os.utime(plant("sub/a.py", "ACC301"), ns=(10**18, 10**18))
    assert lint(".", "--output-format", "concise")[1].startswith("sub/a.py:3")
    monkeypatch.chdir("sub")
    assert lint(".", "--output-format", "concise")[1].startswith("a.py:3")
    assert "1 of them known" in lint(".", "-v")[2]


def test_a_damaged_cache_costs_time_only(plant: Write, lint: Lint) -> None:
    os.utime(plant("a.py", "ACC301"), ns=(10**18, 10**18))
    first = lint(".", "--output-format", "json")
    for path in Path(".accumlint_cache").glob("*.json"):
        if path.name != "index.json":
            path.write_text('{"findings": {"table": [["Finding", {}]], "findings": []}, "suppressions": [], "gave_up": 1, "warnings": []}')
    assert lint(".", "--output-format", "json") == first


def test_a_named_file_is_parsed_whatever_it_holds(write: Write, concise: Callable[..., list[str]]) -> None:
    os.utime(write("bad.py", "def f(:\n"), ns=(10**18, 10**18))
    for _ in range(2):  # cold, then from the cache
        assert concise(".") == []
        assert concise("bad.py") == ["bad.py:1 ACC000"]


def test_unreadable_content_is_said_of_every_file(write: Write, concise: Callable[..., list[str]]) -> None:
    write("latin.py", b"# coding: latin-1\nx = '\xe9'\n")
    write("not_utf8.py", b"x = 1\ny = '\xe9'\n")
    write("null.py", b"x = '\0'\n")
    write("empty.py", b"")
    write("bom.py", b"\xef\xbb\xbfx = 1\r\n")
    assert concise(".") == ["not_utf8.py:2 ACC000", "null.py:1 ACC000"]


def test_several_processes_find_the_same(plant: Write, concise: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accumlint.linter.WORTH_A_WORKER", 1)
    for number in range(9):
        plant(f"f{number}.py", "ACC301" if number % 2 else "ACC202")
    alone = concise(".", "--no-cache", "--jobs", "1")
    assert len(alone) == 9
    assert concise(".", "--no-cache", "--jobs", "3") == alone


def test_a_dying_worker_costs_one_file(plant: Write, concise: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accumlint.linter.WORTH_A_WORKER", 1)
    plant("a.py", "ACC301")
    plant("b.py", extra="  # raise: death")
    plant("c.py", "ACC301")
    for _ in range(2):  # cold, then from the cache: alone, the file would be read in this process
        assert concise(".", "--jobs", "2") == ["a.py:3 ACC301", "b.py:1 ACC000", "c.py:3 ACC301"]


def test_a_file_takes_no_longer_than_its_limit(plant: Write, lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accumlint.linter.SECONDS", 0.2)
    plant("a.py", "ACC301", "  # raise: time")
    plant("b.py", "ACC301")
    status, out, err = lint(".", "--output-format", "concise", "--jobs", "1")
    assert status == 1
    assert "a.py:3:5" in out
    assert "b.py:3:5" in out
    assert err == "accumlint: a.py: gave up after 0.2 seconds; findings may be missing\n"


def test_a_bug_costs_one_file(plant: Write, write: Write, lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("a.py", "ACC301")
    monkeypatch.undo()
    monkeypatch.chdir(write("b.py").parent)

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("accumlint.looking.rehearsals", broken)
    status, _, err = lint(".", "--no-cache")
    assert status == 0
    assert "internal error, please report it: ZeroDivisionError: oh (test_check.py:" in err


def test_no_traceback_ever(lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr("accumlint.cli.check.run_check", broken)
    status, _, err = lint(".")
    assert status == 2
    assert err.startswith("accumlint: error: internal error: ZeroDivisionError: oh no")
    monkeypatch.setattr("accumlint.cli.check.run_check", lambda options: (_ for _ in ()).throw(KeyboardInterrupt))
    status, out, err = lint(".")
    assert (status, out, err.strip()) == (130, "", "")


def test_no_files(write: Write, lint: Lint) -> None:
    write("notes.txt", "x")
    assert lint(".") == (0, "", "accumlint: no Python files under .\n")


def test_version_and_help(lint: Lint) -> None:
    assert lint("--version")[1].startswith("accumlint ")
    assert "check" in lint("--help")[1]
    assert "--select" in lint("check", "--help")[1]


def test_a_folder_that_is_called_like_a_command(plant: Write, lint: Lint) -> None:
    plant("rule/a.py", "ACC301")
    assert lint("check", "rule")[0] == 1
    assert lint("./rule")[0] == 1
    status, _, err = lint("rule")
    assert status == 2
    assert "To lint the folder of this name: accumlint check rule" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_no_internal_error() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run([sys.executable, "-m", "accumlint", "rule", "ACC101"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 2
    assert ended.stderr.decode() == "accumlint: error: the output cannot be written: no space is left.\n"


def test_where_nothing_is_found_there_is_nothing_to_suppress(plant: Write, lint: Lint) -> None:
    plant("a.py")
    assert lint("--add-ignore", "a.py") == (0, "Nothing to suppress.\n", "")
