"""Train on ImageNet with nn.DataParallel: one process splits each batch over all the GPUs that it sees.

    python imagenet/dp.py
    CUDA_VISIBLE_DEVICES=0,1 python imagenet/dp.py

--batch-size is that of the process: each GPU gets its part of it. DataParallel copies the model to every GPU in every
step, and one Python process drives them all; PyTorch's documentation advises DistributedDataParallel: ddp_spawn.py.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # common/ stands beside this file's folder
from common import data, failures, flags, models, schedule
from common.run import Run


def parse_args():
    parser = flags.parser(__doc__, dataset="imagenet", models=("resnet50", *models.classifiers(), *models.SMALL),
                          epochs=90, batch_size=256, lr=0.1, weight_decay=1e-4)
    flags.add_imagenet(parser)
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, scheduler, run):
    """One step per --accumulate batches; returns the loss and accuracy that the model had on the way."""
    model.train()
    metrics = run.metrics()
    for images, labels in run.batches(train, metrics):
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=run.args.label_smoothing)
        (loss / run.batches_in_step).backward()
        if run.ends_step:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        metrics.update(loss, logits, labels)
    return metrics.average()


@torch.inference_mode()
def evaluate(model, val, run):
    """Loss and accuracy over the whole validation set, each image once."""
    model.eval()
    metrics = run.metrics()
    for images, labels in run.batches(val, metrics):
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    return metrics.average()


def main():
    args = parse_args()
    device = flags.pick_device(args)
    gpus = list(range(torch.cuda.device_count())) if device.type == "cuda" else []  # dist: all that are visible
    if args.compile and gpus:  # dist: it copies the model, and not what is compiled
        failures.fail("--compile does not work with nn.DataParallel: take ddp_launch.py, or leave it out")
    strategy = f"DataParallel, {len(gpus)} GPUs" if gpus else "DataParallel (on the CPU the bare module)"  # dist: which
    run = Run(args, strategy, "python", device)  # dist: one process whatever the number of GPUs, so one rank
    train, val = data.imagenet(args, device)
    model = models.build(args, channels=3, size=args.image_size, classes=train.classes).to(device)
    lr = args.lr
    optimizer = torch.optim.SGD(models.decay_groups(model, args.weight_decay), lr, momentum=args.momentum)
    scheduler = schedule.warmup_cosine(optimizer, args, len(train))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start_epoch = run.start(state)
    if args.evaluate:
        return run.end_evaluation(evaluate(model, val, run))
    if gpus:
        model = nn.DataParallel(model, gpus)  # dist: splits each batch; checkpoints keep the bare model from above
    for epoch in range(start_epoch, args.epochs):
        train.sampler.set_epoch(epoch)  # another order in each epoch
        train_metrics = train_one_epoch(model, train, optimizer, scheduler, run)
        run.end_epoch(epoch, train_metrics, evaluate(model, val, run))


if __name__ == "__main__":
    main()
