"""Small training loops, right and wrong ones, and what a run of each must show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from accumlint.cli.rehearsed import rehearsed
from accumlint.findings import Severity
from accumlint.rule import catalogue
from accumlint.runtime.measure import Question, measurement
from accumlint.verdict import Measurement, State, Topic
from tests.runtime.runs import measure

FOLDER = Path(__file__).parent / "loops"
TRIES = 2  # two ranks on a busy machine now and then miss each other
LETTERS = {"C": State.CONFIRMED, "V": State.VIOLATED, "-": State.NOT_OBSERVED}
HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
torch.set_num_threads(1)
"""
RANKS = """import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
"""
END = "dist.destroy_process_group()\n"


@dataclass(frozen=True)
class Loop:
    """A block of a file: `### name | processes | codes | TOPIC=letter ...`, and the script."""

    name: str
    processes: int
    codes: frozenset[str]
    states: dict[Topic, State]
    script: str

    @property
    def text(self) -> str:
        return f"{HEAD}{self.script}" if self.processes == 1 else f"{HEAD}{RANKS}{self.script}{END}"


def _loops() -> Iterator[Loop]:
    for path in sorted(FOLDER.glob("*.txt")):
        for block in re.split(r"^### ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            head, _, script = block.partition("\n")
            name, processes, codes, states = (part.strip() for part in head.split("|"))
            told = dict(state.split("=") for state in states.split())
            yield Loop(
                name, int(processes), frozenset(codes.split()), {Topic[topic]: LETTERS[state] for topic, state in told.items()}, script
            )


LOOPS = {loop.name: loop for loop in _loops()}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_run_shows(name: str, tmp_path: Path) -> None:
    loop = LOOPS[name]
    script = tmp_path / "train.py"
    script.write_text(loop.text, encoding="utf-8")
    for _ in range(TRIES):
        reports = measure(script, loop.processes, reference="exact" if loop.processes == 1 else "off")
        if all(report["ended"] == "script" for report in reports):
            break
    assert [report["ended"] for report in reports] == ["script"] * loop.processes
    assert [report["troubles"] for report in reports] == [[]] * loop.processes
    shown = measurement(reports, Question(1, tuple(catalogue().values())), rehearsed=rehearsed(reports))
    assert {finding.code for finding in shown.findings if finding.severity is not Severity.INFO} == loop.codes, _told(shown)
    assert {check.topic: check.state for check in shown.checks if check.topic in loop.states} == loop.states, _told(shown)
    if not loop.codes:
        assert [check.summary for check in shown.checks if check.state is State.VIOLATED] == []


def _told(shown: Measurement) -> str:
    found = [f"{finding.code} line {finding.place.line}: {finding.message}" for finding in shown.findings]
    return "\n".join(found + [f"{check.topic.value}: {check.state.value}: {check.summary}" for check in shown.checks])


DIVIDED = """
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))
    (F.cross_entropy(model(x), y) / {first} / {second}).backward()
    if i % {k} == {k} - 1:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "second", "k", "doubtful"),
    [(4, 4, 4, True), (4, 5, 4, False), (4, 1, 4, False), (2, 2, 2, False)],
)
def test_weights_that_add_up_to_one_of_k_are_doubted(tmp_path: Path, first: int, second: int, k: int, doubtful: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + DIVIDED.format(first=first, second=second, k=k), encoding="utf-8")
    reports = measure(script)
    shown = measurement(reports, Question(1, tuple(catalogue().values())), rehearsed=rehearsed(reports))
    total = shown.check(Topic.SUM)
    assert total is not None
    assert bool(total.doubt) is doubtful, _told(shown)
