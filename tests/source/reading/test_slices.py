from __future__ import annotations

import ast
import sys

import pytest

from accumlint.source.reading.slices import prune

TRAIN = """
def train(model, loader, optimizer):
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def kept(text: str) -> set[str] | None:
    """The names of the functions that are left, None where nothing trains."""
    tree = ast.parse(text)
    if not prune(tree, tuple(text.split("\n"))):
        return None
    compile(tree, "train.py", "exec")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_what_has_nothing_to_do_with_training_goes() -> None:
    assert kept(f"{TRAIN}\ndef plot(values):\n    return smooth(values)\n\ndef smooth(values):\n    return values\n") == {"train"}


def test_what_a_training_function_mentions_stays() -> None:
    text = f"""
def collate(rows):
    return pad(rows)

def pad(rows):
    return rows

def unused(rows):
    return rows
{TRAIN}
    loader = DataLoader(data, collate_fn=collate)
"""
    assert kept(text) == {"collate", "pad", "train"}


def test_callers_stay_with_what_they_mention() -> None:
    text = f"{TRAIN}\ndef main():\n    train(wrap(1), 2, 3)\n\ndef wrap(model):\n    return DDP(model)\n\ndef other(): pass\n"
    assert kept(text) == {"train", "main", "wrap"}


def test_backward_and_update_may_stand_in_different_functions() -> None:
    text = """
class Trainer:
    def fit(self):
        for batch in self.loader:
            self.one(batch)
            self.update()

    def one(self, batch):
        self.loss(batch).backward()

    def update(self):
        self.optimizer.step()

    def report(self):
        pass
"""
    assert kept(text) == {"fit", "one", "update"}


def test_a_class_brings_what_runs_unnamed() -> None:
    text = f"""
class Net(Base):
    def __init__(self):
        self.layer = 1

    def forward(self, x):
        return self.layer(x)

    def extra(self):
        pass

class Base:
    def __call__(self, x):
        return helper(x)

    def other(self):
        pass

def helper(x):
    return x
{TRAIN}
    model = Net()
"""
    assert kept(text) == {"train", "__init__", "forward", "__call__", "helper"}


def test_code_outside_of_functions_stays_with_what_it_mentions() -> None:
    text = "K = size()\nfor x in data:\n    f(x).backward()\n    opt.step()\n\n"
    text += "def size():\n    return 4\n\ndef f(x):\n    return x\n\ndef g(x): pass\n"
    assert kept(text) == {"size", "f"}


def test_decorators_are_mentions() -> None:
    text = f"def trace(function):\n    return function\n\n@trace{TRAIN}\ndef other(): pass\n"
    assert kept(text) == {"trace", "train"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1\n",
        "def f(loss):\n    loss.backward()\n\ndef g(opt):\n    opt.step()\n",
        "class F:\n    def backward(self):\n        pass\n\nclass Env:\n    def step(self):\n        pass\n",
    ],
)
def test_without_a_training_loop_there_is_nothing_to_rehearse(text: str) -> None:
    assert kept(text) is None


def test_an_emptied_class_is_still_a_class() -> None:
    assert kept(f"class A:\n    def f(self): pass\n\nclass B:\n    class C:\n        def g(self): pass\n{TRAIN}") == {"train"}


def work(name: str, functions: int) -> int:
    """How many calls it takes to prune a module of so many functions, each of which calls the next."""
    text = TRAIN + "".join(f"\ndef {name.format(at=at)}(x):\n    return {name.format(at=at + 1)}(x)\n" for at in range(functions))
    tree = ast.parse(text)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        assert prune(tree, tuple(text.split("\n")))
    finally:
        sys.setprofile(None)
    assert len(tree.body) == 1
    return calls


@pytest.mark.parametrize("name", ["f{at}", "f"])
def test_the_work_is_linear_in_the_number_of_functions(name: str) -> None:
    assert work(name, 4_000) < 2.2 * work(name, 2_000)
