"""Who divides in a Trainer's loop, by release, model, labels and what the class says; and that nothing is said where that is open."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from accumlint.linter import lint_file
from accumlint.source.reading.versions import forget

HEAD = """
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
"""
MEAN = """
def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    return (loss, outputs) if return_outputs else loss
"""
BY_K = MEAN.replace("labels.flatten())", "labels.flatten()) / self.args.gradient_accumulation_steps")
MASKED = """
def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    losses = F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten(), reduction="none")
    kept = losses[labels.flatten() != -100]
    return kept.sum() / num_items_in_batch
"""
NO_LABELS = MEAN.replace('inputs.pop("labels")', 'inputs.pop("wanted")')
OLD = MEAN.replace(", num_items_in_batch=None", "")
VARYING = """
def collate(samples):
    labels = torch.stack(samples)
    labels[labels == 0] = -100
    return {"input_ids": torch.stack(samples), "labels": labels}

"""
STEP = """
def training_step(self, model, inputs, num_items_in_batch=None):
    loss = F.cross_entropy(model(**inputs).logits.flatten(0, 1), inputs["labels"].flatten())
    self.accelerator.backward(loss{scale})
    return loss.detach()
"""
OWN_LOSS = """
def training_step(self, model, inputs, num_items_in_batch=None):
    with self.compute_loss_context_manager():
        loss = self.compute_loss(model, inputs{count})
    self.accelerator.backward(loss)
    return loss.detach()
"""
RUN = """
model = AutoModelForCausalLM.from_pretrained("some/model")
MyTrainer(model=model, args=TrainingArguments("out", gradient_accumulation_steps=8)).train()
"""


def found(
    folder: Path, *methods: str, head: str = HEAD, base: str = "Trainer", body: str = "", run: str = RUN, pinned: str = ""
) -> list[str]:
    """The codes reported for a trainer of these methods; the newest release is assumed unless one is pinned."""
    (folder / "requirements.txt").write_text(f"transformers{pinned or '>=5.20'}\n")
    members = "".join(indent(dedent(each), "    ") for each in (body, *methods))
    path = folder / "train.py"
    path.write_text(f"{head}\n\nclass MyTrainer({base}):\n{members}\n{run}")
    forget()
    return sorted({finding.code for finding in lint_file(str(path))})


@pytest.mark.parametrize(
    ("pinned", "codes"), [(">=5.20", ["ACC209"]), ("==4.57.1", ["ACC209"]), ("==4.49.0", ["ACC209"]), ("==4.45.2", [])]
)
def test_a_mean_in_place_of_a_counted_sum(tmp_path: Path, pinned: str, codes: list[str]) -> None:
    assert found(tmp_path, MEAN, pinned=pinned) == codes


@pytest.mark.parametrize(("pinned", "codes"), [(">=5.20", []), ("==4.49.0", []), ("==4.45.2", ["ACC206"])])
def test_a_division_by_hand_is_one_too_many_where_the_accelerator_divides(tmp_path: Path, pinned: str, codes: list[str]) -> None:
    assert found(tmp_path, BY_K, pinned=pinned) == codes
    assert found(tmp_path, STEP.format(scale=" / self.args.gradient_accumulation_steps"), pinned=pinned) == codes


@pytest.mark.parametrize(("pinned", "codes"), [(">=5.20", ["ACC202"]), ("==4.46.3", ["ACC202"]), ("==4.45.2", [])])
def test_a_training_step_of_its_own_must_divide_where_the_accelerator_does_not(tmp_path: Path, pinned: str, codes: list[str]) -> None:
    assert found(tmp_path, STEP.format(scale=" * 1.0"), pinned=pinned) == codes


def test_a_training_step_hands_the_count_on_or_not(tmp_path: Path) -> None:
    assert found(tmp_path, OWN_LOSS.format(count=", num_items_in_batch=num_items_in_batch")) == []
    assert found(tmp_path, OWN_LOSS.format(count="")) == ["ACC202"]


@pytest.mark.parametrize(
    ("pinned", "codes"),
    [(">=5.20", ["ACC203"]), ("==4.57.1", ["ACC203"]), ("==4.52.4", ["ACC204"])],
)
def test_the_count_is_of_all_ranks_from_some_release_on(tmp_path: Path, pinned: str, codes: list[str]) -> None:
    assert found(tmp_path, MASKED, run=VARYING + RUN, pinned=pinned) == codes


def test_the_count_is_of_one_rank_where_the_arguments_say_so(tmp_path: Path) -> None:
    run = RUN.replace("=8)", "=8, average_tokens_across_devices=False)")
    assert found(tmp_path, MASKED, run=VARYING + run) == ["ACC204"]
    assert found(tmp_path, MASKED, run=run) == []  # nothing shows that the ranks have different counts


def test_what_a_class_says_of_its_loss(tmp_path: Path) -> None:
    assert found(tmp_path, MEAN, body="loss_is_scaled_for_ga = False") == []
    assert found(tmp_path, BY_K, body="loss_is_scaled_for_ga = False") == ["ACC206"]
    assert found(tmp_path, BY_K, body="loss_is_scaled_for_ga = True") == []
    init = """
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False
    """
    assert found(tmp_path, MEAN, init) == []
    assert found(tmp_path, BY_K, init) == ["ACC206"]
    assert found(tmp_path, BY_K, init, pinned="==4.46.3") == []  # nobody divided the gradients then
    given = init.replace("(*args, **kwargs)\n        self", '(*args, compute_loss_func="own", **kwargs)\n        self')
    assert found(tmp_path, BY_K, given) == []


def test_flags_that_are_set_from_outside(tmp_path: Path) -> None:
    run = RUN.replace("MyTrainer(", "trainer = MyTrainer(").replace(
        ").train()", ")\ntrainer.model_accepts_loss_kwargs = False\ntrainer.train()"
    )
    assert found(tmp_path, MEAN, run=run) == []
    assert found(tmp_path, BY_K, run=run) == ["ACC206"]


MODULE = """
class Net(torch.nn.Module):
    def forward(self, input_ids, labels=None{more}):
        return input_ids
"""


@pytest.mark.parametrize(("more", "codes"), [("", []), (", **kwargs", ["ACC209"])])
def test_a_model_of_the_file_takes_keywords_or_not(tmp_path: Path, more: str, codes: list[str]) -> None:
    run = 'model = Net().to("cpu")\nMyTrainer(model, TrainingArguments("out", gradient_accumulation_steps=4)).train()\n'
    assert found(tmp_path, MEAN, head=HEAD + MODULE.format(more=more), run=run) == codes


@pytest.mark.parametrize(
    ("method", "base", "run"),
    [
        (NO_LABELS, "Trainer", RUN),
        (OLD, "Trainer", RUN),
        (MEAN, "Trainer", RUN.replace(", gradient_accumulation_steps=8", "")),
        (MEAN, "Trainer", RUN.replace("steps=8", "steps=1")),
        (MEAN, "Trainer", RUN.replace("AutoModelForCausalLM.from_pretrained", "load")),
        (MEAN, "Trainer", ""),
        (MEAN, "DPOTrainer", RUN),
        (MEAN, "BaseTrainer", RUN),
    ],
    ids=["no labels", "old signature", "no k", "k is 1", "a model from elsewhere", "no model", "preferences", "an unknown base"],
)
def test_nothing_is_said_where_it_is_open(tmp_path: Path, method: str, base: str, run: str) -> None:
    head = HEAD + "from trl import DPOTrainer\nfrom project.training import BaseTrainer\nfrom project import load\n"
    assert found(tmp_path, method, head=head, base=base, run=run) == []


def test_a_trainer_of_language_models_always_counts(tmp_path: Path) -> None:
    dropped = """
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs)
    """
    assert found(tmp_path, dropped, head="from trl import SFTTrainer", base="SFTTrainer", run="") == ["ACC209"]


def test_a_mixin_and_the_class_that_it_is_for(tmp_path: Path) -> None:
    head = HEAD + '\n\nclass Smooth:\n    """Goes before a trainer."""\n' + indent(dedent(MEAN), "    ")
    assert found(tmp_path, head=head, base="Smooth, Trainer", body="pass") == ["ACC209"]


def test_a_file_with_the_trainers_own_loop_is_rehearsed_as_a_loop(tmp_path: Path) -> None:
    loop = """
    def train(self):
        for step, inputs in enumerate(self.loader):
            self.training_step(self.model, inputs)
            if (step + 1) % self.args.gradient_accumulation_steps == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()
    """
    assert found(tmp_path, loop, MEAN, run="") == []


def test_what_is_filled_after_the_start_is_there_when_the_loss_is_computed(tmp_path: Path) -> None:
    kept = """
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = None

    def _prepare_inputs(self, batch):
        self.kept = (batch["labels"] != -100).sum()
        return batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.kept is not None:
            num_items_in_batch = self.kept / self.accelerator.num_processes
        losses = F.cross_entropy(model(**inputs).logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none")
        return losses.sum() / num_items_in_batch
    """
    assert found(tmp_path, kept) == []


def test_a_loss_of_a_helper_is_told_at_its_call(tmp_path: Path) -> None:
    helper = """
    def pooled(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**inputs).logits
        return self.pooled(logits, inputs["labels"])
    """
    assert found(tmp_path, helper) == ["ACC209"]
    path = tmp_path / "train.py"
    assert [path.read_text().splitlines()[finding.place.line - 1].strip() for finding in lint_file(str(path))] == [
        'return self.pooled(logits, inputs["labels"])'
    ]


@pytest.mark.parametrize(("pinned", "codes"), [(">=5.20", ["ACC209"]), ("==4.50.0", []), ("==4.45.2", [])])
def test_classifiers_take_keywords_in_newer_releases_only(tmp_path: Path, pinned: str, codes: list[str]) -> None:
    classifier = "AutoModelForSequenceClassification"
    head, run = (text.replace("AutoModelForCausalLM", classifier) for text in (HEAD, RUN))
    assert found(tmp_path, MEAN, head=head, run=run, pinned=pinned) == codes


OF_MODEL = """
def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    loss = {loss}
    return (loss, outputs) if return_outputs else loss
"""


@pytest.mark.parametrize("loss", ["outputs.loss", 'outputs["loss"]', 'outputs["loss"] if isinstance(outputs, dict) else outputs[0]'])
def test_the_loss_of_a_model_that_was_not_told_the_count(tmp_path: Path, loss: str) -> None:
    collate = '\n\ndef collate(rows):\n    return {"input_ids": rows, "labels": rows}\n'
    assert found(tmp_path, OF_MODEL.format(loss=loss), head=HEAD + collate) == ["ACC209"]


LOSS_OF_OUTPUTS = """
def own_loss(outputs, labels, num_items_in_batch=None, weight=None):
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=weight{reduction}){scale}

class Loss:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, outputs, labels, num_items_in_batch=None):
        return own_loss(outputs, labels, num_items_in_batch, self.weight)

def make(outputs, labels):
    return own_loss(outputs, labels)
"""
GIVEN = [
    "partial(own_loss, weight=None)",
    "lambda outputs, labels, num_items_in_batch=None: own_loss(outputs, labels, num_items_in_batch)",
    "Loss(None)",
]


@pytest.mark.parametrize("given", [*GIVEN, "make"])
def test_what_is_given_as_a_loss_function(tmp_path: Path, given: str) -> None:
    run = RUN.replace("model=model", f"model=model, compute_loss_func={given}").replace("MyTrainer(", "Trainer(")
    mean = LOSS_OF_OUTPUTS.format(reduction="", scale="")
    assert found(tmp_path, "pass", head=HEAD + mean, run=run) == ([] if given == "make" else ["ACC209"])  # it takes no count: it raises
    total = LOSS_OF_OUTPUTS.format(reduction=', reduction="sum"', scale=" / num_items_in_batch")
    assert found(tmp_path, "pass", head=HEAD + total, run=run) == []


COLLECTS = """
def get_batch_samples(self, epoch_iterator, num_batches, *device):
    samples = [next(epoch_iterator) for _ in range(num_batches)]
    return samples, {count}
"""
OF_RANK = 'sum((sample["labels"][..., 1:] != -100).sum() for sample in samples)'
OF_ALL = f"self.accelerator.gather({OF_RANK}).sum()"


@pytest.mark.parametrize(
    ("count", "pinned", "codes"),
    [
        ("None", "", ["ACC201"]),
        ("None", "==4.57.1", ["ACC201"]),
        ("None", "==4.49.0", ["ACC209"]),
        ("None", "==4.46.2", ["ACC209"]),
        ("None", "==4.45.2", []),
        (OF_RANK, "", ["ACC204"]),
        (OF_RANK, "==4.57.1", ["ACC204"]),
        (OF_RANK, "==4.49.0", []),
        (OF_ALL, "", []),
        (OF_ALL, "==4.57.1", []),
        ('sum(sample["attention_mask"].sum() for sample in samples)', "", ["ACC207"]),
        ("self._get_num_items_in_batch(samples, *device)", "", []),
        ("self.count(samples)", "", []),
    ],
)
def test_batches_and_their_count_collected_by_a_subclass(tmp_path: Path, count: str, pinned: str, codes: list[str]) -> None:
    assert found(tmp_path, COLLECTS.format(count=count), body=VARYING, pinned=pinned) == codes


@pytest.mark.parametrize(
    "method",
    [
        "def get_batch_samples(self, *args, **kwargs):\n    return Trainer.get_batch_samples(self, *args, **kwargs)\n",
        "def get_batch_samples(self, model, batch):\n    return model.generate(batch), None\n",
        "def get_batch_samples(self, epoch_iterator, num_batches, device):\n"
        "    samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)\n    return samples, count\n",
    ],
)
def test_what_only_has_the_name_or_asks_the_trainer_collects_nothing_of_its_own(tmp_path: Path, method: str) -> None:
    assert found(tmp_path, method, body=VARYING) == []
