"""Helpers of other files that raise in every rehearsal: what they give is unknown, and the loop is judged all the same."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

MAIN = """
    import torch
    from helpers import prompts

    def main(args, loader):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fixed = prompts(args.prompt)
        for step, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(x, fixed), y) / args.accumulation_steps
            loss.backward()
            optimizer.step()
            if (step + 1) % args.accumulation_steps == 0:
                print(fixed)
            optimizer.zero_grad()
"""
RAISES = """
    def prompts(prompt, device=None):
        {statement}
"""


@pytest.mark.parametrize(
    "statement",
    ["raise NotImplementedError", "return checked(prompt)\n\n    def checked(prompt):\n        raise ValueError('no tokenizer')"],
)
def test_a_helper_that_raises_ends_its_call_only(lint: Lint, statement: str) -> None:
    found = lint({"main.py": MAIN, "helpers.py": RAISES.format(statement=statement)})
    assert found == {("main.py", "ACC301", "optimizer.step()")}


def test_a_script_that_raises_trains_nothing(lint: Lint) -> None:
    main = MAIN.replace("fixed = prompts(args.prompt)", "fixed = prompts\n        raise SystemExit('moved')")
    assert lint({"main.py": main, "helpers.py": RAISES.format(statement="return prompt")}) == set()
