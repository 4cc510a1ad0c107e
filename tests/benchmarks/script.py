"""Writes a training script of some 400 lines as people write them: options, data, model, DDP, AMP, clipping, schedule, checkpoints."""

from __future__ import annotations

HEAD = '''\
"""Pretrains a small causal Transformer on packed token blocks."""
import argparse
import contextlib
import json
import logging
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logger = logging.getLogger(__name__)


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
'''

OPTIONS = (
    "epochs batch_size block_size hidden_size num_heads num_layers vocab_size warmup_steps eval_steps save_steps log_steps "
    "num_workers seed max_steps keep_checkpoints prefetch patience eval_batches beam_size ngram window stride"
).split()

MIDDLE = '''\
    args = parser.parse_args()
    args.distributed = args.local_rank != -1
    return args


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Blocks(Dataset):
    """Token blocks of fixed size out of one memory-mapped file."""

    def __init__(self, path, block_size):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.block_size = block_size

    def __len__(self):
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index):
        start = index * self.block_size
        piece = torch.from_numpy(self.tokens[start : start + self.block_size + 1].astype(np.int64))
        return piece[:-1], piece[1:]
'''

LAYER = '''\


class {name}(nn.Module):
    """{doc}"""

    def __init__(self, hidden_size, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        batch, length, hidden = x.shape
        return x.view(batch, length, self.num_heads, hidden // self.num_heads).transpose(1, 2)

    def forward(self, x, mask=None):
        residual = x
        x = self.norm(x)
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = self.dropout(F.softmax(scores, dim=-1))
        x = (weights @ v).transpose(1, 2).reshape(residual.shape)
        return residual + self.out(x)
'''

TAIL = """\


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleList([SelfAttention(args.hidden_size, args.num_heads) for _ in range(args.num_layers)])
        self.head = nn.Linear(args.hidden_size, args.vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = torch.tril(torch.ones(tokens.size(1), tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def get_schedule(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model, loader, device, limit):
    model.eval()
    losses = []
    for step, (tokens, targets) in enumerate(loader):
        if step >= limit:
            break
        logits = model(tokens.to(device))
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()).item())
    model.train()
    return sum(losses) / max(1, len(losses))


def save(path, model, optimizer, scheduler, scaler, step):
    path.mkdir(parents=True, exist_ok=True)
    raw = model.module if hasattr(model, "module") else model
    state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    state.update(scaler=scaler.state_dict(), step=step)
    torch.save(state, path / f"step_{step}.pt")


def main():
    args = get_args()
    set_seed(args.seed)
    if args.distributed:
        dist.init_process_group("nccl")
        torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", max(args.local_rank, 0))
    dataset = Blocks(args.data, args.block_size)
    sampler = DistributedSampler(dataset) if args.distributed else None
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, shuffle=sampler is None, drop_last=True, num_workers=args.num_workers)
    model = Transformer(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    updates_per_epoch = len(loader) // args.gradient_accumulation_steps
    scheduler = get_schedule(optimizer, args.warmup_steps, args.epochs * updates_per_epoch)
    scaler = torch.cuda.amp.GradScaler(enabled=args.fp16)
    if args.distributed:
        model = DDP(model, device_ids=[args.local_rank])

    global_step = 0
    tr_loss = 0.0
    started = time.time()
    model.train()
    optimizer.zero_grad(set_to_none=True)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        micro_batches = updates_per_epoch * args.gradient_accumulation_steps
        for step, (tokens, targets) in enumerate(loader):
            if step >= micro_batches:
                break
            tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            boundary = (step + 1) % args.gradient_accumulation_steps == 0
            context = model.no_sync() if args.distributed and not boundary else contextlib.nullcontext()
            with context:
                with torch.autocast("cuda", enabled=args.fp16):
                    logits = model(tokens)
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss = loss / args.gradient_accumulation_steps
                scaler.scale(loss).backward()
            tr_loss += loss.item()
            if boundary:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
                global_step += 1
                if global_step % args.log_steps == 0:
                    speed = args.log_steps / (time.time() - started)
                    logger.info("step %d loss %.4f updates/s %.2f", global_step, tr_loss / args.log_steps, speed)
                    tr_loss, started = 0.0, time.time()
                if global_step % args.eval_steps == 0:
                    logger.info("validation loss %.4f", evaluate(model, loader, device, args.eval_batches))
                if global_step % args.save_steps == 0 and args.local_rank in (-1, 0):
                    save(args.output, model, optimizer, scheduler, scaler, global_step)
                if global_step >= args.max_steps:
                    return
    (args.output / "done.json").write_text(json.dumps({"steps": global_step}))


if __name__ == "__main__":
    main()
"""


def training_script(lines: int = 400) -> str:
    """A correct script of about that many lines; layers that nobody uses make up its length."""
    options = "".join(f'    parser.add_argument("--{name}", type=int, default={7 + at})\n' for at, name in enumerate(OPTIONS))
    text = HEAD + options + MIDDLE + LAYER.format(name="SelfAttention", doc="Causal attention with its residual.")
    number = 2
    while (text + TAIL).count("\n") + LAYER.count("\n") // 2 < lines:
        text += LAYER.format(name=f"Attention{number}", doc=f"Variant {number}.")
        number += 1
    return text + TAIL
