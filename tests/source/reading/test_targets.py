"""Where the index that a loss ignores is written for targets, and where it only stands for something that is missing."""

from __future__ import annotations

import ast

import pytest

from accumlint.source.reading.targets import find_ignored_targets


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("label = numbers[example.label] if example.label is not None else -100", False),
        ("label = -100 if label is None else numbers[label]", False),
        ("labels = [numbers[label] if label is not None else -100 for label in words]", True),
        ("labels = [-100 if word is None else labels[word] for word in words]", True),
        ("label = -100 if word is None else labels[word]", True),
        ("label = numbers[label] if kept else -100", True),
    ],
)
def test_a_class_that_an_example_lacks_is_no_ignored_target(source: str, found: bool) -> None:
    assert bool(list(find_ignored_targets(ast.parse(source)))) is found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("all_logits = numpy.full((len(data), longest), -100)", False),
        ("F.pad(start_logits, (0, more), value=-100)", False),
        ("scores[~mask] = fill(-100)", False),
        ("labels = numpy.full((len(data), longest), -100)", True),
        ("F.pad(labels, (0, more), value=-100)", True),
        ("batch['labels'] = rows.masked_fill(rows == 0, -100)", True),
        ("predicted_labels = numpy.full((len(data), longest), -100)", True),
    ],
)
def test_what_fills_up_outputs_is_no_ignored_target(source: str, found: bool) -> None:
    assert bool(list(find_ignored_targets(ast.parse(source)))) is found
