"""Ignite's engines: which events run which handlers, and what an update function is called with."""

from __future__ import annotations

import pytest

from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind, Trace

HEAD = """
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
import ignite.distributed as idist
"""
UPDATE = """
def main(model, loader, epochs, k):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def update(engine, batch):
        (model(batch).mean() / k).backward()
    trainer = Engine(update)
"""
STEP = """
    {how}
    def apply({parameters}):
        optimizer.step()
        optimizer.zero_grad()
"""
RUN = """
    trainer.run(loader, max_epochs=epochs)
"""


def traced(text: str) -> Trace:
    source = parse(text.encode(), "train.py")
    assert isinstance(source, Source)
    (trace,) = (each.traces(3)[0] for each in rehearsals(source))
    return trace


def sizes(trace: Trace) -> list[int]:
    return [window.size for window in trace.windows()]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ("Events.ITERATION_COMPLETED", [1] * 14),
        ("Events.ITERATION_COMPLETED(every=k)", [3, 3, 3, 3]),  # 14 batches in two epochs: the count runs on
        ("Events.ITERATION_COMPLETED(once=4)", [4]),
        ("Events.EPOCH_COMPLETED", [7, 7]),
        ("Events.COMPLETED", [14]),
        ("Events.EPOCH_COMPLETED | Events.ITERATION_COMPLETED(once=2)", [2, 5, 7]),
        ("Events.ITERATION_COMPLETED(event_filter=lambda engine, count: count % k == 1)", [1, 3, 3, 3, 3]),
    ],
)
@pytest.mark.parametrize("parameters", ["", "engine"])
def test_a_handler_runs_when_its_event_comes(event: str, expected: list[int], parameters: str) -> None:
    text = HEAD + UPDATE + STEP.format(how=f"@trainer.on({event})", parameters=parameters) + RUN
    assert sizes(traced(text)) == expected


def test_an_event_kept_under_a_name() -> None:
    text = HEAD + UPDATE + "    moment = Events.ITERATION_COMPLETED(every=k)" + STEP.format(how="", parameters="engine")
    assert sizes(traced(text + "    trainer.add_event_handler(moment, apply)" + RUN)) == [3, 3, 3, 3]


def test_an_update_function_that_nobody_here_runs() -> None:
    text = """
def make_update(model, optimizer, k):
    def update(engine, batch):
        if (engine.state.iteration - 1) % k == 0:
            optimizer.zero_grad()
        (model(batch).mean() / k).backward()
        if engine.state.iteration % k == 0:
            optimizer.step()
    return update
"""
    trace = traced(HEAD + text)
    assert sizes(trace) == [3, 3]
    assert [event.micro_batch % 3 for event in trace.of(Kind.ZERO)] == [0, 0, 0]  # beside its micro-batch, the first of a window


def test_a_supervised_trainer_divides_by_k_and_steps_once_a_window() -> None:
    text = """
def main(model, loader, k):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss(), gradient_accumulation_steps=k)
    trainer.run(loader)
"""
    trace = traced(HEAD + text)
    assert sizes(trace) == [3, 3]
    assert {str(event.weight) for event in trace.of(Kind.BACKWARD)} == {"1/(n·K)"}


def test_a_launcher_calls_the_function_with_its_rank() -> None:
    text = """
def training(rank, loader, k):
    model = idist.auto_model(torch.nn.Linear(2, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    def update(engine, batch):
        (model(batch).mean() / k).backward()
        if engine.state.iteration % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    Engine(update).run(loader, max_epochs=2)

def main(loader, k):
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, loader, k)
"""
    trace = traced(HEAD + text)
    assert sizes(trace) == [3, 3, 3, 3]
    assert {event.model.wrapper.value for event in trace.of(Kind.FORWARD) if event.model is not None} == {"DDP"}
