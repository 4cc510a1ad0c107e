"""Small training programs in the loops of frameworks; each ends with its parameters, as bits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from tests.runtime.ddp.observing import bits
from tests.runtime.equality.programs import UPDATES, K

Done = Callable[[int], None]
MICRO_BATCHES = K * UPDATES


def _network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 17), nn.GELU(), nn.Dropout(0.1), nn.Linear(17, 3))


def _data(batches: int = MICRO_BATCHES) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(7)
    targets = torch.randint(-1, 3, (4 * batches,), generator=generator)
    targets[::4] = 1  # no batch without a target
    return TensorDataset(torch.randn(4 * batches, 6, generator=generator), targets)


def _loss(output: Any, targets: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(output, targets, ignore_index=-1)


def _parameters(module: Any) -> dict[str, Any]:
    return {"parameters": [bits(each) for each in module.parameters()]}


def accelerate(done: Done) -> dict[str, Any]:
    """Accelerate's window: `accumulate` round the micro-batch, in one process or in as many as there are."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # of the group that there is
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
    assert accelerator.num_processes == world
    module = _network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(_data(world * MICRO_BATCHES), batch_size=4, shuffle=True)
    module, optimizer, loader, schedule = accelerator.prepare(module, optimizer, loader, schedule)
    updates = 0
    for inputs, targets in loader:
        with accelerator.accumulate(module):
            accelerator.backward(_loss(module(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done(updates)
            updates += 1
    return {**_parameters(module), "updates": updates}


def lightning(done: Done) -> dict[str, Any]:
    """Lightning's automatic optimisation."""
    import lightning as framework
    import torch
    from torch.utils.data import DataLoader

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()

        def training_step(self, batch: Any, index: int) -> Any:
            return _loss(self.network(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % K == 0:
                done(batch_idx // K)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    trainer = framework.Trainer(
        max_epochs=1, accumulate_grad_batches=K, gradient_clip_val=0.5, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_data(), batch_size=4, shuffle=True))
    return {**_parameters(module), "updates": trainer.global_step}


def transformers(done: Done) -> dict[str, Any]:
    """The Trainer of Transformers, with a model that divides by the window's count."""
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.network = _network()
            self.post_init()

        def forward(self, inputs: Any = None, labels: Any = None, num_items_in_batch: Any = None, **options: Any) -> Any:
            output = self.network(inputs)
            total = torch.nn.functional.cross_entropy(output, labels, ignore_index=-1, reduction="sum")
            count = num_items_in_batch if num_items_in_batch is not None else (labels != -1).sum()
            return {"loss": total / count, "logits": output}

    class Updates(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **options: Any) -> None:
            done(state.global_step - 1)

    rows = [{"inputs": inputs, "labels": target} for inputs, target in _data()]
    module = Model(PretrainedConfig())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=K, num_train_epochs=1, learning_rate=0.01,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", seed=3,
        )  # fmt: skip
        trainer = Trainer(model=module, args=arguments, train_dataset=rows, callbacks=[Updates()])
        trainer.train()
    return {**_parameters(module), "updates": trainer.state.global_step}


def ignite(done: Done) -> dict[str, Any]:
    """Ignite's supervised trainer."""
    import torch
    from ignite.engine import Events, create_supervised_trainer
    from torch.utils.data import DataLoader

    module = _network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = create_supervised_trainer(module, optimizer, _loss, gradient_accumulation_steps=K)
    updates = []

    @engine.on(Events.ITERATION_COMPLETED(every=K))
    def counted(engine: Any) -> None:
        done(len(updates))
        updates.append(engine.state.iteration)

    engine.run(DataLoader(_data(), batch_size=4, shuffle=True), max_epochs=1)
    return {**_parameters(module), "updates": len(updates)}


PROGRAMS = {"accelerate": accelerate, "lightning": lightning, "transformers": transformers, "ignite": ignite}
PACKAGES = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers", "ignite": "ignite.engine"}
