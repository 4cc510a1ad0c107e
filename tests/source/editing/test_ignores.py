"""Suppression comments."""

from __future__ import annotations

import pytest

from accumlint.findings import Finding
from accumlint.source.editing.ignores import add_ignores, suppressing, suppressions, unused
from accumlint.trace import Place

RULES = {
    "ACC001": "unused-suppression",
    "ACC101": "backward-only-no-sync",
    "ACC102": "unsynced-update",
    "ACC202": "unnormalised-accumulation",
}


def silenced(text: str, line: int, code: str = "ACC101", end_line: int = 0) -> bool:
    return bool(suppressing(Finding(code, Place("a.py", line, 1, end_line), ""), suppressions(text), RULES))


def idle(text: str, *found: tuple[str, int], off: str = "") -> list[str]:
    findings = [Finding(code, Place("a.py", line), "") for code, line in found]
    return [each.code for each in unused(suppressions(text), findings, RULES, lambda code: code != off)]


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa",
        "#noqa",
        "# NOQA: ACC101",
        "# noqa: E501, ACC101",
        "# noqa:ACC202 ACC101",
        "# noqa: ACC1",
        "# why not  # noqa: ACC101",
        "# accumlint: ignore[ACC101]",
        "# accumlint:ignore[ACC202, ACC101] the scaler does it",
        "# accumlint: ignore[backward-only-no-sync]",
        "# accumlint: ignore[ACC1]",
        "# accumlint: ignore[ALL]",
        "# type: ignore  # accumlint: ignore[ACC101]",
        "# accumlint: file-ignore[ACC101]",
    ],
)
def test_at_the_end_of_the_line(comment: str) -> None:
    assert silenced(f"x = 1\nloss.backward()  {comment}\n", 2)


@pytest.mark.parametrize(
    "comment", ["# noqa: E501", "# noqa: ACC202", "# accumlint: ignore[ACC102]", "# accumlint: ignore", "# accumlint: ignore[]", "# noqah"]
)
def test_what_does_not_concern_the_code(comment: str) -> None:
    assert not silenced(f"loss.backward()  {comment}\n", 1)


def test_only_its_own_line() -> None:
    text = "a()  # noqa: ACC101\nb()\n"
    assert silenced(text, 1)
    assert not silenced(text, 2)


def test_not_in_a_string() -> None:
    assert suppressions("x = '# noqa: ACC101'\ny = '''\n# accumlint: file-ignore[ACC101]\n'''\n") == []


def test_on_the_line_above() -> None:
    text = "if x:\n    # accumlint: ignore[ACC101]\n    # accumlint: ignore[ACC202] stacked\n    loss.backward()\n    y()\n"
    assert silenced(text, 4)
    assert silenced(text, 4, "ACC202")
    assert not silenced(text, 5)


def test_above_means_directly_above() -> None:
    assert not silenced("# accumlint: ignore[ACC101]\n\nloss.backward()\n", 3)


def test_noqa_on_a_line_of_its_own_suppresses_nothing() -> None:
    assert not silenced("# noqa: ACC101\nloss.backward()\n", 2)


def test_a_statement_over_several_lines() -> None:
    text = "f(\n    a,\n    b,\n)  # noqa: ACC101\ng()\n"
    assert all(silenced(text, line) for line in (1, 2, 3, 4))
    assert not silenced(text, 5)
    inner = "f(\n    a,  # noqa: ACC101\n    b,\n)\n"
    assert silenced(inner, 2)
    assert not silenced(inner, 3)
    own = "f(\n    # accumlint: ignore[ACC101]\n    a,\n    b,\n)\n"
    assert silenced(own, 3)
    assert not silenced(own, 4)


def test_for_the_whole_file_wherever_it_stands() -> None:
    text = "def f():\n    g()\n    # accumlint: file-ignore[ACC101]\n"
    assert silenced(text, 1)
    assert not silenced(text, 1, "ACC102")


def test_a_file_that_ends_in_the_middle() -> None:
    assert silenced("a()  # noqa: ACC101\nf(\n", 1)


def test_unused() -> None:
    assert idle("a()  # noqa: ACC101\n") == ["ACC101"]
    assert idle("a()  # noqa: ACC101\n", ("ACC101", 1)) == []
    assert idle("a()  # noqa: ACC101, ACC102\n", ("ACC102", 1)) == ["ACC101"]
    assert idle("a()  # accumlint: ignore[ACC101]\n", ("ACC101", 2)) == ["ACC101"]
    assert idle("# accumlint: file-ignore[ACC1]\na()\n", ("ACC102", 9)) == []


def test_unused_is_silent_about_blanket_foreign_and_switched_off() -> None:
    assert idle("a()  # noqa\n") == []
    assert idle("a()  # noqa: E501\n") == []
    assert idle("a()  # noqa: ACC101\n", off="ACC101") == []
    assert idle("a()  # noqa: ACC001\n") == []


def test_unknown_and_missing_codes() -> None:
    assert idle("a()  # accumlint: ignore[ACC999]\n") == ["ACC999"]
    assert idle("a()  # accumlint: ignore\n") == [""]


def test_places_of_unused_codes() -> None:
    (only,) = suppressions("a()  # x  # noqa: ACC101\n")
    assert (only.line, only.column, only.end_column) == (1, 11, 25)


def added(text: str | bytes, codes: dict[int, set[str]], reason: str = "") -> bytes:
    return add_ignores(text if isinstance(text, bytes) else text.encode(), codes, reason)


def test_add_at_the_end_of_the_statement() -> None:
    assert added("f(\n    a,\n)\ng()\n", {1: {"ACC102", "ACC101"}}) == b"f(\n    a,\n)  # accumlint: ignore[ACC101, ACC102]\ng()\n"


def test_add_keeps_line_ends_encoding_mark_and_last_line() -> None:
    assert added(b"\xef\xbb\xbfa()\r\nb()\r\n", {2: {"ACC101"}}) == b"\xef\xbb\xbfa()\r\nb()  # accumlint: ignore[ACC101]\r\n"
    assert added("# coding: latin-1\nx('é')".encode("latin-1"), {2: {"ACC101"}}) == (
        "# coding: latin-1\nx('é')  # accumlint: ignore[ACC101]".encode("latin-1")
    )


def test_add_extends_what_is_there() -> None:
    assert added("a()  # accumlint: ignore[ACC202] why\n", {1: {"ACC101"}}) == b"a()  # accumlint: ignore[ACC101, ACC202] why\n"


def test_add_with_a_reason() -> None:
    assert added("a()  # note\n", {1: {"ACC101"}}, "known,\nsee #3") == b"a()  # note  # accumlint: ignore[ACC101] known, see #3\n"


def test_what_was_added_suppresses() -> None:
    text = 'f("""\n  text\n""", b,\n  c)\n'
    after = added(text, {2: {"ACC101"}}).decode()
    assert all(silenced(after, line) for line in (1, 2, 3, 4))


def test_add_with_odd_line_breaks() -> None:
    text = "x = 'a\\x0cb'\n\x0c\nf()\n"
    assert added(text, {3: {"ACC101"}}) == b"x = 'a\\x0cb'\n\x0c\nf()  # accumlint: ignore[ACC101]\n"
    bare = "a()\rb()\r"
    assert added(bare, {2: {"ACC101"}}) == b"a()\rb()  # accumlint: ignore[ACC101]\r"


@pytest.mark.parametrize("odd", ["\u2028", "\x85", "\x1c", "\f"])
def test_added_where_python_counts_the_lines(odd: str) -> None:
    written = add_ignores(f'x = "{odd}"\nloss.backward()\n'.encode(), {2: ["ACC202"]})
    assert written.decode() == f'x = "{odd}"\nloss.backward()  # accumlint: ignore[ACC202]\n'


def test_adding_leaves_strings_alone() -> None:
    line = 'x = "# accumlint: ignore[ACC101]"; loss.backward()'
    written = add_ignores(f"{line}\n".encode(), {1: ["ACC202"]})
    assert written.decode() == f"{line}  # accumlint: ignore[ACC202]\n"
