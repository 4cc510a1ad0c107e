"""Objects that come from unfollowed calls, averages of what is logged, comments that say what is meant: no mistakes are made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint.linter import lint_file

HEAD = """
import torch
from torch import nn
"""


def codes(folder: Path, text: str) -> set[str]:
    path = folder / "train.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return {finding.code for finding in lint_file(str(path)) if finding.severity.name != "INFO"}


PARTS = """
def main(loader, parameters, make):
    encoder = make(parameters)
    model = encoder.model
    features = encoder(parameters["start"])
    optimizer, scheduler = encoder.schedule_and_optimize(features)
    for step, x in enumerate(loader):
        loss = model(x).square().mean() / parameters["k"]
        loss.backward()
        if (step + 1) % parameters["k"] == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""


def test_an_optimizer_that_comes_with_what_a_model_gives(tmp_path: Path) -> None:
    assert codes(tmp_path, PARTS) == set()


def test_its_windows_are_seen(tmp_path: Path) -> None:
    assert codes(tmp_path, PARTS.replace("(step + 1)", "step")) == {"ACC306"}


DIVIDED = """
def main(loader, model, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = iter(loader)
    while True:
        optimizer.zero_grad()
        for _ in range(args.num_microbatches):
            loss = model(next(data)).square().mean()
            loss.backward()
        if args.num_microbatches > 1:
            for p in model.parameters():
                if p.requires_grad:
                    {scaling}
        optimizer.step()
"""


@pytest.mark.parametrize(("scaling", "expected"), [("p.grad.div_(args.num_microbatches)", set()), ("p.grad.clamp_(-1, 1)", {"ACC202"})])
def test_gradients_of_the_parameters_that_train_are_divided(tmp_path: Path, scaling: str, expected: set[str]) -> None:
    assert codes(tmp_path, DIVIDED.replace("{scaling}", scaling)) & {"ACC202"} == expected


SUMMED = """
def main(loader, model, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        _, loss, _ = model(x)  # {comment}
        loss.backward()
        if (step + 1) % args.accumulate_grad_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("comment", "expected"), [("with reduction==sum", set()), ("a loss", {"ACC202"})])
def test_a_comment_says_that_losses_are_sums(tmp_path: Path, comment: str, expected: set[str]) -> None:
    assert codes(tmp_path, SUMMED.replace("{comment}", comment)) == expected


LOGGED = """
from accelerate import Accelerator
import tools

def main(loader, model, ema, args):
    accelerator = Accelerator(gradient_accumulation_steps=args.k)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    stats = {}
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        {update}
"""


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("tools.ema_update_dict(stats, {'loss': loss.item()}, 0.99)", set()),
        ("tools.update_ema(stats, loss.item())", set()),
        ("tools.update_ema(ema, model)", {"ACC311"}),
    ],
)
def test_an_average_of_what_is_logged(tmp_path: Path, update: str, expected: set[str]) -> None:
    assert codes(tmp_path, LOGGED.replace("{update}", update)) == expected


JOINT = """
def main(loader, model, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = iter(loader)
    while True:
        kept = []
        for _ in range(args.num_microbatches):
            out = model(next(data))
            kept.append(out)
            loss = out.square().mean() / args.num_microbatches
            loss.backward(retain_graph=True)
        {joint}
        optimizer.step()
        optimizer.zero_grad()
"""


def test_graphs_that_several_micro_batches_keep_for_one_joint_loss(tmp_path: Path) -> None:
    assert codes(tmp_path, JOINT.replace("{joint}", "torch.cat(kept, dim=0).std().backward()")) == set()


RESUMING = """
class Resuming(torch.utils.data.DataLoader):
    def __init__(self, dataset, passed_over=0, **more):
        super().__init__(dataset, **more)
        self.passed_over = passed_over

    def __iter__(self):
        for index, batch in enumerate(super().__iter__()):
            {giving}

def main(dataset, model, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Resuming(dataset, passed_over=args.updates * args.k)
    for step, x in enumerate(loader):
        loss = model(x).square().mean() / args.k
        loss.backward()
        if step % args.k == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
EARLY = "if index < self.passed_over:\n                continue\n            yield batch"


@pytest.mark.parametrize("giving", ["if index >= self.passed_over:\n                yield batch", EARLY, "yield batch"])
def test_a_loader_of_the_project_that_resumes(tmp_path: Path, giving: str) -> None:
    assert codes(tmp_path, RESUMING.replace("{giving}", giving)) == {"ACC306"}


COUNTED = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(loader, net):
    dist.init_process_group("gloo")
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        loss = model(x).square().mean()
        seen = torch.zeros(2)
        seen[0] += loss.detach()
        seen[1] += torch.isnan(loss).float()
        loss.backward()
        {reduction}
        if seen[1] == 0:
            optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("reduction", "expected"), [("dist.all_reduce(seen)", set()), ("print(seen)", {"ACC105"})])
def test_the_elements_of_what_was_reduced_agree(tmp_path: Path, reduction: str, expected: set[str]) -> None:
    assert codes(tmp_path, COUNTED.replace("{reduction}", reduction)) == expected


HANDED = """
class Updates:
    def __init__(self, optimizer, n_gradient_accumulation):
        self.optimizer, self.share = optimizer, 1 / n_gradient_accumulation

    def backward_and_step(self, {flag}, loss):
        loss = loss.mul(self.share)
        loss.backward()
        if now:
            self.optimizer.step()
            self.optimizer.zero_grad()
"""


@pytest.mark.parametrize("flag", ["now", "now: bool"])
def test_who_calls_a_helper_knows_where_the_window_ends(tmp_path: Path, flag: str) -> None:
    assert codes(tmp_path, HANDED.replace("{flag}", flag)) == set()


MADE_BY_NAME = """
class Trainer:
    def __init__(self, classes, args):
        config_class, question_encoder, context_encoder = classes[args.kind]
        self.args = args
        self.question_encoder = question_encoder(config=args.config)
        self.context_encoder = context_encoder(config=args.config)

    def train(self, loader, groups, scaler):
        question_model, context_model = self.question_encoder, self.context_encoder
        optimizer = torch.optim.AdamW(groups)
        for step, (x, y) in enumerate(loader):
            loss = (question_model(x) - context_model(y)).square().mean() / self.args.accumulation_steps
            scaler.scale(loss).backward()
            if (step + 1) % self.args.accumulation_steps == 0:
                scaler.step(optimizer)
                scaler.update()
                question_model.zero_grad()
                context_model.zero_grad()
"""


def test_models_that_are_made_by_classes_with_names_of_models(tmp_path: Path) -> None:
    assert codes(tmp_path, MADE_BY_NAME) == set()


COPIES = """
def main(loader, model, k):
    optimizer = torch.optim.Adam(model.parameters())  # given copies in full precision elsewhere
    for step, x in enumerate(loader):
        (model(x).square().mean() / k).backward()
        CLIP
        if (step + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("clip", "found"),
    [("optimizer.clip_master_grads(1.0)", set()), ("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", {"ACC304"})],
)
def test_clipped_copies_are_made_anew(tmp_path: Path, clip: str, found: set[str]) -> None:
    assert codes(tmp_path, COPIES.replace("CLIP", clip)) & {"ACC304"} == found
