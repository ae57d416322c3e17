"""The learning rate: how it scales with the number of processes, and how it changes during the run."""

import math

from common.processes import fail


def divide_batch(args, world_size: int = 1) -> None:
    """Set args.batch_size, the images of one process and pass, if --global-batch-size is given."""
    if args.global_batch_size:
        parts = world_size * getattr(args, "accumulate", 1)
        if args.global_batch_size % parts:
            fail(f"--global-batch-size {args.global_batch_size}: take a multiple of {parts} (processes x --accumulate)")
        args.batch_size = args.global_batch_size // parts


def lr_factor(args, world_size: int) -> float:
    """The factor for --lr with `world_size` times the batch (Goyal et al. 2017, arXiv:1706.02677)."""
    return 1 if args.global_batch_size else {"linear": world_size, "sqrt": world_size**0.5, "none": 1}[args.scale_lr]


def warmup_cosine(args, lr: float, epochs_done: float) -> float:
    """The rate after `epochs_done` (float) epochs: linear from --lr to `lr`, then half a cosine to 0 at --epochs."""
    if epochs_done < args.warmup_epochs:
        return args.lr + (lr - args.lr) * epochs_done / args.warmup_epochs
    share = (epochs_done - args.warmup_epochs) / max(1e-9, args.epochs - args.warmup_epochs)
    return 0.5 * lr * (1 + math.cos(math.pi * min(1, share)))
