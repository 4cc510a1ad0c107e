"""Replacing functions of other modules, so that all of it can be taken back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patches:
    """What was replaced or registered, undone in reverse order.

    What was replaced while other patches stood is undone before theirs: until then those only pass calls on.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._over = False

    def replace(self, owner: Any, name: str, make: Make) -> None:
        """Puts `make(original)` in the place of an attribute of a module or class; nothing happens where there is none."""
        held = vars(owner).get(name)
        original = getattr(owner, name, None)
        if original is None:
            return
        plain = held.__func__ if isinstance(held, (staticmethod, classmethod)) else original
        made = functools.wraps(plain)(make(plain))
        setattr(owner, name, type(held)(made) if isinstance(held, (staticmethod, classmethod)) else made)
        self._undo.append(functools.partial(_restore, owner, name, held, made))
        if self not in _STANDING:
            _STANDING.append(self)

    def on_undo(self, action: Callable[[], object]) -> None:
        """What else has to be taken back, such as the removal of a hook."""
        self._undo.append(action)

    def undo(self) -> None:
        self._over = True
        if self not in _STANDING:
            self._take_back()
        while _STANDING and _STANDING[-1]._over:
            _STANDING.pop()._take_back()

    def _take_back(self) -> None:
        while self._undo:
            self._undo.pop()()


_STANDING: list[Patches] = []  # in the order in which they were put up


def _restore(owner: Any, name: str, held: Any, made: Any) -> None:
    if held is None:
        if vars(owner).get(name) is not None:
            delattr(owner, name)
    else:
        setattr(owner, name, held)
