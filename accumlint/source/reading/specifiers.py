"""Which versions a requirement allows: `>=4.40,<4.46`, `~=2.1`, `^1.2`, `==4.57.*`, `=2.4=py311` as an interval of releases."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

Version = tuple[int, ...]

LAST = 9999  # stands for "any number": the newest release before 4.46 is written (4, 45, 9999)
NEWEST: Version = (LAST,)
OLDEST: Version = ()

_NAME = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_REQUIREMENT = re.compile(rf"\s*(?:[\w-]+::)?(?P<name>{_NAME})\s*(?:\[[^\]]*\])?\s*(?P<rest>.*)", re.DOTALL)
_ALLOWED_REST = re.compile(r"$|[=<>~!^(]|@|\d|\*|v\d")
_CLAUSE = re.compile(
    r"\s*(?P<operator>===|==|~=|!=|<=|>=|<|>|=|\^|~)?\s*v?(?:\d+!)?(?P<version>\*|\d+(?:\.\d+)*)(?P<star>\.\*)?(?P<rest>.*)", re.DOTALL
)


class Range(NamedTuple):
    """The releases from `oldest` to `newest`, both allowed; at least three numbers each, but for OLDEST and NEWEST."""

    oldest: Version = OLDEST
    newest: Version = NEWEST

    @property
    def bounded(self) -> bool:
        return self != Range()

    def within(self, other: Range) -> Range:
        """What both allow."""
        return Range(max(self.oldest, other.oldest), min(self.newest, other.newest))

    def beside(self, other: Range) -> Range:
        """From the oldest to the newest that either allows."""
        return Range(min(self.oldest, other.oldest), max(self.newest, other.newest))


class Requirement(NamedTuple):
    name: str  # normalised
    text: str  # as written, without comments and markers
    range: Range


def normal(name: str) -> str:
    """The name under which a package index knows a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version(text: str) -> Version:
    """The release numbers of a version, three at least; what comes after them (`rc1`, `.post1`, `+cu121`) is left out."""
    match = re.match(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)", text)
    return _full(tuple(int(part[:9]) for part in match[1].split("."))) if match else ()


def requirement(text: str) -> Requirement | None:
    """One line of a requirements file, or None where it names no distribution."""
    written = re.split(r"\s#|;", text.split(" --", 1)[0], maxsplit=1)[0].strip().strip("\"'").strip()
    match = _REQUIREMENT.fullmatch(written)
    if match is None or not _ALLOWED_REST.match(match["rest"]):
        return None
    return Requirement(normal(match["name"]), written, allowed(match["rest"]))


def allowed(specifier: str) -> Range:
    """The interval of a specifier; alternatives (`||`) give the interval around them all."""
    specifier = specifier.strip().strip("()")
    if specifier.startswith("@"):
        return _of_reference(specifier)
    ranges = [_conjunction(part) for part in re.split(r"\|\|?", specifier)]
    found = ranges[0]
    for each in ranges[1:]:
        found = found.beside(each)
    return found


def _of_reference(text: str) -> Range:
    """`@ git+https://…@v4.46.1` and `@ https://…/name-4.46.1-py3-none-any.whl` say their version in the address."""
    match = re.search(r"@v?(\d+(?:\.\d+)+)\b|-(\d+(?:\.\d+)+)(?:[-+]|\.(?:tar|zip|whl))", text[1:])
    exact = version(match[1] or match[2]) if match else ()
    return Range(exact, exact) if exact else Range()


def _conjunction(text: str) -> Range:
    found = Range()
    for clause in re.split(r",|\s+(?=[<>=~!^])", text.strip()):
        found = found.within(_clause(clause))
    return found


def _clause(text: str) -> Range:
    match = _CLAUSE.fullmatch(text)
    if match is None or match["version"] == "*":
        return Range()
    numbers = tuple(int(part[:9]) for part in match["version"].split("."))
    operator = match["operator"] or "=="
    exact = _full(numbers)
    if operator == "=" or (operator == "==" and match["star"]):  # conda's `=4.46` means 4.46.*
        return Range(exact, _before(_next(numbers, len(numbers))))
    if operator in {"==", "==="}:
        return Range(exact, exact)
    if operator in {">=", ">"}:
        return Range(exact, NEWEST)
    if operator == "<=":
        return Range(OLDEST, exact)
    if operator == "<":
        return Range(OLDEST, _before(numbers))
    if operator in {"~=", "~", "^"}:
        return Range(exact, _before(_next(numbers, _kept(operator, numbers))))
    return Range()  # `!=` leaves the interval as it is


def _kept(operator: str, numbers: Version) -> int:
    """How many of its numbers a compatible release has in common with the one that is named."""
    if operator == "~=":
        return max(len(numbers) - 1, 1)
    if operator == "~":
        return min(len(numbers), 2)
    return next((at for at, number in enumerate(numbers, 1) if number), len(numbers))  # `^0.3.1` keeps 0.3


def _next(numbers: Version, kept: int) -> Version:
    return (*numbers[: kept - 1], numbers[kept - 1] + 1)


def _before(numbers: Version) -> Version:
    """The newest release below one: below 4.46 is 4.45.9999."""
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    if not numbers:
        return OLDEST
    below = (*numbers[:-1], numbers[-1] - 1)
    return below if len(numbers) > 2 else (*below, LAST)


def _full(numbers: Version) -> Version:
    return numbers + (0,) * (3 - len(numbers))


def around(ranges: Iterable[Range]) -> Range | None:
    """The interval around several, None where there are none."""
    found: Range | None = None
    for each in ranges:
        found = each if found is None else found.beside(each)
    return found
