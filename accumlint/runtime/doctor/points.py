"""The places in torch that the probes attach to, and what `accumlint verify` does not observe where one is missing."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """A hook point: dotted names, of which one must be there, and what is not observed without it."""

    names: tuple[str, ...]
    without: str
    needed: bool = True  # False: a torch that `verify` supports may lack it


def _losses() -> list[Point]:
    compiled = "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy"
    margins = "soft_margin_loss multi_margin_loss multilabel_margin_loss"
    general = "binary_cross_entropy_with_logits kl_div ctc_loss poisson_nll_loss"
    pairs = "margin_ranking_loss triplet_margin_loss cosine_embedding_loss hinge_embedding_loss"
    return [
        *(Point((f"torch._C._nn.{name}",), f"weights under {name}") for name in f"{compiled} {margins}".split()),
        *(Point((f"torch.{name}",), f"weights under {name}") for name in f"{general} {pairs}".split()),
        Point(("torch.nn.functional.linear_cross_entropy",), "weights under linear_cross_entropy", needed=False),
    ]


_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
_REPLICATE = "torch.distributed._composable.replicate"
_FSDP1 = "torch.distributed.fsdp.FullyShardedDataParallel"
_FLAT = "torch.distributed.fsdp._runtime_utils"
_SHARDED = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")  # newer, older
_SCALER = {"scale": "the loss scale", "unscale_": "unscaling", "step": "skipped steps", "update": "updates of the scale"}


def _under(modules: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for module in modules)


POINTS: tuple[Point, ...] = (
    Point(("torch.nn.Module.__call__",), "forwards"),
    Point(("torch.autograd.backward",), "backwards, micro-batches, windows"),
    Point(("torch.Tensor.register_hook",), "weights of targets, the reference gradient"),
    *_losses(),
    Point(("torch.autograd.graph.saved_tensors_hooks.__enter__",), "losses inside a checkpoint"),
    Point((f"{_DDP}.__init__",), "DDP: reductions"),
    Point(("torch.distributed._register_comm_hook",), "DDP: reductions, beside a hook of the script's own too"),
    Point(("torch.distributed._register_builtin_comm_hook",), "DDP: reductions with a built-in hook"),
    Point((f"{_DDP}.no_sync",), "DDP: the sync flag"),
    Point((f"{_DDP}._set_static_graph",), "DDP: a graph that is made static after the wrapper", needed=False),
    Point((f"{_DDP}._delayed_all_reduce_hook",), "DDP: parameters whose reduction is delayed", needed=False),
    Point(("torch.distributed.GradBucket.buffer",), "DDP: the factor of the reduction"),
    Point(("torch.distributed.algorithms.join.Join.notify_join_context",), "DDP: ranks that ran out of data", needed=False),
    Point((f"{_REPLICATE}._ReplicateState.init",), "replicate: reductions", needed=False),
    Point((f"{_REPLICATE}._ReplicateState.record_init_args",), "replicate: reductions", needed=False),
    Point((f"{_REPLICATE}.DDP.set_requires_gradient_sync",), "replicate: the sync flag", needed=False),
    Point((f"{_FSDP1}.__init__",), "FSDP1: all of it"),
    Point((f"{_FSDP1}.no_sync",), "FSDP1: the sync flag"),
    Point((f"{_FSDP1}.register_comm_hook",), "FSDP1: hooks of the script's own"),
    Point((f"{_FLAT}._reduce_grad",), "FSDP1: reductions", needed=False),
    Point((f"{_FLAT}._accumulate_sharded_grad",), "FSDP1: reductions", needed=False),
    Point((f"{_FLAT}._reduce_grad_no_shard",), "FSDP1: reductions", needed=False),
    Point(_under(_SHARDED, "_fsdp_state.FSDPState.init"), "FSDP2: all of it", needed=False),
    Point(_under(_SHARDED, "_fsdp_param_group.FSDPParamGroup.post_backward"), "FSDP2: reductions", needed=False),
    Point(_under(_SHARDED, "_fsdp_param_group.foreach_reduce"), "FSDP2: reductions", needed=False),
    Point(_under(_SHARDED, "FSDPModule.set_requires_gradient_sync"), "FSDP2: the sync flag", needed=False),
    *(Point((f"torch.amp.grad_scaler.GradScaler.{name}",), f"AMP: {what}") for name, what in _SCALER.items()),
    Point(("torch.optim.optimizer.register_optimizer_step_pre_hook",), "the gradient before an update"),
    Point(("torch.optim.optimizer.register_optimizer_step_post_hook",), "updates, windows"),
    Point(("torch.optim.Optimizer.add_param_group",), "the reference gradient"),
    Point(("torch.optim.Optimizer.zero_grad",), "gradients set to zero"),
    Point(("torch.nn.Module.zero_grad",), "gradients set to zero by the model"),
    Point(("torch.Tensor.div_",), "gradients scaled by hand"),
    Point(("torch._foreach_mul_",), "gradients scaled by hand, as lists"),
    Point(("torch._foreach_div_",), "gradients scaled by hand, as lists"),
    Point(("torch._foreach_zero_",), "gradients set to zero by hand, as lists"),
    Point(("torch.nn.utils.clip_grad.clip_grad_norm_",), "clipping"),
    Point(("torch.nn.utils.clip_grad._clip_grads_with_norm_",), "clipping through a name that was imported before a watch began"),
    Point(("torch.nn.utils.clip_grad.clip_grad_value_",), "clipping by value"),
    Point(("torch.optim.lr_scheduler.LRScheduler.step",), "the schedule"),
    Point(("torch.optim.swa_utils.AveragedModel.update_parameters",), "averages of weights"),
    Point(("torch.utils.data.dataloader._BaseDataLoaderIter.__next__",), "batches taken from a loader"),
    Point(("torch.save",), "checkpoints"),
    Point(("torch.distributed.checkpoint.save",), "distributed checkpoints", needed=False),
    Point(("torch.distributed.distributed_c10d._get_default_store",), "the end of all ranks at one update"),
)

# What is seen of a framework; its own patches and loops are torch's below the surface, save where this says otherwise.
FRAMEWORKS: dict[str, str] = {
    "accelerate": "all behind `prepare`: DDP, FSDP, the scaler, the optimizer; with its DeepSpeed plugin as deepspeed",
    "transformers": "the Trainer through accelerate and torch: losses of its models, windows, clipping, schedule",
    "lightning": "Trainer and Fabric through torch: backwards, DDP and FSDP strategies, the scaler, steps of its closures",
    "pytorch-lightning": "as lightning",
    "deepspeed": "losses, backwards and optimizer steps; reductions and scaling of its ZeRO engine are its own and not observed",
    "pytorch-ignite": "all, for its engines call the training step of the script",
    "apex": "steps of its optimizers; reductions of its own DDP are not observed",
    "liger-kernel": "weights under its fused cross entropies",
    "flash-attn": "weights under its fused cross entropies",
    "torchtitan": "FSDP2: reductions; its gradient reference is not observed",
}
