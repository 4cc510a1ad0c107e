"""Training scripts in half precision, right and wrong, for `tests/gpu/check`: what each must be found to do."""

from __future__ import annotations

import textwrap
from typing import NamedTuple


class Script(NamedTuple):
    """A script, the codes that `accumlint verify` must report for it, and the skipped steps that it must see."""

    name: str
    text: str
    codes: frozenset[str]
    skipped: int = 0


# The digest after each update is what a run with and one without verify are held against each other by.
_BEGIN = """
import hashlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

DEVICE, DIGESTS = sys.argv[1], open(sys.argv[2], "a", buffering=1)
K, UPDATES, CLASSES = 4, 4, 16

torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3{fused})
{scaler}
inputs = torch.randn(UPDATES * K, 24, 32, device=DEVICE)
classes = torch.randint(CLASSES, (UPDATES * K, 24), device=DEVICE)
{ragged}

for update in range(UPDATES):
    optimizer.zero_grad(set_to_none=True)
    for k in range(K):
        x, y = inputs[update * K + k], classes[update * K + k]
        with torch.autocast(DEVICE, dtype=torch.{dtype}):
            logits = model(x)
        {loss}
{window}
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
    DIGESTS.write(digest.hexdigest() + "\\n")
"""
_MEAN = "loss = F.cross_entropy(logits.float(), y) / K"
_RAGGED = "for number, row in enumerate(classes):\n    row[4 + 5 * (number % K) :] = -100"  # 4, 9, 14, 19 valid targets
_OVERFLOW = "init_scale=2.0**60, backoff_factor=2.0**-50"  # the first window is infinite, the second is not


def _script(
    name: str,
    window: str,
    codes: str = "",
    *,
    dtype: str = "float16",
    scaler: str | None = "",
    fused: str = "",
    ragged: str = "",
    loss: str = _MEAN,
    skipped: int = 0,
) -> Script:
    made = "" if scaler is None else f"scaler = torch.amp.GradScaler(DEVICE{scaler and ', ' + scaler})"
    body = textwrap.indent(textwrap.dedent(window).strip("\n"), "    ")
    text = _BEGIN.format(fused=fused, scaler=made, ragged=ragged, dtype=dtype, loss=loss, window=body)
    return Script(name, text.lstrip(), frozenset(codes.split()), skipped)


_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
_RIGHT = f"""
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    {_CLIP}
    scaler.step(optimizer)
    scaler.update()
"""
_FUSED = """
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_PLAIN = """
        loss.backward()
    optimizer.step()
"""
_CLIPS_SCALED = f"""
        scaler.scale(loss).backward()
    {_CLIP}
    scaler.step(optimizer)
    scaler.update()
"""
_UNSCALES_FIRST = """
        scaler.scale(loss).backward()
        if k == 0:
            scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""

SCRIPTS = (
    _script("fp16", _RIGHT),
    _script("fp16-fused", _FUSED, fused=", fused=True"),
    _script("fp16-fused-overflow", _FUSED, fused=", fused=True", scaler=_OVERFLOW, skipped=1),
    _script("fp16-overflow", _RIGHT, scaler=_OVERFLOW, skipped=1),
    _script("fp16-clips-scaled", _CLIPS_SCALED, "ACC403"),
    _script("fp16-unscales-inside", _UNSCALES_FIRST, "ACC402"),
    _script("bf16", _PLAIN, dtype="bfloat16", scaler=None),
    _script("bf16-mean-of-means", _PLAIN, "ACC201", dtype="bfloat16", scaler=None, ragged=_RAGGED),
    _script("bf16-undivided", _PLAIN, "ACC202", dtype="bfloat16", scaler=None, loss="loss = F.cross_entropy(logits.float(), y)"),
)
