"""DDP's communication hooks: each bucket of gradients travels compressed."""

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = ("none", "bf16", "fp16", "powersgd")


def register(model: DistributedDataParallel, name: str, powersgd_rank: int = 2) -> None:
    """Compress the gradients of `model` as the hook `name` does; PowerSGD: arXiv:1905.13727."""
    if name == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, powersgd_rank, start_powerSGD_iter=10)
        model.register_comm_hook(state, powersgd_in_order)


def powersgd_in_order(state, bucket):
    """torch's hook; on a CPU it is finished before the next bucket begins."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    if bucket.buffer().is_cpu:
        # Else Gloo's threads start the all-reduces of two buckets in another order on each rank.
        future.wait()
    return future
