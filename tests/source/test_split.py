"""Which events belong to one training loop."""

from __future__ import annotations

from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind

LOOPS = """
import torch

def train_step(model, optimizer, samples):
    optimizer.zero_grad()
    for sample in samples:
        torch.nn.functional.cross_entropy(model(sample), sample, reduction="sum").backward()
    for parameter in model.parameters():
        parameter.grad.div_(8)
    optimizer.step()
"""
TWO = """
import torch

def train(model, optimizer, first, second):
    for x in first:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for x in second:
        model(x).mean().backward()
    optimizer.step()
"""
PARTS = """
import torch

def split(batch, n):
    return [dict(zip(batch, values)) for values in zip(*(value.chunk(n) for value in batch.values()))]

def train(model, loader, optimizer, n):
    for batch in loader:
        optimizer.zero_grad()
        for part in split(batch, n):
            model(part).mean().backward()
        optimizer.step()
"""
WINDOW = {Kind.BACKWARD, Kind.NORMALIZE, Kind.STEP}


def kinds(script: str) -> list[list[Kind]]:
    source = parse(script.encode(), "train.py")
    assert isinstance(source, Source)
    (rehearsal,) = rehearsals(source)
    default = next(iter(rehearsal.worlds(3)))
    traces = [trace for trace in rehearsal.traces(3) if trace.settings == default.settings]
    return [[event.kind for event in trace.events if event.kind in WINDOW] for trace in traces]


def test_a_loop_over_the_parameters_is_no_loop_of_its_own() -> None:
    assert kinds(LOOPS) == [[Kind.BACKWARD] * 3 + [Kind.NORMALIZE, Kind.STEP]]


def test_two_loops_that_train_are_two() -> None:
    found = kinds(TWO)
    assert len(found) == 2
    assert found[0][:2] == [Kind.BACKWARD, Kind.STEP]
    assert found[1][-1] is Kind.STEP


def test_every_batch_has_as_many_parts() -> None:
    (found,) = kinds(PARTS)
    assert found == [*[Kind.BACKWARD] * 3, Kind.STEP] * 2


TRIAL = """
import torch

def largest_batches_fit(model, optimizer, batches):
    for name, batch in batches.items():
        model(batch).mean().backward()
        optimizer.zero_grad()

def train(model, optimizer, loader, accumulate_steps, batches):
    largest_batches_fit(model, optimizer, batches)
    for i, batch in enumerate(loader):
        model(batch).mean().backward()
        if (i + 1) % accumulate_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_loop_that_only_tries_tells_no_k() -> None:
    source = parse(TRIAL.encode(), "train.py")
    assert isinstance(source, Source)
    named = {trace.accumulation.text for each in rehearsals(source) for trace in each.traces(3) if trace.accumulation is not None}
    assert named == {"accumulate_steps"}
