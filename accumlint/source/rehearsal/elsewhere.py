"""What a rehearsal remembers of calls that nobody could follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from accumlint.source.rehearsal.values import Key, Value
from accumlint.trace import Place


@dataclass(slots=True)
class Elsewhere:
    """Objects and answers that come from what is not there."""

    sync_asked: dict[str, set[Key]] = field(default_factory=dict)  # open conditions on which synchronisation hung, by what they ask
    asked_at: dict[Place, dict[str, set[Key]]] = field(default_factory=dict)  # likewise updates and such, by the tests that asked
    moved: set[Key] = field(default_factory=set)  # objects nobody knows, one of whose methods was called in a loop for what it does
    lent: set[Key] = field(default_factory=set)  # what unknown calls made of a model
    held: dict[Key, tuple[Value, ...]] = field(default_factory=dict)  # what they were given that may train, by what they made
    told: set[int] = field(default_factory=set)  # optimizers that one was given together with K, and averages that were given one
    answers: set[Key] = field(default_factory=set)  # of those that were given data or a loss
