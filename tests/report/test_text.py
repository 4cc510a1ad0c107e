"""The formats for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accumlint.findings import Applicability, Confidence, Finding, Fix, Severity
from accumlint.report import render
from accumlint.report.terminal import cells
from accumlint.rule import Rule
from accumlint.trace import Place

Rules = dict[str, Rule]
Sources = Callable[[str], str]
ROOT = Path("/project")


def test_full_block(finding: Finding, rules: Rules, sources: Sources) -> None:
    text = render("full", [finding], rules, sources, width=100, color=False, root=ROOT)
    assert text == (
        "ACC101 backward-only-no-sync (error)\n"
        "`loss.backward()` runs inside `model.no_sync()`, but `model(x)` does not.\n"
        "--> train.py:7:13 in `train`\n"
        "   |\n"
        " 7 |     loss.backward()\n"
        "   |     ^^^^^^^^^^^^^^^\n"
        "\n"
        "  rehearsed with args.accum = 3\n"
        "  micro-batch   1            2            3           update\n"
        "  forward       ● sync on    ● sync on    ● sync on   ·         4  logits = model(x)\n"
        "  weight        1/(3n)       1/(3n)       1/(3n)                5  loss = F.cross_entropy(logits, y…\n"
        "  backward      ✗ sync off   ✗ sync off   ● sync on   ·         7  loss.backward()\n"
        "  reduced       yes          yes          yes\n"
        "  clip          ·            ·            ·           ●         9  clip_grad_norm_(model.parameters…\n"
        "  step          ·            ·            ·           ●        10  optimizer.step()\n"
        "  zero          ·            ·            ·           ●        11  optimizer.zero_grad()\n"
        "\n"
        "  when: `args.ddp` is True\n"
        "  help: Put the forward inside `no_sync`.\n"
        "\n"
        "Found 1 error in 1 file.\n"
    )


@pytest.mark.parametrize("width", [40, 80, 120, 160])
def test_full_keeps_the_width(finding: Finding, rules: Rules, sources: Sources, width: int) -> None:
    text = render("full", [replace(finding, message="word " * 60)], rules, sources, width=width, color=False, root=ROOT)
    assert max(cells(line) for line in text.split("\n")) <= width


def test_colour_changes_no_text(finding: Finding, rules: Rules, sources: Sources) -> None:
    import click

    for name in ("full", "concise"):
        plain, coloured = (render(name, [finding], rules, sources, width=100, color=color, root=ROOT) for color in (False, True))
        assert "\x1b" not in plain
        assert "\x1b" in coloured
        assert [line.rstrip() for line in click.unstyle(coloured).split("\n")] == plain.split("\n")


def test_concise(finding: Finding, rules: Rules, sources: Sources) -> None:
    warning = Finding("ACC307", Place("/project/src/b.py", 3, 5), "The tail is lost.")
    text = render("concise", [finding, warning], rules, sources, width=20, color=False, root=ROOT)
    assert text == (
        "train.py:7:13: ACC101 error `loss.backward()` runs inside `model.no_sync()`, but `model(x)` does not.\n"
        "src/b.py:3:5: ACC307 warning The tail is lost.\n"
        "Found 1 error and 1 warning in 2 files.\n"
    )


def test_nothing_found(rules: Rules, sources: Sources) -> None:
    for name in ("full", "concise"):
        assert render(name, [], rules, sources, width=80, color=False, root=ROOT) == "Nothing found.\n"


def test_footer_counts_by_severity(finding: Finding, rules: Rules, sources: Sources) -> None:
    found = [finding, finding, replace(finding, severity=Severity.WARNING), replace(finding, severity=Severity.INFO)]
    text = render("concise", found, rules, sources, width=80, color=False, root=ROOT)
    assert text.endswith("Found 2 errors, 1 warning and 1 note in 1 file.\n")


def test_confidence_and_fix_are_said(finding: Finding, rules: Rules, sources: Sources) -> None:
    found = replace(finding, confidence=Confidence.MEDIUM, fix=Fix(Applicability.UNSAFE, "Widen the context.", ()))
    text = render("full", [found], rules, sources, width=100, color=False, root=ROOT)
    assert "(error, medium confidence)" in text
    assert "  fix: Widen the context.\n" in text


def test_a_place_without_source_or_rule(sources: Sources) -> None:
    found = Finding("ACC000", Place("gone.py", 3, 1), "Does not parse.")
    text = render("full", [found], {}, sources, width=80, color=False, root=ROOT)
    assert text == "ACC000 (error)\nDoes not parse.\n--> gone.py:3:1\n\nFound 1 error in 1 file.\n"


def test_control_characters_of_source_and_names_are_escaped(rules: Rules) -> None:
    found = Finding("ACC101", Place("\x1b]0;a.py", 1, 3, 1, 6), "`\x1b[2J` is bad", help="\x07", settings=(("\x1b", "\x9b"),))
    for name in ("full", "concise", "github"):
        text = render(name, [found], rules, lambda path: "x \x1b[31m y\x00", width=80, color=False, root=ROOT)
        assert all(char.isprintable() or char == "\n" for char in text)


def test_carets_stand_under_wide_characters_and_tabs(rules: Rules) -> None:
    source = "\t梯度 = f(x)"
    found = Finding("ACC101", Place("a.py", 1, 7, 1, 11), "m")
    line, carets = render("full", [found], rules, lambda path: source, width=80, color=False, root=ROOT).split("\n")[4:6]
    assert cells(line[: line.index("f(x)")]) == carets.index("^")
    assert carets.count("^") == 4


def test_deep_indentation_and_long_lines_are_cut(rules: Rules) -> None:
    source = " " * 60 + "loss.backward()" + " + x" * 60
    found = Finding("ACC101", Place("a.py", 1, 61, 1, 76), "m")
    text = render("full", [found], rules, lambda path: source, width=60, color=False, root=ROOT)
    assert " 1 |     loss.backward() + x" in text
    assert "   |     ^^^^^^^^^^^^^^^\n" in text
