"""What an engine of DeepSpeed does with its K, by stage, by who counts, and by what of its configuration can be seen."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from accumlint.linter import lint_file

PROGRAM = """
import json
import deepspeed
import torch
import torch.nn.functional as F


def main(args, loader, settings):
    net = torch.nn.Linear(8, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 3)
    config = {config}
    engine, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=sgd, config=config)
    for i, (x, y) in enumerate(loader):
{body}
"""
MEAN = "loss = F.cross_entropy(engine(x), y)\n"
EVERY = "engine.backward(loss)\nengine.step()\n"


def dictionary(k: str, stage: int = 0, more: str = "") -> str:
    return f'{{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": {k}, "zero_optimization": {{"stage": {stage}}}{more}}}'


def codes(tmp_path: Path, body: str, config: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(config=config, body=indent(dedent(body), " " * 8)))
    return sorted({finding.code for finding in lint_file(str(script))})


@pytest.mark.parametrize("config", [dictionary("args.accum"), dictionary("4"), dictionary("1"), '"ds.json"', "json.load(open(settings))"])
def test_a_plain_loop_is_clean_whatever_k_is(tmp_path: Path, config: str) -> None:
    assert codes(tmp_path, MEAN + EVERY, config) == []


@pytest.mark.parametrize(
    ("config", "loss", "expected"),
    [
        (dictionary("args.accum"), "loss = loss / args.accum\n", ["ACC206"]),
        (dictionary("args.accum"), "loss = loss / args.accum * args.accum\n", []),
        (dictionary("4"), 'loss = loss / config["gradient_accumulation_steps"]\n', ["ACC206"]),
        (dictionary("args.accum"), "loss = loss / engine.gradient_accumulation_steps()\n", ["ACC206"]),
        ('"ds.json"', "loss = loss / engine.gradient_accumulation_steps()\n", ["ACC206"]),
        ('"ds.json"', "loss = loss / args.gradient_accumulation_steps\n", ["ACC206"]),
        (dictionary("1"), "loss = loss / args.gradient_accumulation_steps\n", ["ACC301"]),
        (
            '{"train_batch_size": 4 * args.world_size * args.accum_steps, "train_micro_batch_size_per_gpu": 4}',
            "loss /= args.accum_steps\n",
            ["ACC206"],
        ),
    ],
)
def test_division_by_hand(tmp_path: Path, config: str, loss: str, expected: list[str]) -> None:
    assert codes(tmp_path, MEAN + loss + EVERY, config) == expected


def test_division_is_the_code_s_own_without_scale_wrt_gas(tmp_path: Path) -> None:
    body = MEAN + "engine.backward(loss / args.accum, scale_wrt_gas=False)\nengine.step()\n"
    assert codes(tmp_path, body, dictionary("args.accum")) == []
    assert codes(tmp_path, body.replace(" / args.accum", ""), dictionary("args.accum")) == ["ACC202"]


@pytest.mark.parametrize(("stage", "expected"), [(0, ["ACC302"]), (1, ["ACC302"]), (2, []), (3, [])])
def test_clearing_the_engine_inside_its_window(tmp_path: Path, stage: int, expected: list[str]) -> None:
    assert codes(tmp_path, "engine.zero_grad()\n" + MEAN + EVERY, dictionary("args.accum", stage)) == expected


@pytest.mark.parametrize(("stage", "expected"), [(0, ["ACC302"]), (2, []), (3, ["ACC302"])])
def test_clearing_its_optimizer_inside_its_window(tmp_path: Path, stage: int, expected: list[str]) -> None:
    assert codes(tmp_path, "optimizer.zero_grad()\n" + MEAN + EVERY, dictionary("args.accum", stage)) == expected


def test_clearing_beside_a_file_of_settings_says_nothing_of_k(tmp_path: Path) -> None:
    assert codes(tmp_path, MEAN + EVERY + "optimizer.zero_grad()\n", '"ds.json"') == []


@pytest.mark.parametrize(("stage", "expected"), [(0, ["ACC304"]), (2, [])])
def test_clipping_by_hand(tmp_path: Path, stage: int, expected: list[str]) -> None:
    clip = "torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)\n"
    assert codes(tmp_path, MEAN + "engine.backward(loss)\n" + clip + "engine.step()\n", dictionary("args.accum", stage)) == expected


def test_a_schedule_of_its_own(tmp_path: Path) -> None:
    assert codes(tmp_path, MEAN + EVERY + "schedule.step()\n", dictionary("args.accum")) == ["ACC305"]
    assert codes(tmp_path, MEAN + EVERY + "schedule.step()\n", dictionary("1")) == []


WHOLE = "if i >= len(loader) // args.accum * args.accum:\n    continue\n"  # of windows: no tail
GATED = MEAN + "engine.backward(loss{share})\nif (i + 1) % args.accum == 0:\n    engine.step()\n"


@pytest.mark.parametrize(
    ("k", "stage", "share", "expected"),
    [
        ("args.accum", 0, "", ["ACC320"]),  # a window of K * K
        ("1", 0, " / args.accum", []),
        ("1", 0, "", ["ACC202"]),
        ("1", 1, " / args.accum", ["ACC320"]),  # the last micro-batch alone
        ("1", 2, " / args.accum", ["ACC320"]),
    ],
)
def test_a_window_by_hand(tmp_path: Path, k: str, stage: int, share: str, expected: list[str]) -> None:
    body = WHOLE + GATED.format(share=share)
    assert codes(tmp_path, body, dictionary(k, stage)) == expected


def test_a_window_by_hand_over_settings_in_a_file_is_not_judged(tmp_path: Path) -> None:
    body = WHOLE + GATED.format(share=" / args.accum")
    assert codes(tmp_path, body, '"ds.json"') == []


def test_a_boundary_that_the_code_sets(tmp_path: Path) -> None:
    body = """
    engine.set_gradient_accumulation_boundary((i + 1) % args.accum == 0)
    engine.backward(F.cross_entropy(engine(x), y) / args.accum)
    engine.step()
    """
    assert codes(tmp_path, body, dictionary("1", 2)) == []


def test_a_step_that_waits_for_what_only_the_step_moves(tmp_path: Path) -> None:
    body = MEAN + "engine.backward(loss)\nif engine.is_gradient_accumulation_boundary():\n    engine.step()\n"
    assert codes(tmp_path, body, dictionary("args.accum")) == ["ACC320"]
    assert codes(tmp_path, body, dictionary("1")) == []


def test_every_step_updates_where_the_engine_does_not_count(tmp_path: Path) -> None:
    unmanaged = dictionary("args.accum", 0, ', "managed_gradient_accumulation": False')
    body = WHOLE + GATED.format(share="")
    assert codes(tmp_path, body, unmanaged) == []


def test_an_engine_is_known_by_what_it_is_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        dedent(
            """
            def train(model, criterion, loader, update_freq=None):
                for x, y in loader:
                    loss = criterion(model(x), y)
                    loss /= update_freq
                    model.backward(loss)
                    model.step()
            """
        )
    )
    assert [(finding.code, finding.place.line) for finding in lint_file(str(script))] == [("ACC206", 5)]


def test_an_object_of_the_source_is_followed_and_not_taken_for_an_engine(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        dedent(
            """
            import torch

            class Engine:
                def __init__(self, net, accum):
                    self.net, self.accum, self.seen = net, accum, 0
                    self.sgd = torch.optim.SGD(net.parameters(), lr=0.1)

                def backward(self, loss):
                    loss.backward()

                def step(self):
                    self.seen += 1
                    if self.seen % self.accum == 0:
                        self.sgd.step()
                        self.sgd.zero_grad()

            def main(loader, accum):
                engine = Engine(torch.nn.Linear(4, 2), accum)
                for x, y in loader:
                    engine.backward(torch.nn.functional.cross_entropy(engine.net(x), y) / accum)
                    engine.step()
            """
        )
    )
    assert list(lint_file(str(script))) == []
