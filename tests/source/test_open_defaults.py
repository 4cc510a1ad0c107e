"""What a default leaves out may be given: the norm that gradients are clipped at."""

from __future__ import annotations

from textwrap import dedent

import pytest

from accumlint.judge import judge_rehearsal
from accumlint.rule import catalogue
from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals

FUNCTION = """
    import torch

    def train(model, optimizer, loader, accumulate, max_grad_norm=None):
        for index, (x, y) in enumerate(loader):
            (torch.nn.functional.mse_loss(model(x), y) / accumulate).backward()
            {clip}
            if (index + 1) % accumulate == 0:
                {boundary}
                optimizer.step()
                optimizer.zero_grad()
"""
CLASS = """
    import torch

    class Fitter:
        def __init__(self, model, loader, accumulate, grad_clip=None):
            self.model, self.loader, self.accumulate, self.grad_clip = model, loader, accumulate, grad_clip
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(self):
            for index, (x, y) in enumerate(self.loader):
                (torch.nn.functional.mse_loss(self.model(x), y) / self.accumulate).backward()
                {clip}
                if (index + 1) % self.accumulate == 0:
                    {boundary}
                    self.optimizer.step()
                    self.optimizer.zero_grad()
"""
OF_FUNCTION = "if max_grad_norm is not None: torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)"
OF_CLASS = "if self.grad_clip is not None: torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)"


def codes(text: str) -> set[str]:
    source = parse(dedent(text).encode(), "train.py")
    assert isinstance(source, Source)
    found = [judge_rehearsal(rehearsal, catalogue().values()) for rehearsal in rehearsals(source)]
    return {finding.code for findings in found for finding in findings}


@pytest.mark.parametrize(("form", "clip"), [(FUNCTION, OF_FUNCTION), (CLASS, OF_CLASS)])
def test_clipping_that_a_default_leaves_out(form: str, clip: str) -> None:
    assert codes(form.format(clip=clip, boundary="pass")) == {"ACC304"}
    assert codes(form.format(clip="pass", boundary=clip)) == set()
