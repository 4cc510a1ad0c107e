"""A rule: one module in `rules/` whose docstring is its page and whose decorated function reads a trace."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from accumlint.findings import Finding, Severity
from accumlint.trace import Trace

Check = Callable[[Trace], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of the catalogue.

    `every_loop` marks the rules that hold for every training loop, not only for those that accumulate.
    `measured` is what a run must show, "" when only the source can tell. `exception` says why the two halves may differ.
    """

    code: str
    name: str
    severity: Severity
    check: Check
    page: str
    every_loop: bool = False
    measured: str = ""
    exception: str = ""

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.strip().splitlines()[0]


class DuplicateRuleError(Exception):
    """Two modules claim the same code or name."""


class MissingPageError(Exception):
    """A rule's module has no docstring."""


def rule(
    code: str, name: str, severity: Severity, *, every_loop: bool = False, measured: str = "", exception: str = ""
) -> Callable[[Check], Rule]:
    """Makes the decorated check a rule of the catalogue; the module's docstring becomes its page."""

    def register(check: Check) -> Rule:
        page = inspect.getdoc(sys.modules[check.__module__]) or ""
        if not page:
            raise MissingPageError(f"{check.__module__} has no docstring: a rule's page is its module's docstring")
        return Rule(code, name, severity, check, page, every_loop, measured, exception)

    return register


@functools.cache
def catalogue() -> dict[str, Rule]:
    """All rules by code, in order."""
    package = importlib.import_module("accumlint.rules")
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"accumlint.rules.{module.name}")).values():
            if isinstance(value, Rule) and found.setdefault(value.code, value) is not value:
                raise DuplicateRuleError(f"{value.code} is defined twice")
    return dict(sorted(found.items()))


def select(selectors: Iterable[str], rules: dict[str, Rule]) -> Iterator[Rule]:
    """The rules that a list of codes, prefixes, names or ALL picks out."""
    wanted = tuple(selectors)
    for one in rules.values():
        if any(each == "ALL" or one.code.startswith(each) or one.name == each for each in wanted):
            yield one
