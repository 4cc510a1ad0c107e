"""A finding must hold at K = 3 and at K = 2, and comes from the first world that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from accumlint.findings import Finding, Severity
from accumlint.judge import judge, judge_rehearsal
from accumlint.rule import Rule
from accumlint.trace import Evidence, Place, Trace

PLACE = Place("a.py", 1)


def world(*lines: int, settings: tuple[tuple[str, str], ...] = (), accumulates: bool = True) -> Trace:
    """A trace in which the rule below finds something on these lines."""
    facts = {"lines": tuple(Evidence(Place("a.py", line), "") for line in lines)}
    if accumulates:
        facts["means-to-accumulate"] = (Evidence(PLACE, ""),)
    return Trace("a.py", PLACE, "train", (), settings=settings, facts=facts)


@dataclass
class Worlds:
    at: dict[int, tuple[Trace, ...]]
    asked: list[int] = field(default_factory=list)

    def worlds(self, k: int, /) -> Iterator[Trace]:
        self.asked.append(k)
        return iter(self.at[k])


def on_lines(trace: Trace) -> Iterator[Finding]:
    for evidence in trace.facts.get("lines", ()):
        yield Finding("ACC301", evidence.place, f"of {trace.settings}")


RULE = Rule("ACC301", "x", Severity.ERROR, on_lines, "page")


def found(rehearsal: Worlds) -> list[tuple[int, tuple[tuple[str, str], ...]]]:
    return [(finding.place.line, finding.settings) for finding in judge_rehearsal(rehearsal, [RULE])]


def test_only_what_both_values_show() -> None:
    assert found(Worlds({3: (world(1, 2),), 2: (world(2, 3),)})) == [(2, ())]


def test_the_control_is_rehearsed_only_where_something_was_found() -> None:
    clean = Worlds({3: (world(),), 2: ()})
    assert found(clean) == []
    assert clean.asked == [3]


def test_settings_only_where_the_default_world_is_clean() -> None:
    default = world(1, settings=(("amp", "True"), ("ddp", "True")))
    other = world(1, 2, settings=(("ddp", "False"), ("amp", "True")))
    assert found(Worlds({3: (default, other), 2: (default, other)})) == [(1, ()), (2, (("ddp", "False"),))]


def test_the_rule_gives_its_severity() -> None:
    (finding,) = judge(world(1), [RULE])
    assert finding.severity is Severity.ERROR
    assert finding.trace is not None


def test_loops_that_do_not_accumulate_are_left_to_the_rules_for_every_loop() -> None:
    plain = world(1, accumulates=False)
    assert judge(plain, [RULE]) == []
    assert judge(plain, [Rule("ACC301", "x", Severity.ERROR, on_lines, "page", every_loop=True)])
