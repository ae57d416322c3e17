"""Train on ImageNet on one device. Every other recipe is read against this one.

    python imagenet/single.py
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # common/ stands beside this file's folder
from common import data, flags, models, schedule
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
    run = Run(args, "single device", "python", device)
    train, val = data.imagenet(args, device)
    model = models.build(args, channels=3, size=args.image_size, classes=train.classes).to(device)
    lr = args.lr
    optimizer = torch.optim.SGD(models.decay_groups(model, args.weight_decay), lr, momentum=args.momentum)
    scheduler = schedule.warmup_cosine(optimizer, args, len(train))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start_epoch = run.start(state)
    if args.evaluate:
        return run.end_evaluation(evaluate(model, val, run))
    for epoch in range(start_epoch, args.epochs):
        train.sampler.set_epoch(epoch)  # another order in each epoch
        train_metrics = train_one_epoch(model, train, optimizer, scheduler, run)
        run.end_epoch(epoch, train_metrics, evaluate(model, val, run))


if __name__ == "__main__":
    main()
