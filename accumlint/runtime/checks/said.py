"""What is wrong, in a clause for each code: the sections of the report open with it."""

from __future__ import annotations

from collections.abc import Sequence

SAID = {
    "ACC301": "the optimizer steps after each micro-batch, though the loss is one of a window",
    "ACC302": "gradients are cleared before a step has used them",
    "ACC303": "the gradients of the window before are still there",
    "ACC304": "gradients are clipped inside the window",
    "ACC306": "the boundary comes at the wrong micro-batch",
    "ACC307": "what is left over at the end of a pass is lost, or falls into the next",
    "ACC308": "gradients are clipped before they are normalised",
    "ACC309": "graphs are kept over micro-batches",
    "ACC312": "the micro-batches of a window are the same data",
    "ACC313": "a window whose step is left out is not cleared",
    "ACC314": "a backward leaves gradients for another optimizer's step",
    "ACC315": "the optimizer steps during the backward",
    "ACC319": "a micro-batch is left out of a window that is divided as a whole one",
    "ACC401": "gradients are unscaled twice",
    "ACC402": "gradients are unscaled inside the window",
    "ACC403": "gradients are clipped while they are still scaled",
    "ACC404": "the scale is updated inside the window",
    "ACC405": "scaled gradients reach the step",
    "ACC406": "a loss is not scaled, and the scaler steps",
}


def said(codes: Sequence[str]) -> str:
    """The clauses of these codes as one sentence."""
    clauses = "; ".join(SAID[code] for code in codes if code in SAID)
    return f"{clauses[:1].upper()}{clauses[1:]}." if clauses else ""
