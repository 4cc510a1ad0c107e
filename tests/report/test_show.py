"""What `accumlint show` draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accumlint.report.show import show
from accumlint.report.terminal import cells
from accumlint.trace import Trace

Loop = Callable[..., Trace]
ROOT = Path("/project")


def test_a_loop(loop: Loop) -> None:
    trace = replace(loop(), limits=("`helper(model)` at line 3: not found",))
    assert show([trace], width=100, color=False, root=ROOT) == (
        "train.py:2 in `train`\n"
        "  K is `args.accum`, rehearsed with 3\n"
        "  where `args.ddp` is True\n"
        "\n"
        "                windows 1 and 2, alike                       ╎ tail\n"
        "  micro-batch   1            2            3           update ╎ 7\n"
        "  forward       ● sync on    ● sync on    ● sync on   ·      ╎ ● sync on     4  logits = model(x)\n"
        "  weight        1/(3n)       1/(3n)       1/(3n)             ╎ 1/(3n)        5  loss = F.cross_entr…\n"
        "  backward      ● sync off   ● sync off   ● sync on   ·      ╎ ● sync off    7  loss.backward()\n"
        "  reduced       yes          yes          yes                ╎ yes\n"
        "  clip          ·            ·            ·           ●      ╎ ·             9  clip_grad_norm_(mod…\n"
        "  step          ·            ·            ·           ●      ╎ ·            10  optimizer.step()\n"
        "  zero          ·            ·            ·           ●      ╎ ·            11  optimizer.zero_grad…\n"
        "\n"
        "  weight of a target at the backward: 1/(n·K)\n"
        "    1/n    valid targets of this micro-batch: `F.cross_entropy(logits, y)` by itself\n"
        "    1/K    micro-batches of a window, 3 in this rehearsal: `args.accum` (line 5)\n"
        "\n"
        "  not followed\n"
        "    `helper(model)` at line 3: not found\n"
        "\n"
    )


@pytest.mark.parametrize("width", [60, 80, 160])
def test_keeps_the_width(loop: Loop, width: int) -> None:
    assert max(cells(line) for line in show([loop(33, 16)], width=width, color=False, root=ROOT).split("\n")) <= width


def test_other_settings_are_drawn_only_where_they_differ(loop: Loop) -> None:
    other = replace(loop(), settings=(("args.fp16", "True"),))
    assert "args.fp16" not in show([loop(), other], width=100, color=False, root=ROOT)
    text = show([loop(), replace(loop(6), settings=(("args.fp16", "True"),))], width=100, color=False, root=ROOT)
    assert "where `args.fp16` is True" in text
    assert text.count("weight of a target") == 1


def test_a_literal_k_and_none(loop: Loop) -> None:
    accumulation = loop().accumulation
    assert accumulation is not None
    literal = replace(loop(), accumulation=replace(accumulation, literal=True))
    assert "K is 3, as it stands in the source" in show([literal], width=80, color=False, root=ROOT)
    assert "no accumulation seen" in show([replace(loop(), accumulation=None)], width=80, color=False, root=ROOT)


def test_colour(loop: Loop) -> None:
    assert "\x1b[" in show([loop()], width=80, color=True, root=ROOT)
    assert "\x1b[" not in show([loop()], width=80, color=False, root=ROOT)


def test_the_frameworks_that_took_part_and_their_versions(loop: Loop) -> None:
    trace = replace(loop(), frameworks=("Accelerate (0.20 to 1.15)",), versions=(("accelerate", "1.2.0, from uv.lock"),))
    assert show([trace], width=100, color=False, root=ROOT).splitlines()[1:4] == [
        "  K is `args.accum`, rehearsed with 3",
        "  framework: Accelerate (0.20 to 1.15)",
        "  accelerate is 1.2.0, from uv.lock",
    ]
