"""Findings as JSON and back, for the cache and for what a worker process sends: only the core's own types, never pickle.

Every value of a core type is written once, in a table, after the values it is made of; elsewhere its number stands. The
events of a trace share most of what they are made of.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from typing import Any

from accumlint import findings, trace, weight
from accumlint.findings import Finding

Rename = Callable[[str], str]

_TYPES: dict[str, type] = {
    name: value
    for module in (findings, trace, weight)
    for name, value in vars(module).items()
    if isinstance(value, type) and (is_dataclass(value) or issubclass(value, enum.Enum)) and value.__module__ == module.__name__
}


class CodecError(Exception):
    """Something that is not what `encode` wrote, or cannot be written."""


def encode(those: Iterable[Finding], rename: Rename) -> dict[str, Any]:
    """Findings as JSON values, with their paths renamed."""
    encoder = _Encoder(rename)
    numbers = [encoder.value(each) for each in those]
    return {"table": encoder.table, "findings": numbers}


def decode(coded: Any, rename: Rename) -> list[Finding]:
    """The findings that `encode` made these JSON values from."""
    try:
        table: list[Any] = []
        for row in coded["table"]:
            table.append(_built(row, table, rename))
        decoded = [_value(each, table) for each in coded["findings"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CodecError(str(error)) from None
    if not all(isinstance(each, Finding) for each in decoded):
        raise CodecError("not a finding")
    return decoded


class _Encoder:
    def __init__(self, rename: Rename) -> None:
        self.rename = rename
        self.table: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._seen: dict[int, tuple[object, Any]] = {}  # by identity; holding the object keeps its id from being reused

    def value(self, value: Any) -> Any:
        if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
            return value
        known = self._seen.get(id(value))
        if known is None:
            known = self._seen[id(value)] = (value, self._coded(value))
        return known[1]

    def _coded(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [self.value(each) for each in value]
        if isinstance(value, enum.Enum):
            row: list[Any] = [type(value).__name__, value.value]
        elif isinstance(value, Fraction):
            row = ["fraction", str(value)]
        elif isinstance(value, (frozenset, set)):
            row = ["set", *sorted((self.value(each) for each in value), key=repr)]
        elif isinstance(value, Mapping):
            row = ["map", *([self.value(key), self.value(each)] for key, each in value.items())]
        else:
            row = [_name(type(value)), self._fields(value)]
        key = json.dumps(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.table)
            self.table.append(row)
        return {"#": self._numbers[key]}

    def _fields(self, value: Any) -> dict[str, Any]:
        coded: dict[str, Any] = {}
        for name, default in _fields_of(type(value)):
            each = getattr(value, name)
            if default is MISSING or each != default:
                coded[name] = self.rename(each) if name == "path" else self.value(each)
        return coded


def _name(kind: type) -> str:
    if _TYPES.get(kind.__name__) is not kind:
        raise CodecError(f"{kind.__name__} is not part of the core")
    return kind.__name__


_FIELDS: dict[type, tuple[tuple[str, Any], ...]] = {}


def _fields_of(kind: type) -> tuple[tuple[str, Any], ...]:
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple((each.name, each.default) for each in fields(kind))
    return _FIELDS[kind]


def _built(row: list[Any], table: list[Any], rename: Rename) -> Any:
    """The value of one row of the table, made of values of the rows before it."""
    name, rest = row[0], row[1:]
    if name == "fraction":
        return Fraction(rest[0])
    if name == "set":
        return frozenset(_value(each, table) for each in rest)
    if name == "map":
        return {_value(key, table): _value(each, table) for key, each in rest}
    kind = _TYPES[name]
    if issubclass(kind, enum.Enum):
        return kind(rest[0])
    arguments = dict(rest[0])
    for field, each in rest[0].items():
        if each.__class__ is dict:  # most are
            arguments[field] = table[each["#"]]
        elif each.__class__ is list:
            arguments[field] = _value(each, table)
        elif field == "path":
            arguments[field] = rename(each)
    return kind(**arguments)


def _value(value: Any, table: list[Any]) -> Any:
    kind = value.__class__
    if kind is dict:
        return table[value["#"]]
    if kind is list:
        return tuple([_value(each, table) for each in value])
    return value
