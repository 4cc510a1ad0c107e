"""Means whose number of targets is known to differ by what stands in other files: masks, ignored labels, models by annotation."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from accumlint.linter import lint_file
from accumlint.source.reading.imports import Imports
from tests.source.across.conftest import Lint

TRAIN = """
    {imports}
    import torch

    def train(args, loader, model{annotation}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, batch in enumerate(loader):
            loss = model(batch["speech"], batch["lengths"]) / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
FOUND = ("main.py", "ACC201", 'loss = model(batch["speech"], batch["lengths"]) / args.accum')
INFILLER = """
    from torch import nn
    from torch.nn import functional as F
    {imports}

    class Infiller(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body = Backbone(width)
            self.width = width

        def span_mask(self, lengths, steps):
            return steps < lengths.view(-1, 1)

        def forward(self, speech, lengths):
            restored = self.body(speech)
            error = F.mse_loss(restored, speech, reduction="none")
            mask = {mask}
            return {loss}
"""
MASKS = {
    "lens_to_mask(lengths)": True,
    "self.span_mask(lengths, torch.arange(9))": True,
    "speech.ne(0)": True,
    "draw(speech)": False,
}
LOSSES = (
    "error[mask].mean()",
    "(error * mask).sum() / mask.sum()",
    "(error * mask.unsqueeze(-1).float()).sum() / (mask.float().sum() + 1e-5)",
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_masks_of_a_model_that_an_annotation_names(lint: Lint, mask: str, loss: str) -> None:
    files = {
        "main.py": TRAIN.format(imports="from infiller import Infiller", annotation=": Infiller"),
        "infiller.py": INFILLER.format(
            imports="import torch\n    from elsewhere import Backbone, draw, lens_to_mask", mask=mask, loss=loss
        ),
    }
    assert lint(files) == ({FOUND} if MASKS[mask] else set())


def test_a_model_without_an_annotation_is_not_known(lint: Lint) -> None:
    files = {
        "main.py": TRAIN.format(imports="from infiller import Infiller", annotation=""),
        "infiller.py": INFILLER.format(
            imports="from elsewhere import Backbone, lens_to_mask", mask="lens_to_mask(lengths)", loss=LOSSES[0]
        ),
    }
    assert lint(files) == set()


SCRIPT = """
    import torch
    from helpers.build import build

    def main(args, loader):
        model = build(args)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, batch in enumerate(loader):
            loss = model(batch["speech"], batch["lengths"]) / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
BUILD = """
    from models.infiller import Infiller

    def build(args):
        return Infiller(args.width)
"""
CLEARED = """
    def cleared(optimizer):
        optimizer.zero_grad()
        return optimizer
"""
PATHS = {
    "sys.path.append(os.path.join(os.path.dirname(__file__), os.path.pardir))": True,
    "sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), '..')))": True,
    "sys.path.insert(0, str(Path(__file__).resolve().parent.parent))": True,
    "sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))": True,
    "sys.path.append(os.path.dirname(__file__))": False,
    "HERE = os.path.join(os.path.dirname(__file__), os.path.pardir)": False,
}


@pytest.mark.parametrize("path", PATHS)
def test_folders_that_a_script_puts_on_the_path(tmp_path: Path, path: str) -> None:
    script, helper = tmp_path / "work" / "scripts" / "main.py", tmp_path / "work" / "library" / "build.py"
    for file, text in ((script, path), (helper, "")):
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    assert Imports().module(str(script), "library.build") == (str(helper) if PATHS[path] else None)


@pytest.mark.parametrize("marked", [True, False])
def test_a_helper_imports_from_the_folder_of_the_script(tmp_path: Path, marked: bool) -> None:
    files = {
        "main.py": SCRIPT,
        "helpers/build.py": BUILD,
        "models/infiller.py": INFILLER.format(
            imports="from elsewhere import Backbone, lens_to_mask", mask="lens_to_mask(lengths)", loss=LOSSES[0]
        )
        + CLEARED,
        **({"pyproject.toml": ""} if marked else {}),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    assert [each.code for each in lint_file(str(tmp_path / "main.py"))] == ["ACC201"]


LABELS = """
    import tokens
    import torch
    from torch.nn.utils.rnn import pad_sequence
    {imports}

    def collate(samples):
        labels = pad_sequence([one["labels"] for one in samples], padding_value={padding})
        return {{"ids": pad_sequence([one["ids"] for one in samples]), "labels": labels}}

    def main(args, data, model):
        loader = torch.utils.data.DataLoader(data, collate_fn=collate)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, batch in enumerate(loader):
            batch = {{name: value.to(args.device) for name, value in batch.items()}}
            if "ids" in batch:
                seen = batch["ids"].numel()
            elif "embeddings" in batch:
                seen = batch["embeddings"].size(1)
            else:
                raise ValueError(batch)
            loss = model(**batch).loss / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
PADDINGS = {"tokens.LABEL_PADDING": True, "IGNORE_TOKEN_ID": True, "tokens.PAD": False, "PAD_ID": False}


@pytest.mark.parametrize("padding", PADDINGS)
def test_constants_that_losses_ignore(lint: Lint, padding: str) -> None:
    files = {
        "main.py": LABELS.format(imports="from elsewhere import IGNORE_TOKEN_ID, PAD_ID", padding=padding),
        "tokens.py": "LABEL_PADDING = -100\nPAD = 0\n",
    }
    found = {code for _, code, _ in lint(files)}
    assert found == ({"ACC201"} if PADDINGS[padding] else set())


COUNTED = """
    import torch
    import torch.distributed as dist
    from elsewhere import fused_loss
    from torch.nn.parallel import DistributedDataParallel

    def main(args, loader, net):
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for window in loader:
            total = sum((batch["labels"] != -100).sum() for batch in window)
            dist.all_reduce(total)
            for at, batch in enumerate(window):
                model.require_backward_grad_sync = at == len(window) - 1
                loss = fused_loss(model(batch["ids"]), batch["labels"])
                valid = (batch["labels"] != -100).sum()
                loss = {loss}
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
SCALES = {
    "loss * valid / total": True,
    "loss * valid / total * dist.get_world_size()": False,
    "loss / total": False,  # nobody knows what the function gives
}


@pytest.mark.parametrize("scale", SCALES)
def test_a_loss_times_its_own_count_is_a_mean(lint: Lint, scale: str) -> None:
    found = {code for _, code, _ in lint({"main.py": COUNTED.format(loss=scale)})}
    assert found & {"ACC203"} == ({"ACC203"} if SCALES[scale] else set())


AGGREGATED = """
    import torch

    def main(args, loader, policy):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, batch in enumerate(loader):
            gains = -(policy(batch["ids"]).log_softmax(-1)[..., 0])
            loss = {loss} / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
AGGREGATIONS = {
    '(gains * batch["completion_mask"]).sum() / batch["completion_mask"].sum()': True,
    '(gains * batch["completion_mask"]).sum() / batch["completion_mask"].sum().clamp(min=1.0)': True,
    '((gains * batch["completion_mask"]).sum(-1) / batch["completion_mask"].sum(-1)).mean()': False,
    '(gains * batch["share"]).sum() / batch["share"].sum()': False,
    '(gains * batch["share"]).sum() / batch["completion_mask"].sum()': False,
}


@pytest.mark.parametrize("loss", AGGREGATIONS)
def test_what_a_mask_by_its_name_leaves(lint: Lint, loss: str) -> None:
    found = {code for _, code, _ in lint({"main.py": AGGREGATED.format(loss=loss)})}
    assert found == ({"ACC201"} if AGGREGATIONS[loss] else set())


COLLATED = """
    import torch
    import transformers
    from transformers import AutoModelForTokenClassification

    def main(args, data, tokenizer):
        model = AutoModelForTokenClassification.from_pretrained(args.name)
        loader = torch.utils.data.DataLoader(data, collate_fn=transformers.{collator})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, batch in enumerate(loader):
            loss = model(**batch).loss / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
COLLATORS = {
    "DataCollatorForTokenClassification(tokenizer)": True,
    "DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)": True,
    "DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)": True,
    "DataCollatorForLanguageModeling(tokenizer, mlm=False)": False,
    "DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=tokenizer.pad_token_id)": False,
    "DataCollatorWithPadding(tokenizer)": False,
}


@pytest.mark.parametrize("collator", COLLATORS)
def test_collators_that_leave_targets_out(lint: Lint, collator: str) -> None:
    found = {code for _, code, _ in lint({"main.py": COLLATED.format(collator=collator)})}
    assert found == ({"ACC201"} if COLLATORS[collator] else set())


MODES = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Model(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.head = nn.Linear(width, width)

        def forward(self, ids, labels):
            logits = self.head(ids)
            return F.cross_entropy(logits, labels, reduction={reduction})

    def main(args, loader):
        model = Model(args.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, (ids, labels) in enumerate(loader):
            model(ids, labels).backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
"""


@pytest.mark.parametrize(
    ("reduction", "codes"), [('"sum" if self.training else "mean"', set()), ('"mean" if self.training else "sum"', {"ACC202"})]
)
def test_what_trains_is_in_training_mode(lint: Lint, reduction: str, codes: set[str]) -> None:
    assert {code for _, code, _ in lint({"main.py": MODES.format(reduction=reduction)})} == codes


KEPT = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Model(nn.Module):
        def __init__(self, width, ignore_index=-100):
            super().__init__()
            self.head = nn.Linear(width, width)
            self.ignore_index = ignore_index

        def forward(self, ids, labels):
            logits = self.head(ids)
            kept = labels != self.ignore_index
            losses = F.cross_entropy(logits, labels, reduction="none")
            return losses[kept].mean()

    def main(args, loader):
        model = Model(args.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, (ids, labels, lengths) in enumerate(loader):
            {labels}
            (model(ids, labels) / args.accum).backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(("labels", "codes"), [("pass", set()), ("labels[lengths == 0] = -100", {"ACC201"})])
def test_an_index_to_ignore_that_nothing_makes(lint: Lint, labels: str, codes: set[str]) -> None:
    assert {code for _, code, _ in lint({"main.py": KEPT.format(labels=labels)})} == codes


NAMED = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from transformers import PreTrainedModel

    class BertForPreTrainingLossMask(PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.head = nn.Linear(8, 8)

        def forward(self, ids, mask):
            losses = F.cross_entropy(self.head(ids), ids, reduction="none")
            return (losses * mask.ne(0)).sum() / mask.ne(0).sum()

    def main(args, loader):
        model = BertForPreTrainingLossMask.from_pretrained(args.name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) % args.accum == 0
        for step, (ids, mask) in enumerate(loader):
            (model(ids, mask) / args.accum).backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


def test_a_pretrained_model_named_after_its_loss(lint: Lint) -> None:
    assert {code for _, code, _ in lint({"main.py": NAMED})} == {"ACC201"}


def test_choices_that_hang_on_many_conditions(lint: Lint) -> None:
    """Each choice stands in the next one twice: going through all ways to it would double with every condition."""
    choices = "\n".join(
        f"        loss_fn = wrapped(loss_fn) if args.flag{at} else either(loss_fn, loss_fn if args.other{at} else None)" for at in range(40)
    )
    source = f"""
    import torch
    from torch import nn

    def wrapped(one):
        return one

    def either(one, other):
        return one if other is None else other

    def main(args, loader, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = nn.CrossEntropyLoss()
{choices}
        assert len(loader) % args.accum == 0
        for step, (ids, labels) in enumerate(loader):
            (loss_fn(model(ids), labels) / args.accum).backward()
            if (step + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """
    assert lint({"main.py": source}) == set()
