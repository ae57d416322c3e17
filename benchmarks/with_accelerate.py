"""Train our ConvNet on MNIST or CIFAR-10 with Hugging Face accelerate: peers.py compares it with
our recipes.

    pip install accelerate torchvision
    python benchmarks/with_accelerate.py --dataset mnist
    torchrun --nproc-per-node=2 benchmarks/with_accelerate.py --cpu --dataset mnist

Several processes without GPUs need --cpu; otherwise each of them trains alone.

As accelerate's documentation suggests: a hand-written loop, whose objects `prepare` wraps.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import small_images  # beside this file
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from images.models import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=0)
    return parser.parse_args()


def evaluate(accelerator, model, val_loader):
    """The accuracy over the validation set."""
    model.eval()
    correct = 0
    count = 0
    for images, labels in val_loader:
        with torch.no_grad():
            predictions = model(images).argmax(1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        count += len(labels)
    return correct / count


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=args.cpu)
    set_seed(0)
    train_set, val_set, shape = small_images.load(args.dataset, args.data_dir)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers)
    val_loader = DataLoader(val_set, 1000, num_workers=args.workers)
    model = ConvNet(**shape)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay
    )
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    for epoch in range(args.epochs):
        model.train()
        began = time.perf_counter()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        rate = len(train_set) / (time.perf_counter() - began)
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch + 1}: Accuracy: {accuracy:.2%}")
        accelerator.print(f"{rate:,.0f} images/s")
    accelerator.end_training()


if __name__ == "__main__":
    main()
