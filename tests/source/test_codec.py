"""Findings as JSON and back."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from accumlint.findings import Applicability, Confidence, Edit, Finding, Fix, Severity
from accumlint.source.codec import CodecError, decode, encode
from accumlint.trace import Accumulation, Actor, Event, Evidence, Guard, Kind, Place, Role, Trace, Turn, Wrapper
from accumlint.weight import Factor, Quantity, Weight


def same(path: str) -> str:
    return path


def finding() -> Finding:
    place = Place("a.py", 3, 5, 3, 20)
    model = Actor(1, "model", Role.MODEL, Wrapper.DDP, base=2, known=True, options=frozenset({"static_graph", "prepared"}))
    optimizer = Actor(3, "opt", Role.OPTIMIZER)
    weight = Weight((Factor(Quantity.ACCUMULATION, -1, Fraction(1, 3), "accum", place, root="args.accum"),), mixed=True)
    guard = Guard(place, "ok", "data", holds=False)
    turns = (Turn(2, 0, 1, last=True),)
    events = (
        Event(0, Kind.FORWARD, place, 1, turns, "model(x)", model=model, sync=False, data=(4, 5)),
        Event(1, Kind.BACKWARD, place, 1, turns, weight=weight, forwards=(0,), reaches=frozenset({1, 2}), guards=(guard,), scaled=True),
        Event(
            2, Kind.SKIP, place, 1, guard=guard, skipped=frozenset({Kind.STEP, Kind.ZERO}), leaves="continue", options=frozenset({"agreed"})
        ),
        Event(3, Kind.STEP, Place("b.py", 9), 1, targets=(optimizer,)),
    )
    facts = {"varying-units": (Evidence(place, "pad_sequence"),)}
    trace = Trace(
        "a.py", place, "train", events, Accumulation("accum", 3, place), (("args.fp16", "True"),), facts, followed=False, limits=("x",)
    )
    fix = Fix(Applicability.UNSAFE, "move it", (Edit(place, "new\n"),))
    return Finding(
        "ACC101", place, "wrong — “ü”", "help", Confidence.MEDIUM, events[:3], (1,), (("a", "b"),), fix, Severity.ERROR, trace, 7
    )


def test_there_and_back_is_the_same() -> None:
    original = [finding(), finding()]
    coded = json.loads(json.dumps(encode(original, same)))
    back = decode(coded, same)
    assert back == original
    assert back[0].trace == original[0].trace
    assert back[0].trace is back[1].trace, "a value is written once"


def test_paths_are_renamed_everywhere() -> None:
    coded = encode([finding()], lambda path: f"key/{path}")
    assert '"path": "a.py"' not in json.dumps(coded)
    (back,) = decode(coded, lambda path: path.removeprefix("key/"))
    assert back == finding()


def test_other_types_are_refused() -> None:
    with pytest.raises(CodecError, match="range"):
        encode([Finding("ACC101", Place("a.py", 1), "", settings=range(3))], same)  # type: ignore[arg-type]


DAMAGED = [
    None,
    [],
    {},
    {"table": 3, "findings": 4},
    {"table": [[]], "findings": []},
    {"table": [["Finding", {}]], "findings": []},
    {"table": [["os.system", "x"]], "findings": []},
    {"table": [], "findings": [{"#": 0}]},
    {"table": [["Place", {"path": "a", "line": 1}]], "findings": [{"#": 0}]},
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=str)
def test_damaged_values_are_refused(damaged: object) -> None:
    with pytest.raises(CodecError):
        decode(damaged, same)
