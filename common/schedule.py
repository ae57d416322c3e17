"""What the number of processes does to the learning rate, and how it changes over the run."""

import math

import torch


def lr_factor(args, world_size):
    """What --lr is multiplied with for `world_size` times the batch: see --scale-lr.

    Linear is right while the gradient noise dominates, with a warm-up (Goyal et al. 2017, arXiv:1706.02677).
    """
    return {"linear": world_size, "sqrt": math.sqrt(world_size), "none": 1}[args.scale_lr]


def warmup_cosine(optimizer, args, batches_per_epoch):
    """A scheduler to step after the optimizer: linear from --lr to the optimizer's rate, then a half cosine to zero.

    With one process the two rates are the same, and the warm-up is a plateau.
    """
    steps_per_epoch = math.ceil(batches_per_epoch / args.accumulate)
    warmup, total = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch
    start = args.lr / optimizer.param_groups[0]["lr"]

    def factor(step):
        if step < warmup:
            return start + (1 - start) * step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    scheduler.steps_per_epoch = steps_per_epoch  # in its state_dict, as a resumed run has to have as many
    return scheduler


def seek(scheduler, epoch):
    """Set a new scheduler, and the rate of its optimizer, to where `epoch` whole epochs lead."""
    steps = epoch * scheduler.steps_per_epoch
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": steps - 1, "_step_count": steps})
    scheduler.step()
