"""Which vocabularies a program calls for: torch's always, a framework's where the program shows that framework."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType

from accumlint.source.reading.index import Index
from accumlint.source.vocabulary import (
    bookkeeping,
    distributed,
    itertools_words,
    torch_launch,
    torch_objects,
    torch_tensors,
    torch_training,
)
from accumlint.source.vocabulary.base import Vocabulary
from accumlint.source.vocabulary.project_wrappers import Wrappers, project_wrappers

TORCH = (
    torch_training,
    distributed,
    bookkeeping,
    torch_objects,
    torch_launch,
    itertools_words,
    torch_tensors,
)  # in the order in which they are asked


@cache
def frameworks() -> tuple[ModuleType, ...]:
    """The vocabularies beside this module that name the packages they are for."""
    package = importlib.import_module("accumlint.source.vocabulary")
    found = (importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__))
    return tuple(module for module in found if hasattr(module, "PACKAGES"))


def vocabulary_for(index: Index, wrappers: Wrappers = ()) -> Vocabulary:
    """The words that a program is rehearsed with, its project's own first; the index learns from them which calls bring about events."""
    chosen = tuple(module for module in frameworks() if _is_shown(module, index))
    vocabulary = _together(chosen, wrappers)
    if wrappers:
        index.recognisers.append(project_wrappers(wrappers).recognise)
    index.learn_words(vocabulary.kinds, vocabulary.loops, vocabulary.tracked, vocabulary.launchers)
    return vocabulary


def _is_shown(module: ModuleType, index: Index) -> bool:
    if index.packages & module.PACKAGES or index.identifiers & getattr(module, "SIGNS", frozenset()):
        return True
    shown = getattr(module, "shown", None)
    return shown is not None and bool(shown(index))


@cache
def _together(chosen: tuple[ModuleType, ...], wrappers: Wrappers) -> Vocabulary:
    own = (project_wrappers(wrappers),) if wrappers else ()
    return Vocabulary((*own, *chosen, *TORCH))
