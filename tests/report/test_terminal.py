"""What may reach a terminal, and how wide it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumlint.report.terminal import Span, Tone, cells, clip, encodable, escape, paint, paragraph, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x = 1", "x = 1"),
        ("\tx", "    x"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\nc", "a\\rb\\nc"),
        ("safe \u202e evil", "safe \\u202e evil"),
        ("\udc80", "\\udc80"),
        ("größe 梯度", "größe 梯度"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown


@given(st.text())
def test_nothing_unprintable_is_left(text: str) -> None:
    assert escape(text).isprintable()


def test_wide_characters_take_two_columns() -> None:
    assert cells("梯度 x") == 6
    assert cells("e\u0301") == 1


@given(st.text(alphabet="ab 梯é", max_size=40), st.integers(1, 30))
def test_clip_keeps_the_width(text: str, width: int) -> None:
    assert cells(clip(text, width)) <= width


def test_a_stream_without_the_glyphs_gets_ascii() -> None:
    assert encodable("● sync on ╎ 梯", "ascii") == "* sync on : \\u68af"
    assert encodable("● sync on", "utf-8") == "● sync on"
    assert encodable("●", "no-such-encoding") == "*"
    assert encodable("● · ✗", "ascii") == "* . X"  # what happened and what did not stay apart


def test_short_quotations_are_not_broken() -> None:
    lines = paragraph("Write this instead: `optimizer.zero_grad(set_to_none=True) if x` at the end of the window.", 70)
    assert any("`optimizer.zero_grad(set_to_none=True) if x`" in plain(line) for line in lines)
    assert max(len(plain(line)) for line in lines) <= 70


def test_a_quotation_over_two_lines_keeps_its_backquotes_and_tone() -> None:
    text = "Write `" + "very long expression " * 6 + "end` instead."
    lines = paragraph(text, 60)
    assert "".join(plain(line) for line in lines).count("`") == 2
    assert Span("instead.", Tone.STRONG) not in lines[-1]
    assert lines[1][0].tone is Tone.STRONG


def test_colour_only_where_asked() -> None:
    line = [Span("error", Tone.ERROR), Span(" text")]
    assert paint([line], color=False) == "error text"
    assert paint([line], color=True) == "\x1b[31m\x1b[1merror\x1b[0m text"
