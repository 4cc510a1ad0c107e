"""Methods that are called on objects from a registry, in files that do not import them: what these give is known all the same."""

from __future__ import annotations

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
                self.task.{method}(self.model, self.loader, optimizer, self.cfg.accum)
"""
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP"
CHOICE = """self.net
                if self.cfg.wraps:
                    self.wrapped = DDP(self.net)"""
FILES = {"pyproject.toml": "", "pkg/__init__.py": "", "pkg/registry.py": "registry = {}\n", "pkg/task.py": TASK}


def runner(imports: str = DDP, wrap: str = "DDP(self.net)", method: str = "run_epoch") -> dict[str, str]:
    return {**FILES, "pkg/runner.py": RUNNER.format(imports=imports, wrap=wrap, method=method)}


def test_a_wrapper_from_a_file_that_imports_nothing_of_it(lint: Lint) -> None:
    assert lint(runner(), "pkg/task.py") == {("pkg/task.py", "ACC103", "loss.backward()")}


def test_one_that_is_not_wrapped(lint: Lint) -> None:
    assert lint(runner(wrap="self.net"), "pkg/task.py") == set()


def test_one_that_calls_something_else(lint: Lint) -> None:
    assert lint(runner(method="evaluate_all"), "pkg/task.py") == set()


def test_a_choice_inside_the_property_is_one(lint: Lint) -> None:
    assert lint(runner(wrap=CHOICE), "pkg/task.py") == set()
