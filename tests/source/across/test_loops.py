"""Loops whose parts lie in several files: each wrong one is found where it is wrong, its right twin is silent."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

SCALER = """
    import torch

    class LossScaler:
        def __init__(self):
            self._scaler = torch.cuda.amp.GradScaler()

        def __call__(self, loss, optimizer, parameters, need_update=True):
            self._scaler.scale(loss).backward()
            if need_update:
                {unscale}
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                self._scaler.step(optimizer)
                self._scaler.update()
"""
ENGINE = """
    import torch.nn.functional as F

    def train_one_epoch(model, loader, optimizer, loss_scaler, args):
        model.train()
        optimizer.zero_grad()
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / args.accum_iter
            update = (step + 1) % args.accum_iter == 0
            loss_scaler(loss, optimizer, model.parameters(), need_update=update)
            if {zero}:
                optimizer.zero_grad()
"""
MAIN = """
    import torch
    {imports}

    def main(args, loader):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = {scaler}()
        for epoch in range(args.epochs):
            {train}(model, loader, optimizer, scaler, args)
"""
PLAIN = {
    "imports": "from engine import train_one_epoch\n    from utils import LossScaler",
    "scaler": "LossScaler",
    "train": "train_one_epoch",
}


def project(*, unscale: bool = True, zero: str = "update", **main: str) -> dict[str, str]:
    return {
        "main.py": MAIN.format(**(main or PLAIN)),
        "engine.py": ENGINE.format(zero=zero),
        "utils.py": SCALER.format(unscale="self._scaler.unscale_(optimizer)" if unscale else "pass"),
    }


def test_a_helper_object_from_another_file(lint: Lint) -> None:
    found = lint(project(zero="True"))
    assert found == {("engine.py", "ACC302", "optimizer.zero_grad()")}


def test_what_the_helper_does_wrong_is_found_in_its_file(lint: Lint) -> None:
    found = {each for each in lint(project(unscale=False)) if each[1] != "ACC307"}
    assert found == {("utils.py", "ACC403", "torch.nn.utils.clip_grad_norm_(parameters, 1.0)")}


def test_a_tail_is_lost_only_where_the_caller_repeats_the_loop(lint: Lint) -> None:
    assert {each[:2] for each in lint(project())} == {("engine.py", "ACC307")}
    once = project()
    once["main.py"] = once["main.py"].replace("for epoch in range(args.epochs)", "if True")
    assert lint(once) == set()


def test_a_lost_tail_lies_at_the_test_or_at_what_clears_it_where_the_test_is_only_handed_over(lint: Lint) -> None:
    assert lint(project()) == {("engine.py", "ACC307", "update = (step + 1) % args.accum_iter == 0")}
    handed = project()
    handed["engine.py"] = handed["engine.py"].replace("need_update=update", "need_update=(step + 1) % args.accum_iter == 0")
    assert lint(handed) == {("engine.py", "ACC307", "optimizer.zero_grad()")}


FORMS = {
    "module": {"imports": "import engine\n    import utils", "scaler": "utils.LossScaler", "train": "engine.train_one_epoch"},
    "alias of a module": {"imports": "import engine as E\n    import utils as U", "scaler": "U.LossScaler", "train": "E.train_one_epoch"},
    "alias of a name": {
        "imports": "from engine import train_one_epoch as run\n    from utils import LossScaler as Scaler",
        "scaler": "Scaler",
        "train": "run",
    },
    "star": {"imports": "from engine import *\n    from utils import *", "scaler": "LossScaler", "train": "train_one_epoch"},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_import(lint: Lint, form: str) -> None:
    assert ("engine.py", "ACC302", "optimizer.zero_grad()") in lint(project(zero="True", **FORMS[form]))
    assert "ACC302" not in {code for _, code, _ in lint(project(**FORMS[form]))}


PACKAGES = {
    "re-export": ("from .scaler import LossScaler\nfrom .engine import train_one_epoch\n", "from lib import LossScaler, train_one_epoch"),
    "star re-export": ("from .scaler import *\nfrom .engine import *\n", "from lib import LossScaler, train_one_epoch"),
    "package": ("from .scaler import LossScaler\nfrom . import engine\ntrain_one_epoch = engine.train_one_epoch\n", "from lib import *"),
    "submodules": ("", "from lib.scaler import LossScaler\n    from lib.engine import train_one_epoch"),
}


@pytest.mark.parametrize("form", PACKAGES)
@pytest.mark.parametrize("root", ["", "src/"])
def test_packages(lint: Lint, form: str, root: str) -> None:
    init, imports = PACKAGES[form]
    files = project(zero="True", imports=imports, scaler="LossScaler", train="train_one_epoch")
    held = {
        "main.py": files["main.py"],
        f"{root}lib/__init__.py": init,
        f"{root}lib/scaler.py": files["utils.py"],
        f"{root}lib/engine.py": files["engine.py"],
    }
    assert (f"{root}lib/engine.py", "ACC302", "optimizer.zero_grad()") in lint(held)


THREE = {
    "base.py": """
        class Base:
            def __init__(self, model, optimizer, accum):
                self.model, self.optimizer, self.accum = model, optimizer, accum

            def update(self):
                self.optimizer.step()
                self.optimizer.zero_grad()
    """,
    "middle.py": """
        import torch.nn.functional as F
        from base import Base

        class Middle(Base):
            def micro_batch(self, x, y):
                loss = F.cross_entropy(self.model(x), y) / self.accum
                loss.backward()
    """,
    "main.py": """
        from middle import Middle

        class Trainer(Middle):
            def fit(self, loader):
                for i, (x, y) in enumerate(loader):
                    self.micro_batch(x, y)
                    if {test}:
                        self.update()
    """,
}


@pytest.mark.parametrize(("test", "wrong"), [("i % self.accum == 0", True), ("(i + 1) % self.accum == 0", False)])
def test_forward_backward_and_step_in_three_files_and_two_base_classes(lint: Lint, test: str, wrong: bool) -> None:
    files = {**THREE, "main.py": THREE["main.py"].format(test=test)}
    assert lint(files) == ({("main.py", "ACC306", f"if {test}:")} if wrong else set())


@pytest.mark.parametrize("wrong", [True, False])
def test_a_loop_in_a_base_class_of_another_file(lint: Lint, wrong: bool) -> None:
    where = "self.optimizer.zero_grad()" if wrong else "pass"
    files = {
        "lib/__init__.py": "",
        "lib/loop.py": """
            class Loop:
                def fit(self, loader):
                    for i, batch in enumerate(loader):
                        self.micro(batch)
                        if (i + 1) % self.accum == 0:
                            self.finish()
        """,
        "lib/trainer.py": f"""
            from .loop import Loop

            class Trainer(Loop):
                def __init__(self, model, optimizer, accum):
                    self.model = model
                    self.optimizer = optimizer
                    self.accum = accum

                def micro(self, batch):
                    {where}
                    loss = self.model(batch).mean() / self.accum
                    loss.backward()

                def finish(self):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        """,
    }
    expected = {("lib/trainer.py", "ACC302", "self.optimizer.zero_grad()")} if wrong else set()
    assert lint(files, "lib/trainer.py") == expected


@pytest.mark.parametrize("wrong", [True, False])
def test_mixins(lint: Lint, wrong: bool) -> None:
    files = {
        "mixins.py": f"""
            class BackwardMixin:
                def accumulate(self, loss):
                    (loss / self.accum).backward()

            class UpdateMixin:
                def update(self, i):
                    if (i + 1) % self.accum == 0:
                        self.optimizer.step()
                    {"" if wrong else "    "}self.optimizer.zero_grad()
        """,
        "main.py": """
            import torch.nn.functional as F
            from mixins import BackwardMixin, UpdateMixin

            class Trainer(BackwardMixin, UpdateMixin):
                def __init__(self, model, optimizer, accum):
                    self.model, self.optimizer, self.accum = model, optimizer, accum

                def fit(self, loader):
                    for i, (x, y) in enumerate(loader):
                        self.accumulate(F.cross_entropy(self.model(x), y))
                        self.update(i)
        """,
    }
    assert lint(files) == ({("mixins.py", "ACC302", "self.optimizer.zero_grad()")} if wrong else set())


@pytest.mark.parametrize("wrong", [True, False])
def test_a_runner_with_hooks(lint: Lint, wrong: bool) -> None:
    files = {
        "runner.py": """
            class Runner:
                def __init__(self, model, optimizer):
                    self.model, self.optimizer = model, optimizer
                    self._hooks = []
                    self.iter = 0

                def register_hook(self, hook):
                    self._hooks.append(hook)

                def call_hook(self, name):
                    for hook in self._hooks:
                        getattr(hook, name)(self)

                def run(self, loader):
                    for i, batch in enumerate(loader):
                        self.iter = i
                        self.outputs = self.model(batch)
                        self.call_hook("after_train_iter")
        """,
        "hooks.py": f"""
            class OptimizerHook:
                def __init__(self, cumulative_iters=1):
                    self.cumulative_iters = cumulative_iters

                def after_train_iter(self, runner):
                    loss = runner.outputs["loss"] / self.cumulative_iters
                    loss.backward()
                    if (runner.iter + 1) % self.cumulative_iters == 0:
                        runner.optimizer.step()
                    {"" if wrong else "    "}runner.optimizer.zero_grad()
        """,
        "main.py": """
            import torch
            from hooks import OptimizerHook
            from runner import Runner

            def main(loader, args):
                model = torch.nn.Linear(4, 2)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                runner = Runner(model, optimizer)
                runner.register_hook(OptimizerHook(args.cumulative_iters))
                runner.run(loader)
        """,
    }
    assert lint(files) == ({("hooks.py", "ACC302", "runner.optimizer.zero_grad()")} if wrong else set())


@pytest.mark.parametrize("wrong", [True, False])
def test_an_instance_passed_as_an_argument(lint: Lint, wrong: bool) -> None:
    files = {
        "stepper.py": f"""
            class Stepper:
                def __init__(self, optimizer, every):
                    self.optimizer, self.every, self.count = optimizer, every, 0

                def __call__(self):
                    self.count += 1
                    if self.count % self.every == 0:
                        self.optimizer.step()
                    {"" if wrong else "    "}self.optimizer.zero_grad()
        """,
        "loop.py": """
            import torch.nn.functional as F

            def fit(model, loader, stepper, accum):
                for x, y in loader:
                    (F.cross_entropy(model(x), y) / accum).backward()
                    stepper()
        """,
        "main.py": """
            import torch
            from loop import fit
            from stepper import Stepper

            def main(loader, accum):
                model = torch.nn.Linear(4, 2)
                fit(model, loader, Stepper(torch.optim.SGD(model.parameters(), lr=0.1), accum), accum)
        """,
    }
    assert lint(files) == ({("stepper.py", "ACC302", "self.optimizer.zero_grad()")} if wrong else set())


def test_a_model_is_wrapped_in_one_branch_only(lint: Lint) -> None:
    """The other branch shards it: neither way goes round a wrapper."""
    files = {
        "loop.py": """
            def fit(model, loader, optimizer, k):
                for i, (x, y) in enumerate(loader):
                    last = (i + 1) % k == 0
                    model.require_backward_grad_sync = last
                    (model(x, labels=y)[0] / k).backward()
                    if last:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        "main.py": """
            import torch
            from loop import fit
            from torch.nn.parallel import DistributedDataParallel

            def main(args, loader):
                model = create_model(args)
                if args.fsdp:
                    model.shard()
                    wrapped = model
                else:
                    wrapped = DistributedDataParallel(model.to(0))
                fit(wrapped, loader, torch.optim.AdamW(wrapped.parameters()), args.k)
        """,
    }
    assert lint(files) == set()
