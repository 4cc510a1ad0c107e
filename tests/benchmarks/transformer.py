"""A plain training script to be measured: a causal Transformer of 10 M parameters, K micro-batches an update, one process.

Each update waits for its turn (a byte on the descriptor `--turns`, where one is given) and appends a JSON line to `--out`:
seconds of CPU time of this process, of the clock, and what is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCABULARY = 4096
WIDTH = 320
HEADS = 5
LAYERS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.heads(self.first(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def peak_resident() -> int:
    """Bytes; of this program alone where Linux tells, for the other count is inherited from whoever started it."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [each for values in optimizer.state.values() for each in values.values() if torch.is_tensor(each)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    found = {"parameters": parameters, "gradients": gradients, "state": state}
    return {name: sum(each.numel() * each.element_size() for each in tensors) for name, tensors in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer().to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (given.accumulation, given.batch, given.length + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1)).to(given.device)
    cuda = torch.device(given.device).type == "cuda"
    turns = os.open(given.turns, os.O_RDONLY) if given.turns else None
    with open(given.out, "a", encoding="ascii", buffering=1) as out:
        for update in range(given.updates):
            if turns is not None and not os.read(turns, 1):
                break
            started = time.process_time(), time.perf_counter()
            for k in range(given.accumulation):
                logits = model(tokens[k, :, :-1])
                loss = cross_entropy(logits.flatten(0, 1), tokens[k, :, 1:].flatten()) / given.accumulation
                loss.backward()
            optimizer.step()
            memory = held(optimizer)
            optimizer.zero_grad(set_to_none=True)
            if cuda:
                torch.cuda.synchronize()
            line = {
                "update": update,
                "cpu": time.process_time() - started[0],
                "clock": time.perf_counter() - started[1],
                "start": started[0],
                "resident": peak_resident(),
                "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
                **memory,
            }
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
