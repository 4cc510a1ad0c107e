"""What `accumulate` or `no_sync` is given is not the wrapper that is trained, or not all of them.

## What it does
Reports an `accumulate` or `no_sync` call of an engine that gets a list, a tuple, a dict, a generator or a tensor where it wants
models; one that gets the raw module while the loop trains the prepared one; and one that names only some of the wrappers which
train inside it.

## Why is this bad?
Accelerate asks each argument for its `no_sync` and does nothing, without a word, where there is none. The window is counted as usual and
the update is right, but the wrappers that were meant to keep quiet reduce all their gradients in every micro-batch: K times the
communication that accumulation was to save.

## Example
```python
models = [encoder, decoder]
for batch in loader:
    with accelerator.accumulate(models):
        accelerator.backward(criterion(decoder(encoder(batch))))
        optimizer.step()
        optimizer.zero_grad()
```
Use instead:
```python
models = [encoder, decoder]
for batch in loader:
    with accelerator.accumulate(*models):
        accelerator.backward(criterion(decoder(encoder(batch))))
        optimizer.step()
        optimizer.zero_grad()
```

## How it is measured
A context that is entered with something that has no `no_sync`; buckets of one wrapper reduced in each micro-batch, those of another once a
window.

## When it is silent
- The engine's K is 1, or it was given none.
- The model that is left out is frozen, or its forward went round its wrapper (ACC108).
- The script raises for that combination of settings.
- All are named, in one call or in several `no_sync` contexts around the same backward.

## References
- https://huggingface.co/docs/accelerate/package_reference/accelerator (`accumulate`, `no_sync`)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.rules._order import family, forwards_of, sureness
from accumlint.rules._sync import times, trains
from accumlint.trace import Actor, Event, Kind, Trace, Window, Wrapper

CODE = "ACC109"
NO_MODEL = "no-model"
UNPACKED = {"dict": "*models.values()"}
FORMS = ("list", "tuple", "set", "dict", "generator", "tensor")


@rule(
    CODE,
    "model-left-out",
    Severity.WARNING,
    measured="a context entered with what has no no_sync; some wrappers reduce K times an update, others once",
    exception="a run in one process has no wrapper; the raw module in place of its wrapper leaves no event",
)
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    for window in trace.all_windows():
        if view.size(window) < 2:
            continue
        for number in view.numbers(window):
            backwards = tuple(one for one in view.own(window) if one.micro_batch == number)
            entries = _entries(trace, backwards)
            yield from _no_models(trace, window, entries, backwards)
            yield from _raw_modules(trace, window, entries, backwards)
            yield from _left_out(trace, window, entries, backwards)


def _entries(trace: Trace, backwards: tuple[Event, ...]) -> tuple[Event, ...]:
    """The contexts of this micro-batch that were entered before its last backward."""
    last = backwards[-1]
    return tuple(
        event
        for event in trace.of(Kind.SYNC_OFF)
        if "context" in event.options and event.micro_batch == last.micro_batch and event.index < last.index
    )


def _no_models(trace: Trace, window: Window, entries: tuple[Event, ...], backwards: tuple[Event, ...]) -> Iterator[Finding]:
    for entry in entries:
        if NO_MODEL not in entry.options:
            continue
        form = next((one for one in FORMS if one in entry.options), "no model")
        article = "a" if form != "no model" else ""
        yield at(
            CODE,
            entry,
            f"`{entry.text}` is given {article} {form}, which has no `no_sync`: nothing is switched off, and what is trained here "
            f"reduces its gradients {times(trace)} an update".replace("  ", " "),
            help=f"unpack it, so that each model is an argument of its own: `accumulate({UNPACKED.get(form, '*models')})`",
            window=window,
            guilty=(entry, backwards[-1]),
        )


def _raw_modules(trace: Trace, window: Window, entries: tuple[Event, ...], backwards: tuple[Event, ...]) -> Iterator[Finding]:
    for entry in entries:
        model = entry.model
        if model is None or model.wrapper is not Wrapper.NONE or model.base is not None:
            continue
        trained = next((one for one in _trained(trace, window, backwards) if _model(one).base == model.uid), None)
        if trained is not None and trained.index > entry.index:
            yield at(
                CODE,
                entry,
                f"`{entry.text}` is given the module behind the wrapper that `{trained.text}` trains: it has no `no_sync`, "
                f"so the gradients are reduced {times(trace)} an update",
                help="give it what `prepare` returned",
                window=window,
                guilty=(entry, trained),
            )


def _left_out(trace: Trace, window: Window, entries: tuple[Event, ...], backwards: tuple[Event, ...]) -> Iterator[Finding]:
    named = {family(entry.model) for entry in entries if entry.model is not None}
    first = next((entry for entry in entries if entry.model is not None and _is_quiet(trace, entry, backwards)), None)
    if first is None or any(NO_MODEL in entry.options or "spread" in entry.options for entry in entries):
        return
    for forward in _trained(trace, window, backwards):
        model = _model(forward)
        if family(model) in named or forward.index < first.index or forward.sync is not True:
            continue
        if "accumulate" not in first.options and not _share_a_backward(trace, first, forward, backwards):
            continue
        yield at(
            CODE,
            first,
            f"`{first.text}` does not name `{model.name}`, which is trained in it too: that one reduces its gradients "
            f"{times(trace)} an update",
            help=f"name all of them in one call: `accumulate({_name(first)}, {model.name})`",
            window=window,
            confidence=sureness(trace, first, backwards[-1], model),
            guilty=(first, forward, backwards[-1]),
        )


def _is_quiet(trace: Trace, entry: Event, backwards: tuple[Event, ...]) -> bool:
    """Whether some forward of this micro-batch kept quiet because of this entry."""
    return any(
        forward.sync is False and forward.model is not None and entry.model is not None and family(forward.model) == family(entry.model)
        for backward in backwards
        for forward in forwards_of(trace, backward)
    )


def _share_a_backward(trace: Trace, entry: Event, forward: Event, backwards: tuple[Event, ...]) -> bool:
    """Whether the loss of a model that was named and of one that was not are one."""
    return any(forward.index in backward.forwards and _is_quiet(trace, entry, (backward,)) for backward in backwards)


def _trained(trace: Trace, window: Window, backwards: tuple[Event, ...]) -> Iterator[Event]:
    """The forwards of wrappers that decide there and whose parameters this window's step uses."""
    for backward in backwards:
        for forward in forwards_of(trace, backward):
            model = forward.model
            if model is None or forward.bypass or not forward.reaches or not _decides_in_forward(model):
                continue
            if forward.micro_batch == backward.micro_batch and trains(window.optimizer, model):
                yield forward


def _decides_in_forward(model: Actor) -> bool:
    return model.known and (model.wrapper.reads_flag_in_forward or (model.wrapper is Wrapper.UNKNOWN and "prepared" in model.options))


def _model(forward: Event) -> Actor:
    assert forward.model is not None
    return forward.model


def _name(entry: Event) -> str:
    return entry.model.name if entry.model is not None else "model"
