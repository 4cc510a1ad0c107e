"""A framework's loop ends with the same parameters, bit for bit, whether it is observed or not."""

from __future__ import annotations

import pytest

from tests.runtime.ddp.ranks import run
from tests.runtime.equality.frameworks import PACKAGES, PROGRAMS
from tests.runtime.equality.programs import UPDATES, outcome

OBSERVED = {"forward", "loss", "backward", "step", "zero"}
CASES = [("accelerate", 1), ("accelerate", 2), ("lightning", 1), ("transformers", 1), ("ignite", 1)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "world"), CASES)
def test_ends_with_the_same_bits(name: str, world: int) -> None:
    pytest.importorskip(PACKAGES[name])  # imported once, before the ranks are forked
    program = PROGRAMS[name]
    plain = run(lambda: outcome(program, None), world)
    for reference in ("exact", "off") if world == 1 else ("exact",):
        seen = run(lambda reference=reference: outcome(program, reference), world)
        for rank, (alone, observed) in enumerate(zip(plain, seen, strict=True)):
            assert observed["troubles"] == [], f"rank {rank}"
            assert observed["kinds"] >= OBSERVED, f"rank {rank}"
            assert alone["updates"] == UPDATES
            for part, value in alone.items():
                assert observed[part] == value, f"{part} of rank {rank}, {reference}"
