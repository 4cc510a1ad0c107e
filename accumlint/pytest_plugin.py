"""The pytest fixture `accumulation_window`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from accumlint.watching import Window


@pytest.fixture
def accumulation_window() -> Callable[..., Window]:
    """Watches a training step, and fails the test with the report where its gradient accumulation is wrong.

    Takes the arguments of `accumlint.watch`, and `at_least="warning"` to fail for warnings as well::

        def test_step(accumulation_window):
            with accumulation_window(model, optimizer) as window:
                train_step()
            window.require("weights", "gradient")
    """
    from accumlint.watching import checked

    return checked
