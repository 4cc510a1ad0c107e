"""Rehearsals that show the same, and conditions that change nothing."""

from __future__ import annotations

from dataclasses import replace

from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.alike import alike
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.source.rehearsal.values import nested_key
from accumlint.trace import Kind, Trace

SCRIPT = """
import argparse
import torch

args = argparse.ArgumentParser().parse_args()
model = torch.nn.Linear(4, 1)
width = 8 if args.wide else 4
names = ["a", "b"] if args.named else ["c"]
optimizer = (torch.optim.AdamW if args.decayed else torch.optim.SGD)(model.parameters(), lr=args.lr)
seen = open(args.log if args.log else "log", str(width), names)
scale = 2.0 if args.doubled else 1.0
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(x), y) * scale / args.accumulation_steps
    loss.backward()
    if (step + 1) % args.accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def traces(script: str) -> list[Trace]:
    source = parse(script.encode(), "train.py")
    assert isinstance(source, Source)
    return [trace for rehearsal in rehearsals(source) for trace in rehearsal.worlds(3)]


def test_numbers_of_objects_do_not_count() -> None:
    (trace, *_) = traces(SCRIPT)
    shifted = replace(
        trace,
        events=tuple(
            replace(
                event,
                model=event.model and replace(event.model, uid=event.model.uid + 7),
                targets=tuple(replace(each, uid=each.uid + 7, base=each.base and each.base + 7) for each in event.targets),
                reaches=frozenset(uid + 7 for uid in event.reaches),
            )
            for event in trace.events
        ),
        actors=tuple(replace(each, uid=each.uid + 7, base=each.base and each.base + 7) for each in trace.actors),
    )
    assert alike([trace], [shifted])


def test_in_how_many_pieces_data_comes_does_not_count() -> None:
    (trace, *_) = traces(SCRIPT)
    doubled = tuple(replace(event, data=(*event.data, *(number + 1_000 for number in event.data))) for event in trace.events)
    assert doubled != trace.events
    assert alike([trace], [replace(trace, events=doubled)])


def test_which_forwards_share_data_counts() -> None:
    (trace, *_) = traces(SCRIPT)
    first = next(event for event in trace.events if event.kind is Kind.FORWARD)
    shared = tuple(replace(event, data=first.data) if event.kind is Kind.FORWARD else event for event in trace.events)
    assert shared != trace.events
    assert not alike([trace], [replace(trace, events=shared)])


def test_data_taken_before_the_training_that_no_forward_uses_does_not_count() -> None:
    (trace, *_) = traces(SCRIPT)
    taken = next(event for event in trace.events if event.kind is Kind.DATA)
    unused = replace(taken, data=(1_000_000,), micro_batch=-1)
    assert alike([trace], [replace(trace, events=(unused, *trace.events))])
    assert not alike([trace], [replace(trace, events=(*trace.events, unused))])


def test_an_event_more_or_less_counts() -> None:
    (trace, *_) = traces(SCRIPT)
    without = replace(trace, events=tuple(event for event in trace.events if event.kind is not Kind.ZERO))
    assert not alike([trace], [without])
    assert not alike([trace], [trace, trace])


def test_a_setting_without_effect_gets_no_trace_and_one_with_effect_does() -> None:
    settings = {name for trace in traces(SCRIPT) for name, _ in trace.settings}
    assert not any("wide" in name or "named" in name or "log" in name for name in settings)


def test_equal_keys_are_one_and_hash_as_tuples_do() -> None:
    known: dict[tuple[object, ...], tuple[object, ...]] = {}
    inner = nested_key(("call", ("import", "a")), known)
    outer = nested_key((".", inner, "b"), known)
    assert nested_key((".", ("call", ("import", "a")), "b"), known) is outer
    assert hash(outer) == hash((".", ("call", ("import", "a")), "b"))


def test_a_sampler_is_no_schedule() -> None:
    sampler = SCRIPT + "\ndef sample(noise, t, latents):\n    return scheduler.step(noise, t, latents).prev_sample\n"
    assert all(event.kind is not Kind.SCHEDULE for trace in traces(sampler) for event in trace.events)
