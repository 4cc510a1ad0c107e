"""Models and losses of a project's own: what is made by name, what a mask leaves of the targets, what is chosen by a mode."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from accumlint.source.reading.imports import Imports
from accumlint.source.rehearsal.machine import names_class
from tests.source.across.conftest import Lint

TAGGER = """
    from torch import nn
    from transformers import PreTrainedModel

    class Tagger(PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.head = nn.Linear(8, 3)

        def forward(self, ids, mask, labels):
            logits = self.head(ids)
            {select}
            loss = nn.CrossEntropyLoss()(logits, labels)
            return (loss, logits)
"""
TRAIN = """
    import torch
    {imports}

    def main(args, loader):
        model = {model}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, (ids, mask, labels) in enumerate(loader):
            loss = model(ids, mask, labels)[0] / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
FOUND = ("main.py", "ACC201", "loss = model(ids, mask, labels)[0] / args.accum")
SELECTIONS = {
    "a compared mask": (
        "active = mask.view(-1) == 1\n            logits, labels = logits.view(-1, 3)[active], labels.view(-1)[active]",
        True,
    ),
    "a mask of padding": ("logits = logits.masked_select(pad_mask)\n            labels = labels.masked_select(pad_mask)", True),
    "nothing": ("pass", False),
    "a fixed slice": ("logits, labels = logits[:, 1:], labels[:, 1:]", False),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_mean_over_what_a_mask_leaves(lint: Lint, selection: str) -> None:
    select, uneven = SELECTIONS[selection]
    train = TRAIN.format(imports="from tagger import Tagger", model="Tagger.from_pretrained(args.name)")
    found = lint({"main.py": train, "tagger.py": TAGGER.format(select=select)})
    assert found == ({FOUND} if uneven else set())


def test_a_file_does_not_import_itself(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "model.py", "utils/model.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    inner = str(tmp_path / "utils" / "model.py")
    assert Imports().module(inner, "model") == str(tmp_path / "model.py")
    assert Imports().module(str(tmp_path / "utils" / "other.py"), "model") == inner


MODES = """
    import torch

    def main(args, loader):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if args.mode == "benchmark":
            loop = benchmark
        else:
            loop = train
        if args.mode == "test":
            test(model, loader)
            return
        loop(args, model, optimizer, loader)

    def test(model, loader):
        model.train()
        model.eval()

    def benchmark(args, model, optimizer, loader):
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def train(args, model, optimizer, loader):
        assert len(loader) % args.accum == 0
        for step, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(x), y) / args.accum
            loss.backward()
            if step % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


def test_what_a_mode_chooses_is_rehearsed_in_its_mode(lint: Lint) -> None:
    assert lint({"main.py": MODES}) == {("main.py", "ACC306", "if step % args.accum == 0:")}


HEADS = """
    import torch
    from torch import nn

    class Detector(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            outputs, losses = [], []
            for layer in self.layers:
                x = layer(x)
                if layer.gives_output:
                    pass
                elif layer.is_head:
                    outputs.append(x)
            return outputs

    def total(outputs, targets):
        loss = torch.zeros(1)
        for at, output in enumerate(outputs):
            loss += nn.functional.mse_loss(output, targets[at])
        return loss

    def main(args, loader):
        model = Detector(args.layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, (x, targets) in enumerate(loader):
            loss = total(model(x), targets)
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


def test_losses_of_several_heads_are_the_models(lint: Lint) -> None:
    assert lint({"main.py": HEADS}) == {("main.py", "ACC202", "loss.backward()")}


@pytest.mark.parametrize("made", ["chosen.Model(args)", "chosen.__dict__[args.model](args)"])
def test_making_a_model_runs_none(lint: Lint, made: str) -> None:
    main = f"""
        import importlib
        from train import train

        def main(args, batches):
            chosen = importlib.import_module("models." + args.model)
            model = {made}.to(args.device)
            train(model, batches, args.lr)
    """
    loop = """
        import torch

        def train(model, batches, lr):
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            for x, y in batches:
                outputs = model(x)
                model.zero_grad()
                loss = torch.nn.functional.mse_loss(outputs, y)
                loss.backward()
                optimizer.step()
    """
    assert lint({"main.py": main, "train.py": loop}) == set()
    assert lint({"main.py": main, "train.py": loop.replace("model.zero_grad()", "pass")}) == {("train.py", "ACC303", "optimizer.step()")}


@pytest.mark.parametrize(
    ("called", "makes"),
    [
        ("Adapter(unet)", True),
        ("zoo.Adapter(unet)", True),
        ("MODELS[name](unet)", True),
        ("AdapterModel.from_unet(unet)", True),
        ("factory.from_model(unet)", True),
        ("adapter(unet)", False),
        ("self.Adapter(x)", False),
        ("adapter.unet(x)", False),
    ],
)
def test_what_is_spelled_like_a_class_makes_a_model(called: str, makes: bool) -> None:
    call = ast.parse(called, mode="eval").body
    assert isinstance(call, ast.Call)
    assert names_class(call.func) is makes


def test_what_a_model_gives_is_part_of_it(lint: Lint) -> None:
    main = """
        import torch
        from transformers import AutoModel

        def main(args, loader):
            encoder = AutoModel.from_pretrained(args.name)
            optimizer = torch.optim.AdamW(encoder.get_input_embeddings().parameters(), lr=args.lr)
            step = 0
            for ids, wanted in loader:
                loss = torch.nn.functional.mse_loss(encoder(ids)[0], wanted) / args.accum_iter
                loss.backward()
                if step % args.accum_iter == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                step += 1
    """
    assert lint({"main.py": main}) == {("main.py", "ACC306", "if step % args.accum_iter == 0:")}
