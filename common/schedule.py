"""The learning rate: how it scales with the number of processes, and how it changes during the run."""

import math


def lr_factor(args, world_size: int) -> float:
    """The factor for --lr with `world_size` times the batch (Goyal et al. 2017, arXiv:1706.02677)."""
    return {"linear": world_size, "sqrt": math.sqrt(world_size), "none": 1}[args.scale_lr]


def warmup_cosine(args, lr: float, epochs_done: float) -> float:
    """The rate after `epochs_done` (float) epochs: linear from --lr to `lr`, then half a cosine to 0 at --epochs."""
    if epochs_done < args.warmup_epochs:
        return args.lr + (lr - args.lr) * epochs_done / args.warmup_epochs
    share = (epochs_done - args.warmup_epochs) / max(1e-9, args.epochs - args.warmup_epochs)
    return 0.5 * lr * (1 + math.cos(math.pi * min(1, share)))
