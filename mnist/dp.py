"""Train on MNIST with nn.DataParallel: one process splits each batch over all visible GPUs.

    python mnist/dp.py
    CUDA_VISIBLE_DEVICES=0,1 python mnist/dp.py

--batch-size is the whole batch, split over the GPUs. DataParallel copies the model to every GPU in every step, and one
Python process drives them all; PyTorch's documentation recommends DistributedDataParallel: ddp_launch.py.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import datasets, flags, models, processes, schedule
from common.data import DataObject, EpochSampler
from common.metrics import Metrics
from common.run import Run


def parse_args():
    parser = flags.parser(__doc__, dataset="mnist")
    flags.add_data(parser)
    flags.add_training(parser, lrs={"convnet": 0.02, "lenet": 0.02}, epochs=5, batch_size=64)
    flags.add_sgd(parser, weight_decay=0)
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, lr, run):
    """Take one step per batch; return the loss and accuracy seen during training."""
    model.train()
    metrics = Metrics(
        run.device, before=run.sums
    )  # before: the sums of a resumed epoch, over all ranks
    for images, labels in run.progress(train):
        for group in optimizer.param_groups:  # in each step: warm-up, then a cosine to 0
            group["lr"] = schedule.warmup_cosine(
                run.args, lr, run.epoch + run.samples / len(train.dataset)
            )
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        metrics.update(loss, logits, labels)
        run.step(metrics)  # advances the position, which a checkpoint holds beside the weights
        if run.save_due:  # epoch's end, --checkpoint-every, or a signal
            run.save()
        if (
            run.stopping
        ):  # SIGTERM or SIGUSR1 on any rank: all ranks stop after this step, which is saved
            break
    return metrics.average(train.waited)


@torch.inference_mode()
def evaluate(model, val, run):
    """Return loss and accuracy over the whole validation set, each image once."""
    model.eval()
    metrics = Metrics(run.device)
    for images, labels in run.progress(val):
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    return metrics.average(val.waited)


def main():
    args = parse_args()
    processes.install_signal_handlers()  # Ctrl-C ends the run, unsaved; SIGTERM saves, then stops all ranks
    train_set, val_set = datasets.mnist(args)
    device = flags.pick_device(args)
    schedule.divide_batch(args)  # --global-batch-size
    train_sampler = EpochSampler(len(train_set), args.batch_size, args.seed)
    val_sampler = range(len(val_set))
    train = DataObject(train_set, train_sampler, args.batch_size, device)
    val = DataObject(val_set, val_sampler, args.test_batch_size, device)
    torch.manual_seed(args.seed)
    model = flags.to_device(models.MODELS[args.model](channels=1, size=28), args, device)
    lr = args.lr
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    gpus = (
        list(range(torch.accelerator.device_count())) if device.type != "cpu" else []
    )  # dist: all take part
    if (
        args.compile and len(gpus) > 1
    ):  # dist: a copy on another GPU would call the first one's compiled model
        processes.fail(
            "--compile does not work on several GPUs: use ddp_launch.py, or CUDA_VISIBLE_DEVICES=0"
        )
    state = {"model": model, "optimizer": optimizer}
    run = Run(
        args, f"DataParallel, {len(gpus)} GPUs", device, state, lr
    )  # dist: one process, so one rank
    run.resume()  # only with --resume; a folder that holds another run is refused
    if gpus:
        model = nn.DataParallel(
            model, gpus
        )  # dist: splits each batch; checkpoints keep the bare model from above
    for epoch in range(run.epoch, args.epochs):
        train.sampler.set_epoch(
            epoch, run.samples
        )  # a new order each epoch; a resumed epoch continues
        train_metrics = train_one_epoch(model, train, optimizer, lr, run)
        if run.stopping:
            break  # it is saved: --resume continues within this epoch
        run.end_epoch(train_metrics, evaluate(model, val, run))
        run.log()
        run.save()


if __name__ == "__main__":
    main()
