"""The report of a run for people: in a pipe, in a terminal, as lines."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accumlint.findings import Finding
from accumlint.report.terminal import cells
from accumlint.report.verify import every_rank, folded, render
from accumlint.report.verify.grouping import Grouping
from accumlint.rule import Rule
from accumlint.verdict import Check, Measurement, RankEnd, State, Topic

Runs = Callable[..., Measurement]
Draw = Callable[..., str]
ROOT = Path("/project")
RICH = importlib.util.find_spec("rich") is not None


@pytest.fixture
def draw(rules: dict[str, Rule], sources: Callable[[str], str]) -> Draw:
    def drawn(
        run: Measurement, *, form: str = "full", width: int = 120, color: bool = False, interactive: bool = False, ranks: Grouping = folded
    ) -> str:
        return render(run, rules, sources, output_format=form, width=width, color=color, root=ROOT, interactive=interactive, ranks=ranks)

    return drawn


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_right_run_says_what_was_seen(right: Runs, draw: Draw) -> None:
    text = draw(right())
    assert text.startswith("CONFIRMED: 2 of 2 updates on 2 ranks\n  torch 2.13.0, backend gloo, argv --accum 2\n\n")
    assert "  window boundary  confirmed     Each of 2 updates came after 2 micro-batches.\n" in text
    assert "  loss scale       not observed  No gradient scaler was used.\n" in text
    assert "\n  stepped at train.py:10\n" in text
    assert "\n  ranks 0-1: stopped as asked after 2 updates\n" in text
    assert "\nLimits\n  - BatchNorm in training mode sees each micro-batch alone.\n" in text
    assert text.endswith("\n\n3 confirmed, 0 violated, 1 not observed.\n")


def test_checks_stand_in_the_order_of_the_topics(wrong: Measurement, draw: Draw) -> None:
    text = draw(wrong)
    places = [text.index(f"\n  {topic.value} ") for topic in (Topic.HOOKS, Topic.BOUNDARY, Topic.AMP, Topic.WEIGHTS, Topic.MEMORY)]
    assert places == sorted(places)


def test_a_violation_has_its_code_numbers_and_finding(wrong: Measurement, draw: Draw) -> None:
    text = draw(wrong)
    assert text.startswith("VIOLATED: 2 of 2 updates on 2 ranks\n  Wrong: weight of a target.\n")
    assert "violated      ACC201: A target weighs between 1/16 and 1/4.\n" in text
    assert re.search(r"\n +the heaviest are in micro-batch 1 of rank 0\n +measured: low 0.0625, high 0.25\n", text)
    assert "\nACC201 (error)\nMeans are averaged.\n--> train.py:7:13 in `train`\n" in text
    assert "\n  measured on rank 0\n  micro-batch " in text
    assert "rehearsed" not in text


def test_the_table_holds_every_rank_and_its_numbers(wrong: Measurement, draw: Draw) -> None:
    rows = words(draw(wrong, width=200))
    head = "update rank micro-steps step targets of all ranks elements norm clipped limit buckets target's weight sum error"
    at = rows.index(head.split())
    assert rows[at + 1] == "1 0 2 1 8 20 8 1.25 1 1 0, 2 1/4, 1/12 1 9.48e-02".split()
    assert rows[at + 4] == "2 1 2 2 12 20 12 1.25 1 1 0, 2 1/8, 1/16 1 9.48e-02".split()


def test_a_step_left_out_is_seen(right: Runs, draw: Draw) -> None:
    run = right()
    assert "updated" not in draw(run)
    rows = words(draw(replace(run, updates=(replace(run.updates[0], updated=False, scale=65536.0), *run.updates[1:])), width=200))
    head = next(row for row in rows if row[:1] == ["update"])
    first, second = rows[rows.index(head) + 1 :][:2]
    assert head[2] == "updated"
    assert (first[2], second[2]) == ("no", "yes")
    assert "65536" in first
    assert "65536" not in second


def test_two_optimizers_are_told_apart(right: Runs, draw: Draw) -> None:
    run = right(1)
    both = (*run.updates, *(replace(each, optimizer="disc_opt") for each in run.updates))
    named = [row[2] for row in words(draw(replace(run, updates=both), width=200)) if row[:2] in (["1", "0"], ["2", "0"])]
    assert named == ["disc_opt", "optimizer", "disc_opt", "optimizer"]


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("interactive", [False, pytest.param(True, marks=pytest.mark.skipif(not RICH, reason="needs rich"))])
def test_no_line_is_too_wide(wrong: Measurement, right: Runs, draw: Draw, width: int, interactive: bool) -> None:
    many = right(64)
    long = replace(many.checks[0], summary="word " * 80, lines=("more " * 60,))
    coefficients = tuple(0.123456789 / n for n in range(1, 7))
    updates = (replace(many.updates[0], coefficients=coefficients, optimizer="an_optimizer_of_a_long_name"), *many.updates[1:])
    stuck = tuple(replace(end, ended="stalled", detail="no progress " * 20, stack="at " + "x" * 300) for end in many.ranks)
    for run in (wrong, replace(many, checks=(long,), updates=updates, ranks=(*many.ranks[:1], *stuck[1:]))):
        text = draw(run, width=width, interactive=interactive)
        assert max(cells(line) for line in text.splitlines()) <= width
        assert "9.48e-02" in text or "an_optimizer" in text


@pytest.mark.skipif(not RICH, reason="needs rich")
def test_a_terminal_shows_the_same_words(wrong: Measurement, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    plain, terminal = draw(wrong), draw(wrong, interactive=True)
    assert "\x1b" not in terminal
    assert "─" in terminal
    assert plain.split() == re.sub("─+", "", terminal).split()
    coloured = draw(wrong, interactive=True, color=True)
    assert re.search(r"\x1b\[1;31mviolated *\x1b\[0m", coloured)
    assert re.sub(r" *\n", "\n", re.sub(r"\x1b\[[0-9;]*m", "", coloured)) == terminal


def test_without_rich_a_terminal_gets_plain_text(wrong: Measurement, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accumlint.report.verify.find_spec", lambda name: None)
    assert draw(wrong, interactive=True) == draw(wrong)


def test_nothing_acts_on_the_terminal(wrong: Measurement, draw: Draw) -> None:
    evil = "\x1b]0;a\x07\x9b2J\u202e[bold]x[/bold]\rz"
    first = replace(wrong.updates[0], optimizer=evil, path=f"/project/{evil}.py")
    run = replace(
        wrong,
        checks=(Check(Topic.WEIGHTS, State.VIOLATED, evil, (evil,), ("ACC201",), {evil: evil}),),
        updates=(first, *wrong.updates[1:]),
        ranks=(RankEnd(0, 0, evil, evil, f"one\n{evil}\n\ttwo"), RankEnd(1, 2, "script")),
        limits=(evil,),
        environment={evil: evil},
        problem=evil,
    )
    for form in ("full", "concise"):
        for interactive in (False, RICH):
            text = draw(run, form=form, interactive=interactive)
            assert all(char.isprintable() or char == "\n" for char in text)
            assert text.count("[bold]x[/bold]") >= 1


def test_many_ranks_that_agree_share_a_row(right: Runs, draw: Draw) -> None:
    run = right(64)
    odd = replace(run.updates[5], micro_steps=3, buckets=(0, 0, 2))
    text = draw(replace(run, updates=(*run.updates[:5], odd, *run.updates[6:])), width=200)
    rows = [row for row in words(text) if row[:1] in (["1"], ["2"])]
    assert [row[1:4] for row in rows] == [["0-4,", "6-63", "2"], ["5", "3", "1"], ["0-63", "2", "2"]]
    assert "8 to 12" in text
    assert "0, 0, 2" in text
    every = [row for row in words(draw(run, width=200, ranks=every_rank)) if row[:1] in (["1"], ["2"])]
    assert [row[1] for row in every] == [str(rank) for _ in range(2) for rank in range(64)]


def test_many_ranks_that_differ_are_few_rows(right: Runs, draw: Draw) -> None:
    run = right(256, 3)
    text = draw(replace(run, updates=tuple(replace(each, norm_before=each.rank + 0.5) for each in run.updates)), width=200)
    rows = [row for row in words(text) if row[:1] == ["2"]]
    assert [row[1] for row in rows] == [*"0123456", "7-255"]
    assert "7.5 to 255.5" in text


def test_ranks_that_hung_are_named_with_their_stacks(right: Runs, draw: Draw) -> None:
    run = right(4)
    waits, dead = "train.py:7 in train\n  loss.backward()", "train.py:3 in train\n  continue"
    ends = tuple(RankEnd(rank, 1, "stalled", "no progress for 5 s", dead if rank == 2 else waits) for rank in range(4))
    text = draw(replace(run, ranks=ends, problem="Rank 2 left the micro-batch; the others wait for it."))
    assert text.startswith("NOT PROVED: 1 of 2 updates on 4 ranks\n  Rank 2 left the micro-batch; the others wait for it.\n")
    assert text.count("Rank 2 left") == 1
    assert "  ranks 0-1, 3 stood here\n    train.py:7 in train\n      loss.backward()\n" in text
    assert "  rank 2 stood here\n    train.py:3 in train\n      continue\n" in text
    apart = draw(replace(run, ranks=(replace(ends[0], ended="died", detail="signal 9", stack=""), *ends[1:])))
    assert ["0", "1", "died:", "signal", "9"] in words(apart)


def test_long_and_many_stacks_are_cut(right: Runs, draw: Draw) -> None:
    run = right(20)
    deep = "\n".join(f"frame {at}" for at in range(100))
    ends = tuple(RankEnd(rank, 0, "stalled", "", f"{deep}\nrank {rank}") for rank in range(20))
    text = draw(replace(run, ranks=ends))
    assert text.count("stood here") == 7
    assert "    … 77 lines before\n    frame 77\n" in text
    assert "  13 further stacks with --ranks or in JSON\n" in text
    assert draw(replace(run, ranks=ends), ranks=every_rank).count("stood here") == 20


def test_a_script_that_fails_is_named(right: Runs, draw: Draw) -> None:
    text = draw(replace(right(1), failed=3, checks=(), updates=(), ranks=()))
    assert text.startswith("SCRIPT FAILED: no rank reported\n  The script failed by itself with exit status 3.\n")
    assert text.endswith("0 confirmed, 0 violated, 0 not observed.\n")


def test_concise_is_a_line_each(wrong: Measurement, draw: Draw) -> None:
    assert draw(wrong, form="concise", width=60).splitlines() == [
        "train.py:7:13: ACC201 error Means are averaged.",
        "confirmed: hook counts: Buckets were reduced in the last micro-batch alone.",
        "confirmed: window boundary: Each of 2 updates came after 2 micro-batches.",
        "not observed: loss scale: No gradient scaler was used.",
        "violated: weight of a target: ACC201: A target weighs between 1/16 and 1/4.",
        "confirmed: memory: The peak was 1.2 GiB.",
        "violated: Wrong: weight of a target.",
        "3 confirmed, 1 violated, 1 not observed.",
    ]


def test_the_caption_of_a_finding_names_its_rank(wrong: Measurement, measured: Finding, draw: Draw) -> None:
    events = tuple(replace(event, rank=3) for event in measured.events)
    text = draw(replace(wrong, findings=(replace(measured, events=events),)))
    assert "  measured on rank 3\n" in text
