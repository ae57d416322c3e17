"""DDP's communication hooks: each bucket of gradients travels compressed."""

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

HOOKS = "none", "bf16", "fp16", "powersgd"


def register(model, args) -> None:
    """Compress the gradients of the DistributedDataParallel `model` as --comm-hook says; PowerSGD: arXiv:1905.13727."""
    if args.comm_hook == "powersgd":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, args.powersgd_rank, start_powerSGD_iter=10), ordered)
    elif args.comm_hook != "none":
        model.register_comm_hook(None, getattr(default_hooks, f"{args.comm_hook}_compress_hook"))


def ordered(state, bucket):
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    if bucket.buffer().is_cpu:
        future.wait()  # else Gloo's threads start the all-reduces of two buckets in any order, another on each rank
    return future
