"""`[tool.accumlint.wrappers]`: what a project says of its own functions and objects is what the rehearsal sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from accumlint.config import ACTIONS, Settings
from accumlint.linter import lint_data
from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import Options, rehearsals
from accumlint.source.vocabulary.wrapper_events import KINDS
from accumlint.trace import Kind, Trace

WHOLE = ("backward", "unscale", "clip", "step", "update")
FINISH = ("unscale", "clip", "step", "update")

SCALER = """
    from mylib.amp import Scaler

    def train(model, loader, optimizer, accum):
        scaler = Scaler()
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / accum
            {call}
            {zero}
"""
EVERY = SCALER.format(call="scaler(loss, optimizer)", zero="optimizer.zero_grad()")
GATED = SCALER.format(
    call="scaler(loss, optimizer, need_update=(i + 1) % accum == 0)", zero="if (i + 1) % accum == 0: optimizer.zero_grad()"
)


def traces(text: str, **wrappers: tuple[str, ...]) -> list[Trace]:
    source = parse(dedent(text).encode(), "train.py")
    assert isinstance(source, Source)
    options = Options(wrappers=tuple((name.replace("/", "."), words) for name, words in wrappers.items()))
    return [trace for rehearsal in rehearsals(source, options) for trace in rehearsal.traces(3)]


def codes(text: str, **wrappers: tuple[str, ...]) -> list[tuple[str, str]]:
    """The findings, as code and guilty line."""
    settings = replace(Settings(), wrappers=tuple((name.replace("/", "."), words) for name, words in wrappers.items()))
    data = dedent(text).encode()
    examined, warnings = lint_data(str(Path("train.py").absolute()), data, settings)
    assert warnings == []
    lines = data.decode().split("\n")
    return [(finding.code, lines[finding.place.line - 1].strip()) for finding in examined.findings]


def shape(trace: Trace) -> list[str]:
    """The kinds of the first window's events."""
    kept = (event.kind.value for event in trace.windows()[0].events if event.kind not in {Kind.DATA, Kind.LOSS})
    return list(kept)


def test_every_word_of_the_configuration_is_known_to_the_rehearsal() -> None:
    assert set(KINDS) == set(ACTIONS)


def test_without_the_configuration_nothing_is_seen() -> None:
    assert traces(EVERY) == []


def test_the_words_become_events_in_their_order() -> None:
    [trace] = traces(GATED, **{"mylib/amp/Scaler/__call__": WHOLE})
    assert shape(trace) == ["forward", "backward"] * 3 + ["unscale", "clip", "step", "scaler-update", "zero"]
    assert trace.accumulation is not None
    assert trace.accumulation.text == "accum"
    step = trace.of(Kind.STEP)[0]
    assert [target.name for target in step.targets] == ["optimizer"]
    assert step.scaler is not None
    assert trace.of(Kind.BACKWARD)[0].scaled


def test_a_step_per_micro_batch_is_found() -> None:
    assert codes(EVERY, **{"mylib/amp/Scaler/__call__": WHOLE}) == [("ACC301", "scaler(loss, optimizer)")]


def test_a_gated_one_is_right() -> None:
    assert codes(GATED, **{"mylib/amp/Scaler/__call__": WHOLE}) == []


METHODS = """
    import mylib.amp as amp

    class Trainer:
        def __init__(self, model, optimizer, scaler: amp.Scaler, k):
            self.model, self.optimizer, self.scaler, self.k = model, optimizer, scaler, k

        def fit(self, loader):
            self.optimizer.zero_grad()
            for i, (x, y) in enumerate(loader, 1):
                self.scaler.back(F.cross_entropy(self.model(x), y) / self.k)
                if i % self.k == 0:
                    {first}
                    {then}
"""


def test_methods_of_an_annotated_object() -> None:
    words = {"mylib/amp/Scaler/back": ("backward",), "mylib/amp/Scaler/finish": FINISH}
    right = METHODS.format(first="self.scaler.finish(self.optimizer)", then="self.optimizer.zero_grad()")
    wrong = METHODS.format(first="self.scaler.finish(self.optimizer)", then="pass")
    early = METHODS.format(first="self.optimizer.zero_grad()", then="self.scaler.finish(self.optimizer)")
    assert codes(right, **words) == []
    assert codes(wrong, **words) == [("ACC303", "self.scaler.finish(self.optimizer)")]
    assert codes(early, **words) == [("ACC302", "self.optimizer.zero_grad()")]


FUNCTION = """
    from {package} import update

    def main(model, loader, optimizer, accum):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / accum
            loss.backward()
            {call}
"""


@pytest.mark.parametrize("package", ["mylib.train", "mylib", ".train", "lib.mylib.train"])
def test_functions_by_import_path(package: str) -> None:
    words = {"mylib/train/update": ("step", "zero")}
    assert codes(FUNCTION.format(package=package, call="update(optimizer)"), **words) == [("ACC301", "update(optimizer)")]


def test_another_function_of_the_same_name_is_not_meant() -> None:
    text = FUNCTION.format(package="otherlib.metrics", call="update(optimizer)")
    assert codes(text, **{"mylib/train/update": ("step", "zero")}) == []


def test_a_function_of_the_file_is_taken_by_its_words() -> None:
    text = """
    def advance(opt, sched):
        native.advance(opt.handle)

    def main(model, loader, optimizer, scheduler, k):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / k).backward()
            if (i + 1) % k == 0:
                advance(optimizer, scheduler)
    """
    [trace] = traces(text, **{"train/advance": ("step", "zero", "schedule")})
    assert shape(trace) == ["forward", "backward"] * 3 + ["step", "zero", "schedule"]
    assert codes(text, **{"train/advance": ("step", "zero", "schedule")}) == []
    assert codes(text, **{"train/advance": ("step", "schedule")}) == [("ACC303", "advance(optimizer, scheduler)")]


def test_an_object_of_a_class_of_the_file() -> None:
    text = """
    class Engine(Base):
        def __init__(self, optimizer, grad_accum):
            self.optimizer, self.grad_accum = optimizer, grad_accum

        def __call__(self, loss):
            native.run(self, loss)

        def flush(self):
            native.flush(self)

    def main(model, loader, optimizer, k):
        engine = Engine(optimizer, grad_accum=k)
        for i, (x, y) in enumerate(loader):
            engine(F.cross_entropy(model(x), y))
            if {test}:
                engine.flush()
    """
    words = {"engine/Engine/__call__": ("divide", "backward"), "engine/Engine/flush": ("clip", "step", "zero")}
    right = text.format(test="(i + 1) % k == 0")
    [trace] = traces(right, **words)
    assert shape(trace) == ["forward", "backward"] * 3 + ["clip", "step", "zero"]
    assert trace.accumulation is not None
    assert trace.accumulation.text == "k"
    assert codes(right, **words) == []
    assert codes(text.format(test="i % k == 0"), **words) == [("ACC306", "if i % k == 0:")]


def test_methods_of_a_base_class_that_is_not_followed() -> None:
    text = """
    from mylib.base import Engine

    class Mine(Engine):
        def run(self, loader, grad_accum):
            for i, (x, y) in enumerate(loader):
                (F.cross_entropy(self.model(x), y) / grad_accum).backward()
                self.advance(self.optimizer)
    """
    assert codes(text, **{"mylib/base/Engine/advance": ("step", "zero")}) == [("ACC301", "self.advance(self.optimizer)")]


def test_forward_and_division_inside() -> None:
    text = """
    from mylib import forward_backward

    def main(model, loader, optimizer, k):
        for i, batch in enumerate(loader):
            loss = forward_backward(model, batch, accum_steps=k)
            if (i + 1) % k == 0:
                optimizer.step()
                optimizer.zero_grad()
            print(loss)
    """
    [trace] = traces(text, **{"mylib/forward_backward": ("forward", "divide", "backward")})
    assert shape(trace) == ["forward", "backward"] * 3 + ["step", "zero"]
    weight = trace.of(Kind.BACKWARD)[0].weight
    assert weight is not None
    assert [factor.root for factor in weight.factors if factor.root] == ["k"]


def test_no_sync_of_a_project() -> None:
    text = """
    from contextlib import nullcontext
    from torch.nn.parallel import DistributedDataParallel as DDP
    from mylib.dist import quiet

    def main(model, loader, optimizer, k):
        model = DDP(model)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % k == 0
            {forward}
            with nullcontext() if last else quiet(model):
                {inside}
                (loss / k).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    """
    words = {"mylib/dist/quiet": ("no_sync",)}
    loss = "loss = F.cross_entropy(model(x), y)"
    assert codes(text.format(forward="pass", inside=loss), **words) == []
    assert codes(text.format(forward=loss, inside="pass"), **words) == [("ACC101", "(loss / k).backward()")]


def test_accumulate_of_a_project_gates_what_is_inside() -> None:
    text = """
    from torch.nn.parallel import DistributedDataParallel as DDP
    from mylib.dist import Helper

    def main(model, loader, optimizer, args):
        model, helper = DDP(model), Helper(grad_accum=args.k)
        for x, y in loader:
            with helper.window(model):
                loss = F.cross_entropy(model(x), y) / args.k
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    words = {"mylib/dist/Helper/window": ("accumulate",)}
    [trace] = traces(text, **words)
    assert [window.size for window in trace.windows()] == [3, 3]
    assert [event.sync for event in trace.windows()[0].of(Kind.FORWARD)] == [False, False, True]
    assert codes(text, **words) == []


def test_an_object_that_carries_the_name_of_its_class() -> None:
    text = """
    def main(model, loader, optimizer, native_scaler, accum):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / accum
            native_scaler(loss, optimizer)
            optimizer.zero_grad()
    """
    assert codes(text, **{"lib/NativeScaler/__call__": WHOLE}) == [("ACC301", "native_scaler(loss, optimizer)")]


def test_saving_averaging_and_the_schedule() -> None:
    text = """
    from mylib import finish

    def main(model, loader, optimizer, scheduler, k):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / k).backward()
            if (i + 1) % k == 0:
                finish(optimizer, scheduler)
    """
    [trace] = traces(text, **{"mylib/finish": ("normalize", "step", "zero", "schedule", "average", "save")})
    assert shape(trace)[6:] == ["normalize", "step", "zero", "schedule", "average", "save"]
    assert [target.name for target in trace.of(Kind.SCHEDULE)[0].targets] == ["scheduler"]
    assert trace.of(Kind.SAVE)[0].options == {"optimizer-state"}


def test_a_step_of_nobody_knows_which_optimizer_is_not_judged() -> None:
    text = """
    from mylib import finish

    def main(context, loader, accum):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(context.model(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                finish(context)
                {zero}
    """
    assert codes(text.format(zero="context.opt.zero_grad()"), **{"mylib/finish": ("step",)}) == []
    assert traces(text.format(zero="context.opt.zero_grad()"), **{"mylib/finish": ("step",)}) == []
    assert codes(text.format(zero="pass"), **{"mylib/finish": ("step", "zero")}) == []
    assert codes(text.format(zero="pass"), **{"mylib/finish": ("step",)}) == [("ACC303", "finish(context)")]


def test_a_wrapper_in_an_evaluation_does_nothing() -> None:
    text = """
    from mylib import micro_step

    def evaluate(model, loader, optimizer):
        with torch.no_grad():
            for x, y in loader:
                micro_step(F.cross_entropy(model(x), y), optimizer)
    """
    assert codes(text, **{"mylib/micro_step": ("backward", "step", "zero")}) == []


def test_wrappers_of_two_optimizers() -> None:
    text = """
    from mylib import update

    def main(generator, discriminator, opt_g, opt_d, loader, accum):
        for i, (x, y) in enumerate(loader):
            (d_loss(discriminator(x), y) / accum).backward()
            (g_loss(generator(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                update(opt_d)
                update(opt_g)
    """
    [trace] = traces(text, **{"mylib/update": ("step", "zero")})
    assert sorted(actor.name for actor in trace.optimizers) == ["opt_d", "opt_g"]
    assert codes(text, **{"mylib/update": ("step", "zero")}) == []
