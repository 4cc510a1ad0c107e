"""Methods that are called on objects from a registry, in files that do not import them: what these give is known all the same."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

TASK = """
    class Task:
        def run_epoch(self, model, loader, optimizer, accum):
            assert len(loader) % accum == 0
            for i, (x, y) in enumerate(loader):
                loss = (model(x) - y).pow(2).mean() / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
"""
RUNNER = """
    import torch
    {imports}
    from pkg.registry import registry

    class Runner:
        def __init__(self, cfg, task, net, loader):
            self.cfg, self.task, self.net, self.loader = cfg, task, net, loader
            self.wrapped = None

        @property
        def model(self):
            if self.net.device != self.cfg.device:
                self.net = self.net.to(self.cfg.device)
            if self.wrapped is None:
                self.wrapped = {wrap}
            return self.wrapped

        def fit(self):
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            if self.cfg.resume:
                self.model.load_state_dict(torch.load("last.pt"))
            for epoch in range(self.cfg.epochs):
                self.task.{method}({given})
"""
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP"
CHOICE = """self.net
                if self.cfg.wraps:
                    self.wrapped = DDP(self.net)"""
FILES = {"pyproject.toml": "", "pkg/__init__.py": "", "pkg/registry.py": "registry = {}\n", "pkg/task.py": TASK}


GIVEN = "self.model, self.loader, optimizer, self.cfg.accum"


def runner(imports: str = DDP, wrap: str = "DDP(self.net)", method: str = "run_epoch", given: str = GIVEN) -> dict[str, str]:
    return {**FILES, "pkg/runner.py": RUNNER.format(imports=imports, wrap=wrap, method=method, given=given)}


def test_a_wrapper_from_a_file_that_imports_nothing_of_it(lint: Lint) -> None:
    assert lint(runner(), "pkg/task.py") == {("pkg/task.py", "ACC103", "loss.backward()")}


def test_one_that_is_not_wrapped(lint: Lint) -> None:
    assert lint(runner(wrap="self.net"), "pkg/task.py") == set()


def test_one_that_calls_something_else(lint: Lint) -> None:
    assert lint(runner(method="evaluate_all"), "pkg/task.py") == set()


def test_a_choice_inside_the_property_is_one(lint: Lint) -> None:
    assert lint(runner(wrap=CHOICE), "pkg/task.py") == set()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("self.model, self.loader, optimizer, accum=self.cfg.accum", True),
        ("model=self.model, loader=self.loader, **self.cfg.rest", True),
        ("self.model, self.loader", False),
        ("self.model, self.loader, optimizer, self.cfg.accum, 0", False),
        ("self.model, self.loader, optimizer, accum=self.cfg.accum, fold=1", False),
    ],
)
def test_only_a_call_that_fits_means_it(lint: Lint, given: str, found: bool) -> None:
    assert lint(runner(given=given), "pkg/task.py") == ({("pkg/task.py", "ACC103", "loss.backward()")} if found else set())


def test_two_classes_of_nothing_in_common_with_such_a_method_leave_it_open(lint: Lint) -> None:
    other = {"pkg/other.py": "class Other:\n    def run_epoch(self, model, loader, optimizer, accum):\n        return 0\n"}
    assert lint({**runner(), **other}, "pkg/task.py") == set()
    derived = "from pkg.task import Task\n\n\nclass Other(Task):\n    def run_epoch(self, *args):\n        super().run_epoch(*args)\n"
    assert lint({**runner(), "pkg/other.py": derived}, "pkg/task.py") == {("pkg/task.py", "ACC103", "loss.backward()")}
