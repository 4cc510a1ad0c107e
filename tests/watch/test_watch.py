"""What a watch sees, says, refuses and leaves behind."""

from __future__ import annotations

import doctest
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_  # by name, before any watch

import accumlint
from accumlint.report.verify import FORMATS
from accumlint.verdict import State, Topic

K = 4


class Half(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) / 2  # type: ignore[no-any-return]


class _Raising:
    def __iter__(self) -> Iterator[int]:
        yield 6
        raise KeyError("theirs")


class Setup:
    """A model with an optimizer, and a training step; `counts` are the targets of each micro-batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.k = K
        self.model: torch.nn.Module = torch.nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self, count: int = 6) -> None:
        inputs, targets = torch.randn(count, 8), torch.randint(4, (count,))
        (cross_entropy(self.model(inputs), targets) / self.k).backward()

    def step(self, counts: tuple[int, ...] = (6,) * K, *, limit: float | None = None) -> None:
        for count in counts:
            self.backward(count)
        if limit is not None:
            clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_right_window(setup: Setup) -> None:
    with accumlint.watch(setup.model, setup.optimizer) as window:
        setup.step(limit=1e-3)
    window.raise_for_violations("info")
    window.require("weights", "gradient")
    (update,) = window.report.updates
    assert (update.micro_steps, update.targets_local, update.weight_sum) == (K, 6 * K, pytest.approx(1.0))
    assert update.coefficients == pytest.approx((1 / (6 * K),) * K)
    assert update.clip_limit == 1e-3
    assert update.norm_before is not None
    assert update.norm_before > 1e-3
    assert update.path == __file__
    assert window.report.environment["script"] == __file__
    assert str(window).startswith("CONFIRMED: 1 of 1 update")
    assert "the watch ended after 1 update" in window.text()
    for output_format in FORMATS:
        assert isinstance(window.text(output_format, width=80), str)


def test_a_wrong_window(setup: Setup) -> None:
    with accumlint.watch(setup.model, setup.optimizer) as window:
        setup.step((2, 6, 4, 8))
    with pytest.raises(accumlint.AccumulationError, match="ACC201 mean-of-means") as raised:
        window.raise_for_violations()
    assert [finding.code for finding in raised.value.report.findings] == ["ACC201"]
    assert raised.value.report.findings[0].place.path == __file__
    assert window.report.updates[0].coefficients == pytest.approx((1 / 8, 1 / 24, 1 / 16, 1 / 32))
    # The same four gradients with equal weights, by hand.
    assert window.report.updates[0].gradient_error == pytest.approx(_error((2, 6, 4, 8)), rel=1e-3)
    with pytest.raises(accumlint.AccumulationError, match="Wrong, though required: weight of a target"):
        window.require("weights")


def _error(counts: tuple[int, ...]) -> float:
    """Relative L2 between the mean of means and the mean of all targets."""
    setup = Setup()
    means = []
    for count in counts:
        inputs, targets = torch.randn(count, 8), torch.randint(4, (count,))
        gradients = torch.autograd.grad(cross_entropy(setup.model(inputs), targets), list(setup.model.parameters()))
        means.append(torch.cat([each.flatten() for each in gradients]).double())
    wrong = sum(means) / len(means)
    right = sum(count * mean for count, mean in zip(counts, means, strict=True)) / sum(counts)
    return float((wrong - right).norm() / right.norm())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_warnings_raise_when_they_are_asked_for(setup: Setup) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 1)
    with accumlint.watch(setup.model, setup.optimizer, updates=2) as window:
        for _ in range(2):
            for _ in range(K):
                setup.backward()
                scheduler.step()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
    severities = {str(finding.severity) for finding in window.report.findings}
    assert [finding.code for finding in window.report.findings] == ["ACC305"]
    if severities == {"warning"}:
        window.raise_for_violations()
    with pytest.raises(accumlint.AccumulationError, match="ACC305"):
        window.raise_for_violations("warning")


def test_too_few_updates(setup: Setup) -> None:
    with accumlint.watch(setup.model, setup.optimizer, updates=2) as window:
        setup.step()
    with pytest.raises(accumlint.AccumulationError, match="2 updates were expected, and 1 seen before the watch ended"):
        window.raise_for_violations()
    with accumlint.watch(setup.model, setup.optimizer) as window:
        setup.backward()
    assert window.report.check(Topic.BOUNDARY).state is State.NOT_OBSERVED  # type: ignore[union-attr]
    with pytest.raises(accumlint.AccumulationError, match="1 update was expected, and 0 seen"):
        window.raise_for_violations()
    with pytest.raises(accumlint.AccumulationError, match="Not observed, though required"):
        window.require("gradient")


def test_the_size_of_a_window_can_be_expected(setup: Setup) -> None:
    with accumlint.watch(setup.model, setup.optimizer, expect_k=K + 1) as window:
        setup.step()
    with pytest.raises(accumlint.AccumulationError, match="5 micro-batches were"):
        window.raise_for_violations()


def test_a_watch_that_ends_inside_a_window_has_no_tail(setup: Setup) -> None:
    for turn in range(2):
        with accumlint.watch(setup.model, setup.optimizer) as window:
            setup.step()
            setup.backward()
        assert window.report.findings == (), turn
        window.raise_for_violations("info")
        setup.optimizer.zero_grad()


def test_a_pass_that_ends_in_the_block_has_its_tail(setup: Setup) -> None:
    with accumlint.watch(setup.model, setup.optimizer, updates=4) as window:
        for _ in range(2):
            for number in range(2 * K + 2):
                setup.backward()
                if (number + 1) % K == 0:
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()
    assert [finding.code for finding in window.report.findings] == ["ACC307"]
    window.raise_for_violations()
    with pytest.raises(accumlint.AccumulationError, match="There are findings to raise for: ACC307"):
        window.raise_for_violations("warning")


def test_two_micro_batches_are_enough_to_differ(setup: Setup) -> None:
    setup.k = 2
    with accumlint.watch(setup.model, setup.optimizer) as window:
        setup.step((2, 6))
    assert [finding.code for finding in window.report.findings] == ["ACC201"]


def test_gradients_of_before_are_told(setup: Setup) -> None:
    setup.backward()
    with accumlint.watch(setup.model, setup.optimizer) as window:
        setup.step()
    assert any("not zero when the watch began" in limit for limit in window.report.limits)
    assert window.report.check(Topic.GRADIENT).state is not State.CONFIRMED  # type: ignore[union-attr]
    setup.backward()
    for clear in (setup.optimizer.zero_grad, lambda: [setattr(each, "grad", None) for each in setup.model.parameters()]):
        with accumlint.watch(setup.model, setup.optimizer) as window:
            clear()
            for _ in range(K):
                setup.backward()
            setup.optimizer.step()
        assert window.report.limits == ()
        window.raise_for_violations("warning")


def test_a_scaler_and_two_optimizers(setup: Setup) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
    other = torch.nn.Linear(8, 4)
    second = torch.optim.Adam(other.parameters())
    with accumlint.watch([setup.model, other], [setup.optimizer, second]) as window:
        for _ in range(K):
            inputs, targets = torch.randn(6, 8), torch.randint(4, (6,))
            for model in (setup.model, other):
                scaler.scale(cross_entropy(model(inputs), targets) / K).backward()
        for optimizer in (setup.optimizer, second):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    window.raise_for_violations()
    assert [(update.optimizer_step, update.scale) for update in window.report.updates] == [(1, 8.0), (1, 8.0)]


def test_an_error_in_the_block_goes_through(setup: Setup) -> None:
    before = _places()
    window = accumlint.watch(setup.model, setup.optimizer)
    with pytest.raises(KeyError, match="theirs"), window:
        setup.step(cast("tuple[int, ...]", _Raising()))
    assert _places() == before
    with pytest.raises(accumlint.AccumulationError, match=r"raised an error on rank 0: KeyError: 'theirs'"):
        window.raise_for_violations()
    with accumlint.watch(setup.model, setup.optimizer):
        setup.step()


def test_nothing_is_left(setup: Setup) -> None:
    before = _places()
    held = []
    for _ in range(3):
        with accumlint.watch(setup.model, setup.optimizer) as window:
            loss = cross_entropy(setup.model(torch.randn(6, 8)), torch.randint(4, (6,)))
            loss.backward()
            setup.optimizer.step()
            assert _places() != before
        held.append(weakref.ref(loss))
        assert _places() == before
        assert not any(each._backward_hooks for each in setup.model.parameters())
    del loss
    assert [each() for each in held] == [None] * 3
    model, optimizer = weakref.ref(setup.model), weakref.ref(setup.optimizer)
    del setup.model, setup.optimizer
    gc.collect()
    assert (model(), optimizer()) == (None, None)
    assert window.report.updates


def _places() -> list[Any]:
    """What a watch replaces, or registers with."""
    from torch._dynamo import eval_frame
    from torch.jit import _builtins
    from torch.optim import optimizer

    return [
        *(torch._C._nn.cross_entropy_loss, torch._C._nn.mse_loss, torch.autograd.backward, torch.nn.Module.__call__),
        *(torch.Tensor.mul_, torch.Tensor.zero_, torch.save, torch.optim.Optimizer.zero_grad, torch.amp.GradScaler.step),
        *(torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad._clip_grads_with_norm_, torch.optim.lr_scheduler.LRScheduler.step),
        *(torch.distributed.all_reduce, vars(torch.nn.parallel.DistributedDataParallel).get("require_backward_grad_sync")),
        *(len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks), eval_frame._stance.stance),
        *("mul_" in vars(torch.Tensor), len(_builtins._get_builtin_table()), [type(each).__name__ for each in sys.meta_path]),
    ]


def test_one_at_a_time_and_each_once(setup: Setup) -> None:
    window = accumlint.watch(setup.model, setup.optimizer)
    with pytest.raises(RuntimeError, match="no report yet"):
        window.report  # noqa: B018
    with window:
        assert repr(window) == str(window) == "<accumlint.Window: running>"
        with pytest.raises(RuntimeError, match=r"another accumlint.watch\(\) is running"), accumlint.watch(setup.model, setup.optimizer):
            pass
        setup.step()
    with pytest.raises(RuntimeError, match="has been watched already"), window:
        pass
    window.raise_for_violations()
    assert repr(window) == "<accumlint.Window: confirmed>"
    with pytest.raises(RuntimeError, match="needs a process group"):
        window.gather()


def test_under_another_observer(setup: Setup) -> None:
    """As in a script that watches, and runs under `accumlint verify`."""
    from accumlint.runtime.agent import start
    from accumlint.runtime.settings import Settings

    before = _places()
    outer = start(Settings("outer", "", steps=9))
    try:
        setup.step()
        with accumlint.watch(setup.model, setup.optimizer) as window:
            setup.step()
        window.raise_for_violations()
        setup.step()
        assert (outer.updates, outer.troubles) == (3, [])
        with accumlint.watch(setup.model, setup.optimizer) as window:
            outer.release()
            setup.step()
        window.raise_for_violations()
    finally:
        outer.release()
    assert _places() == before


def test_a_compiled_model_runs_eagerly(setup: Setup) -> None:
    setup.model = Half(setup.model)
    setup.model.compile(backend="eager", fullgraph=True)
    setup.step()
    with accumlint.watch(setup.model, setup.optimizer) as window:
        setup.step()
    window.raise_for_violations()
    assert any("torch.compile was switched off" in limit for limit in window.report.limits)
    setup.step()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model, optimizer: accumlint.watch(optimizer, model), TypeError, "watch() takes a torch.nn.Module as its model"),
        (lambda model, optimizer: accumlint.watch([], optimizer), TypeError, "watch() takes a torch.nn.Module as its model"),
        (lambda model, optimizer: accumlint.watch(model, "adam"), TypeError, "or several of them, not a str"),
        (lambda model, optimizer: accumlint.watch(model, model.parameters()), TypeError, "watch() takes a torch.optim.Optimizer"),
        (lambda model, optimizer: accumlint.watch(model, [optimizer, 3]), TypeError, "not a list of SGD, int"),
        (lambda model, optimizer: accumlint.watch(model, optimizer, 0), ValueError, "updates must be at least 1, not 0"),
        (lambda model, optimizer: accumlint.watch(model, optimizer, 1.5), TypeError, "updates must be a whole number, not a float"),
        (lambda model, optimizer: accumlint.watch(model, optimizer, expect_k=-1), ValueError, "expect_k must be at least 1"),
        (lambda model, optimizer: accumlint.watch(model, optimizer, objective="word"), ValueError, "or 'sequence', not 'word'"),
        (lambda model, optimizer: accumlint.watch(model, optimizer, reference="full"), ValueError, "not 'full'"),
    ],
)  # fmt: skip
def test_wrong_arguments(setup: Setup, call: Callable[[Any, Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call(setup.model, setup.optimizer)
    assert message in str(raised.value)


def test_wrong_names(setup: Setup) -> None:
    with accumlint.watch(setup.model, setup.optimizer) as window:
        setup.step()
    with pytest.raises(ValueError, match=r"require\(\) takes 'weights', .* not 'weight'"):
        window.require("weight")
    with pytest.raises(ValueError, match="at_least must be"):
        window.raise_for_violations("fatal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"text\(\) writes 'full'"):
        window.text("html")


def test_the_example_runs() -> None:
    from accumlint import watching

    failed, tried = doctest.testmod(watching)
    assert failed == 0
    assert tried > 5


def test_importing_is_cheap() -> None:
    script = "import sys, accumlint; print([name for name in ('torch', 'libcst', 'click', 'accumlint.watching') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'wach'"):
        accumlint.wach  # type: ignore[attr-defined]  # noqa: B018


def _divided(setup: Setup, by: int) -> None:
    for _ in range(K):
        (cross_entropy(setup.model(torch.randn(6, 8)), torch.randint(4, (6,))) / by).backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def test_a_divisor_by_name_that_is_not_the_windows_size_is_not_confirmed(setup: Setup) -> None:
    with accumlint.watch(setup.model, setup.optimizer) as window:
        _divided(setup, 2)
    with pytest.raises(accumlint.AccumulationError, match="`by`, which is 2, divides each of 4 means"):
        window.raise_for_violations()
