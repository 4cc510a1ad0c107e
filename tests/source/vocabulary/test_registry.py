"""Frameworks are found by themselves; what is told of them in a second place is the same."""

from __future__ import annotations

from accumlint.source.reading.imports import SPOKEN_FOR
from accumlint.source.reading.parse import Source, parse
from accumlint.source.reading.sieve import FRAMEWORK_ENTRIES
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.source.vocabulary.registry import frameworks

TWO_LOOPS = """
import torch, fastai
from ignite.engine import Engine

def f(model, opt, loader, k):
    for i, batch in enumerate(loader):
        (model(batch).mean() / k).backward()
        if i % k == k - 1:
            opt.step()
            opt.zero_grad()

def g(model, opt, loader, k):
    def update(engine, batch):
        (model(batch).mean() / k).backward()
        if engine.state.iteration % k == 0:
            opt.step()
            opt.zero_grad()
    Engine(update).run(loader)
"""


def test_the_sieve_knows_the_entries_of_every_framework() -> None:
    told = {pair for module in frameworks() for pair in getattr(module, "SIEVE", ())}
    assert told == set(FRAMEWORK_ENTRIES)


def test_no_file_of_a_framework_is_read_where_its_vocabulary_speaks() -> None:
    packages = {name for module in frameworks() for name in module.PACKAGES}
    assert packages >= SPOKEN_FOR


def test_every_framework_says_in_its_first_line_what_it_is() -> None:
    for module in frameworks():
        name, colon, _ = (module.__doc__ or "").partition(":")
        assert colon, module.__name__
        assert "\n" not in name, module.__name__


def test_only_frameworks_that_take_part_are_named() -> None:
    source = parse(TWO_LOOPS.encode(), "train.py")
    assert isinstance(source, Source)
    named = {each.function: each.traces(3)[0].frameworks for each in rehearsals(source)}
    assert named.pop("f") == ()
    assert [name.partition(" ")[0] for name in named.pop("g")] == ["PyTorch-Ignite"]
    assert not named
