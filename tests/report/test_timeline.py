"""The drawing of windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from accumlint.findings import Finding
from accumlint.report.story import story, titled
from accumlint.report.terminal import cells, plain
from accumlint.report.timeline import Part, draw
from accumlint.trace import Actor, Event, Kind, Place, Role, Trace, Turn, Window

Loop = Callable[..., Trace]


def _drawn(parts: list[Part], width: int = 100, guilty: tuple[int, ...] = ()) -> list[str]:
    return [plain(line) for line in draw(parts, "train.py", width, guilty=guilty)]


def _rows(lines: list[str]) -> dict[str, str]:
    return {line.split()[0]: line for line in lines if line}


def test_a_window_at_100_columns(finding: Finding) -> None:
    assert _drawn(story(finding), 100, finding.guilty) == [
        "micro-batch   1            2            3           update",
        "forward       ● sync on    ● sync on    ● sync on   ·         4  logits = model(x)",
        "weight        1/(3n)       1/(3n)       1/(3n)                5  loss = F.cross_entropy(logits, y)…",
        "backward      ✗ sync off   ✗ sync off   ● sync on   ·         7  loss.backward()",
        "reduced       yes          yes          yes",
        "clip          ·            ·            ·           ●         9  clip_grad_norm_(model.parameters()…",
        "step          ·            ·            ·           ●        10  optimizer.step()",
        "zero          ·            ·            ·           ●        11  optimizer.zero_grad()",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 160, 300])
@pytest.mark.parametrize("k", [1, 2, 3, 16, 64])
def test_never_wider_than_asked(loop: Loop, width: int, k: int) -> None:
    trace = loop(2 * k + 1, k)
    tail = trace.tail()
    parts = titled([*trace.windows(), *([tail] if tail else [])], 0)
    assert max(cells(line) for line in _drawn(parts, width)) <= width


def test_windows_that_do_not_fit_side_by_side_are_stacked(loop: Loop) -> None:
    parts = titled(loop(6).windows(), 0)
    wide, narrow = _drawn(parts, 160), _drawn(parts, 80)
    assert "window 1" in wide[0]
    assert "window 2" in wide[0]
    assert "" in narrow
    assert "window 2" in narrow[narrow.index("") + 1]


def test_alike_micro_batches_are_folded_and_the_guilty_ones_kept(loop: Loop) -> None:
    trace = loop(64, 64)
    window = trace.windows()[0]
    rows = _rows(_drawn([Part(window)], 160, guilty=(window.backwards[40].index,)))
    assert "64" in rows["micro-batch"].split()
    assert "41" in rows["micro-batch"].split()
    assert rows["micro-batch"].count("…") == 2
    assert rows["backward"].count("✗") == 1


def test_a_tail_is_drawn_behind_a_border_and_does_not_step(loop: Loop) -> None:
    trace = loop(7)
    tail = trace.tail()
    assert tail is not None
    lines = _drawn(titled([trace.windows()[-1], tail], 1), 160)
    assert lines[0].split("╎")[1].strip() == "tail"
    assert "●" not in _rows(lines)["step"].split("╎")[1]


def test_rows_stand_in_the_order_of_events() -> None:
    lines = _drawn([Part(_window(Kind.ZERO, Kind.FORWARD, Kind.BACKWARD, Kind.CLIP, Kind.UNSCALE, Kind.STEP))])
    assert [line.split()[0] for line in lines[1:]] == ["zero", "forward", "backward", "clip", "unscale", "step"]


def test_a_marked_kind_that_is_usually_left_out_is_shown() -> None:
    window = _window(Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
    assert "batch" not in _rows(_drawn([Part(window)]))
    assert "✗" in _rows(_drawn([Part(window)], guilty=(0,)))["batch"]


def test_several_events_of_one_line_are_counted() -> None:
    window = _window(Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD, Kind.BACKWARD, Kind.STEP)
    assert "● ×3" in _rows(_drawn([Part(window)]))["backward"]


def test_an_event_of_another_file_says_so() -> None:
    window = _window(Kind.FORWARD, Kind.BACKWARD, Kind.STEP, path="src/helper.py")
    assert "helper.py:11" in _rows(_drawn([Part(window)]))["forward"]


def test_rows_of_two_optimizers_are_named() -> None:
    window = _window(Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
    actors = [Actor(at, name, Role.OPTIMIZER) for at, name in enumerate(("opt_d", "opt_g"))]
    steps = tuple(
        replace(window.update[0], index=9 + at, place=Place("train.py", 40 + at), targets=(one,)) for at, one in enumerate(actors)
    )
    lines = _drawn([Part(replace(window, update=steps))])
    assert [line.split()[:2] for line in lines[-2:]] == [["step", "opt_d"], ["step", "opt_g"]]


def test_a_window_over_two_epochs_has_a_border_between_them(loop: Loop) -> None:
    window = loop(3).windows()[0]
    for at, micro_batch in enumerate(window.micro_batches):
        turn = Turn(2, 0, entry=1 if at else 0)
        events = tuple(replace(event, turns=(turn,)) for event in micro_batch.events)
        window = replace(
            window, micro_batches=(*window.micro_batches[:at], replace(micro_batch, events=events), *window.micro_batches[at + 1 :])
        )
    assert _drawn([Part(window)], 160)[0].split("╎")[1].strip() == "next epoch"


def test_a_second_backward_after_two_forwards_is_not_said_to_reduce(loop: Loop) -> None:
    """DDP's reducer follows the last forward only: then the flag alone does not tell."""
    window = loop(3).windows()[0]
    micro_batch = window.micro_batches[0]
    _, forward, _, backward = micro_batch.events
    twice = replace(micro_batch, events=(forward, replace(forward, index=90), backward, replace(backward, index=91, forwards=(90,))))
    rows = _rows(_drawn([Part(replace(window, micro_batches=(twice,)))]))
    assert "reduced" not in rows


def test_a_scaled_loss_shows_its_scale() -> None:
    window = _window(Kind.FORWARD, Kind.BACKWARD, Kind.UNSCALE, Kind.STEP)
    [micro_batch] = window.micro_batches
    events = tuple(replace(event, scaled=True) if event.kind is Kind.BACKWARD else event for event in micro_batch.events)
    rows = _rows(_drawn([Part(replace(window, micro_batches=(replace(micro_batch, events=events),)))]))
    assert rows["weight"].split() == ["weight", "S"]
    assert "● ÷ S" in rows["unscale"]


def test_source_text_and_names_are_escaped_and_names_clipped() -> None:
    window = _window(Kind.FORWARD, Kind.BACKWARD, Kind.STEP, text="\x1b[2J", path="\x1b" + "long" * 20 + ".py")
    actors = [Actor(at, "\x1b[2J" + "name" * 20 + str(at), Role.OPTIMIZER) for at in range(2)]
    steps = tuple(replace(window.update[0], index=9 + at, place=Place("x.py", 40 + at), targets=(one,)) for at, one in enumerate(actors))
    lines = _drawn([Part(replace(window, update=steps))], 100)
    assert "\x1b" not in "".join(lines)
    assert any(line.startswith("step \\x1b[2Jname") for line in lines)
    assert max(len(line) for line in lines) <= 100


def test_the_story_of_a_short_window_shows_its_neighbours(loop: Loop) -> None:
    trace = replace(loop(3, 1), accumulation=loop().accumulation)
    window = trace.windows()[0]
    found = Finding("ACC301", window.events[0].place, "", events=window.events, trace=trace)
    assert [part.title for part in story(found)] == ["window 1", "window 2", "window 3"]


def test_the_story_of_a_tail_shows_the_window_before_it(loop: Loop) -> None:
    trace = loop(7)
    tail = trace.tail()
    assert tail is not None
    found = Finding("ACC307", tail.events[0].place, "", events=tail.events, trace=trace)
    assert [part.title for part in story(found)] == ["window 2", "tail"]


def test_the_story_reaches_a_guilty_event_of_the_next_window(loop: Loop) -> None:
    trace = loop(7)
    first, second = trace.windows()
    found = Finding("ACC303", first.events[0].place, "", events=first.events, guilty=(second.backwards[0].index,), trace=trace)
    assert [part.title for part in story(found)] == ["window 1", "window 2"]


def test_the_story_of_a_single_event_is_the_window_that_it_is_in(loop: Loop) -> None:
    trace = loop(7)
    event = trace.windows()[1].backwards[1]
    found = Finding("ACC105", event.place, "", events=(event,), guilty=(event.index,), trace=trace)
    assert [part.window for part in story(found)] == [trace.windows()[1]]


def test_events_without_a_trace_are_drawn_all_the_same(finding: Finding) -> None:
    assert "✗" in "".join(_drawn(story(replace(finding, trace=None)), guilty=finding.guilty))
    assert story(replace(finding, events=())) == []


def _window(*kinds: Kind, path: str = "train.py", text: str = "x") -> Window:
    """One micro-batch; every kind stands on a line of its own."""
    lines = list(Kind)
    events = [Event(at, kind, Place(path, 10 + lines.index(kind)), 0, text=text) for at, kind in enumerate(kinds)]
    found = Finding("ACC000", events[0].place, "", events=tuple(events))
    return story(found)[0].window
