"""What a function that nobody in the file calls is given: a word that it asks for is the same on every rank."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

LOSS = """\
import torch
import torch.distributed as dist


class Loss:
    def __init__(self, generator, critic):
        self.generator, self.critic = generator, critic

    def accumulate_gradients(self, PARAMETER, real, noise, optimizer, scale):
        assert dist.get_world_size() > 1
        of_generator = TEST
        if of_generator:
            (-self.critic(self.generator(noise)).mean() * scale).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("parameter", "test", "codes"),
    [
        ("phase", 'phase in ["G", "both"]', set()),
        ("phase", 'phase == "G"', set()),
        ("phase", "phase[0] > real.mean()", {"ACC105"}),
    ],
)
def test_a_word_is_no_data(lint: Lint, parameter: str, test: str, codes: set[str]) -> None:
    found = lint({"loss.py": LOSS.replace("PARAMETER", parameter).replace("TEST", test)}, "loss.py")
    assert {code for _, code, _ in found} & {"ACC105"} == codes


EPOCH = """\
import torch.nn.functional as F


class Task:
    def train_epoch(self, epoch, model, loader, optimizer, accum_iters=1):
        batches = iter(loader)
        for i in range(len(loader)):
            x, y = next(batches)
            (F.cross_entropy(model(x), y) / accum_iters).backward()
            if (i + 1) % accum_iters == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
LEFT = {("task.py", "ACC307", "if (i + 1) % accum_iters == 0:")}
RUN = """\
import torch
from task import Task


def run(loader, optimizer, model):
    task = Task()
    {loop}task.train_epoch(0, model, loader, optimizer, 4)


if __name__ == "__main__":
    model = torch.nn.Linear(4, 2)
    run(torch.utils.data.DataLoader([]), torch.optim.SGD(model.parameters(), lr=0.1), model)
"""


def test_what_a_pass_leaves_meets_the_next_epoch_though_nobody_is_seen_to_call_it(lint: Lint) -> None:
    assert {each for each in lint({"task.py": EPOCH}, "task.py") if each[1] == "ACC307"} == LEFT


@pytest.mark.parametrize(("loop", "found"), [("", set()), ("for _ in range(3):\n        ", LEFT)])
def test_whoever_calls_it_tells_how_often(lint: Lint, loop: str, found: set[tuple[str, str, str]]) -> None:
    every = lint({"task.py": EPOCH, "run.py": RUN.format(loop=loop)}, "task.py")
    assert {each for each in every if each[1] == "ACC307"} == found


@pytest.mark.parametrize("name", ["fit", "train"])
def test_a_function_that_is_told_no_epoch_goes_over_the_data_once(lint: Lint, name: str) -> None:
    once = EPOCH.replace("train_epoch(self, epoch, ", f"{name}(self, ")
    assert {each for each in lint({"task.py": once}, "task.py") if each[1] == "ACC307"} == set()


def test_a_choice_between_nothing_and_a_setting_is_the_setting(lint: Lint) -> None:
    """`None if args.clip <= 0 else args.clip`: a run that trains has what the helper asks for."""
    helper = """\
    def update(loss, optimizer, parameters, clip=None, last=True):
        loss.backward()
        if last:
            if clip is None:
                raise NotImplementedError("give a large value")
            torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            optimizer.zero_grad()
    """
    main = """\
    import argparse
    import torch
    from helper import update

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--accum_iter", type=int)
        parser.add_argument("--clip", type=float)
        args = parser.parse_args()
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            for i, x in enumerate(torch.utils.data.DataLoader([])):
                loss = model(x).mean() / args.accum_iter
                clip = None if args.clip <= 0 else args.clip
                update(loss, optimizer, model.parameters(), clip, (i + 1) % args.accum_iter == 0)

    if __name__ == "__main__":
        main()
    """
    found = lint({"helper.py": "    import torch\n\n" + helper, "main.py": main})
    assert {code for _, code, _ in found} == {"ACC307"}


@pytest.mark.parametrize("test", ["args.max_steps >= 0", "not args.by_epochs"])
def test_a_limit_on_the_updates_that_has_two_sources_is_not_met(lint: Lint, test: str) -> None:
    main = """\
    import argparse
    import torch

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--accum_iter", type=int, default=1)
        parser.add_argument("--epochs", type=int, default=1)
        parser.add_argument("--max_steps", type=int, default=-1)
        parser.add_argument("--by_epochs", action="store_true")
        args = parser.parse_args()
        loader = torch.utils.data.DataLoader([])
        total = int(args.max_steps / args.accum_iter) if TEST else int(len(loader) * args.epochs / args.accum_iter)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        done = 0
        for epoch in range(args.epochs):
            for i, x in enumerate(loader):
                (model(x).mean() / args.accum_iter).backward()
                if (i + 1) % args.accum_iter == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    done += 1
                if done >= total:
                    return

    if __name__ == "__main__":
        main()
    """
    assert {code for _, code, _ in lint({"main.py": main.replace("TEST", test)})} == {"ACC307"}
