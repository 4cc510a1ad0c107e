"""The cache: what is trusted, and that damage costs time and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accumlint.source import cache as module
from accumlint.source.cache import Cache, Result

PAYLOAD = {"findings": None, "suppressions": [[1, 2, 3, 4, 5, ["ACC101"], "# noqa: ACC101"]]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(b"x = 1\n")
    os.utime(path, ns=(10**18, 10**18))
    return path


def opened(folder: Path) -> Cache:
    return Cache(str(folder / ".accumlint_cache"), str(folder))


def kept(folder: Path, file: Path, result: Result, settings: str = "s") -> Cache:
    """A cache, opened anew, that a result was put into."""
    cache = opened(folder)
    cache.put(str(file), file.stat(), settings, file.read_bytes(), result)
    cache.save()
    return opened(folder)


def test_a_result_is_known_by_size_and_time(tmp_path: Path, file: Path) -> None:
    cache = kept(tmp_path, file, Result(PAYLOAD))
    assert cache.fresh(str(file), file.stat(), "s") == Result(PAYLOAD)
    assert kept(tmp_path, file, Result(None)).fresh(str(file), file.stat(), "s") == Result(None)


def test_a_result_is_known_by_content_when_the_time_changed(tmp_path: Path, file: Path) -> None:
    cache = kept(tmp_path, file, Result(PAYLOAD))
    os.utime(file, ns=(11 * 10**17, 11 * 10**17))
    assert cache.fresh(str(file), file.stat(), "s") is None
    assert cache.same(str(file), file.stat(), "s", file.read_bytes()) == Result(PAYLOAD)
    cache.save()
    assert opened(tmp_path).fresh(str(file), file.stat(), "s") == Result(PAYLOAD)


def test_other_content_settings_or_version_is_not_known(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kept(tmp_path, file, Result(PAYLOAD))
    assert cache.fresh(str(file), file.stat(), "other") is None
    assert cache.same(str(file), file.stat(), "s", b"y = 2\n") is None
    monkeypatch.setattr(module, "stamp", lambda root: "another version")
    assert opened(tmp_path).fresh(str(file), file.stat(), "s") is None


def test_a_result_rests_on_the_files_it_was_followed_into(tmp_path: Path, file: Path) -> None:
    other, absent = tmp_path / "other.py", tmp_path / "absent.py"
    other.write_text("a")
    result = Result(PAYLOAD, (str(other), str(absent)))
    assert kept(tmp_path, file, result).fresh(str(file), file.stat(), "s") is not None
    other.write_text("b")
    assert opened(tmp_path).fresh(str(file), file.stat(), "s") is None
    other.write_text("a")
    absent.write_text("now it is there")
    assert opened(tmp_path).fresh(str(file), file.stat(), "s") is None


def test_unconcerned_files_have_size_and_time_only(tmp_path: Path, file: Path) -> None:
    cache = opened(tmp_path)
    cache.unconcerned(str(file), file.stat())
    cache.save()
    rows = json.loads((tmp_path / ".accumlint_cache" / "index.json").read_text())["rows"]
    assert rows == {"train.py": [6, 10**18]}
    again = opened(tmp_path)
    assert again.is_bare(str(file))
    assert again.fresh(str(file), file.stat(), "s") == Result(None)


def test_a_file_changed_this_instant_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text("x")
    assert kept(tmp_path, file, Result(None)).fresh(str(file), file.stat(), "s") is None


def test_git_never_sees_the_cache(tmp_path: Path, file: Path) -> None:
    kept(tmp_path, file, Result(None))
    assert "*" in (tmp_path / ".accumlint_cache" / ".gitignore").read_text().splitlines()


def test_what_no_row_names_is_swept(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / ".accumlint_cache"
    kept(tmp_path, file, Result(PAYLOAD))
    assert len(list(folder.glob("*.json"))) == 2
    cache = opened(tmp_path)
    file.unlink()
    other = tmp_path / "other.py"
    other.write_text("x")
    cache.unconcerned(str(other), other.stat())
    cache.save()
    assert [path.name for path in folder.glob("*.json")] == ["index.json"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"rows": 3}', b"\xff\xfe", b'{"stamp": 1, "rows": {"train.py": [6]}}'])
def test_a_damaged_index_is_no_index(tmp_path: Path, file: Path, damage: bytes) -> None:
    kept(tmp_path, file, Result(PAYLOAD))
    (tmp_path / ".accumlint_cache" / "index.json").write_bytes(damage)
    assert opened(tmp_path).fresh(str(file), file.stat(), "s") is None


def test_a_damaged_row_is_no_row(tmp_path: Path, file: Path) -> None:
    kept(tmp_path, file, Result(PAYLOAD))
    index = tmp_path / ".accumlint_cache" / "index.json"
    whole = json.loads(index.read_text())
    for row in ([6], [6, 10**18, "x"], "text", [6, 10**18, 1, 2, 3, 4]):
        index.write_text(json.dumps(whole | {"rows": {"train.py": row}}))
        assert opened(tmp_path).fresh(str(file), file.stat(), "s") is None


def test_a_lost_payload_is_a_miss(tmp_path: Path, file: Path) -> None:
    cache = kept(tmp_path, file, Result(PAYLOAD))
    for path in (tmp_path / ".accumlint_cache").glob("*.json"):
        if path.name != "index.json":
            path.write_text("no json")
    assert cache.fresh(str(file), file.stat(), "s") is None


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, file: Path) -> None:
    (tmp_path / ".accumlint_cache").write_text("a file is in the way")
    cache = kept(tmp_path, file, Result(PAYLOAD))
    assert cache.fresh(str(file), file.stat(), "s") is None


def test_a_moved_checkout_is_not_known_by_its_old_paths(tmp_path: Path, file: Path) -> None:
    kept(tmp_path, file, Result(PAYLOAD))
    assert Cache(str(tmp_path / ".accumlint_cache"), str(tmp_path / "moved")).fresh(str(file), file.stat(), "s") is None
