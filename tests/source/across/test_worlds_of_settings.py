"""Which settings are answered otherwise: first those on which most hangs, wherever they are asked first."""

from __future__ import annotations

from tests.source.across.conftest import Lint

MANY = """
    import torch
    import torch.nn.functional as F
    from elsewhere import cfg, log

    def main(model, loader):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {flags}
        scaler = torch.amp.GradScaler() if cfg.level != "O0" else None
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / cfg.accumulation
            if cfg.level != "O0":
                scaler.scale(loss).backward()
                if (i + 1) % cfg.accumulation == 0:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if (i + 1) % cfg.accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()
"""


def test_what_the_update_hangs_on_comes_first(lint: Lint) -> None:
    flags = "\n".join(f"        loader = log(loader) if cfg.flag_{number} else loader" for number in range(14)).lstrip()
    assert ("main.py", "ACC304", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)") in lint({"main.py": MANY.format(flags=flags)})
