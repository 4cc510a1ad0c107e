"""Where the index that losses ignore is written: behind the targets of a sample, or in front of them."""

from __future__ import annotations

import ast

import pytest

from accumlint.source.reading.shifted import drops_the_first, fills_behind, name_of
from accumlint.source.reading.targets import find_ignored_targets


@pytest.mark.parametrize(
    ("source", "behind"),
    [
        ("labels = ids + [-100] * missing", True),
        ("labels = [-100] * len(prompt) + answer", False),
        ("labels = [-100] * len(prompt) + answer + [-100] * missing", False),
        ("labels = pad_sequence(rows, batch_first=True, padding_value=-100)", True),
        ("labels = pad_sequence(rows, batch_first=True, padding_value=-100, padding_side='left')", False),
        ("labels = F.pad(labels, (0, missing), 'constant', -100)", True),
        ("labels = F.pad(labels, (0, missing), value=-100)", True),
        ("labels = F.pad(labels, (missing, 0), 'constant', -100)", False),
        ("labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)", True),
        ("labels = ids.masked_fill(positions >= lengths, -100)", True),
        ("labels = ids.masked_fill(positions < prompt_lengths, -100)", False),
        ("labels[labels == pad] = -100", True),
        ("labels[:, length:] = -100", True),
        ("labels[:, :prompt] = -100", False),
        ("labels = ids", False),
    ],
)
def test_behind_or_in_front(source: str, behind: bool) -> None:
    tree = ast.parse(source)
    assert fills_behind(tree, find_ignored_targets(tree)) is behind


@pytest.mark.parametrize(
    ("index", "drops"),
    [("[:, 1:]", True), ("[..., 1:]", True), ("[1:]", True), ("[:, :-1]", False), ("[1:, :]", False), ("[:, 1:5]", False)],
)
def test_what_drops_the_first(index: str, drops: bool) -> None:
    subscript = ast.parse(f"x{index}", mode="eval").body
    assert isinstance(subscript, ast.Subscript)
    assert drops_the_first(subscript.slice) is drops


@pytest.mark.parametrize(("labels", "name"), [("labels", "labels"), ("batch['labels']", "labels"), ("self.batch.tgt", "tgt"), ("f(x)", "")])
def test_the_name_of_labels(labels: str, name: str) -> None:
    assert name_of(ast.parse(labels, mode="eval").body) == name
