"""Datasets that lie two files away from the loop, behind a table: what they ignore is known."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

MAIN = """
    import torch
    from torch.nn import functional as F
    from pkg.make import make_dataset

    def main(args, model):
        loader = torch.utils.data.DataLoader(make_dataset(args), batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, batch in enumerate(loader):
            loss = F.cross_entropy(model(batch["ids"]), batch["labels"]) / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
MAKE = """
    from pkg.tables import DATASETS

    def make_dataset(args):
        if args.dataset not in DATASETS:
            raise ValueError(args.dataset)
        return DATASETS[args.dataset](args.split)
"""
TABLES = """
    from pkg.dialogues import get_dialogues

    DATASETS = {"dialogues": get_dialogues}
"""
DIALOGUES = """
    def get_dialogues(split):
        rows = open(split).read().split("|")
        return [{{"ids": [1] * len(row), "labels": [{ignored}] * 3 + list(row[3:])}} for row in rows]
"""


@pytest.mark.parametrize(("ignored", "found"), [("-100", True), ("-1", False)])
def test_what_a_dataset_from_a_table_ignores(lint: Lint, ignored: str, found: bool) -> None:
    files = {"main.py": MAIN, "pkg/make.py": MAKE, "pkg/tables.py": TABLES, "pkg/dialogues.py": DIALOGUES.format(ignored=ignored)}
    line = 'loss = F.cross_entropy(model(batch["ids"]), batch["labels"]) / args.accum'
    assert lint(files) == ({("main.py", "ACC201", line)} if found else set())
