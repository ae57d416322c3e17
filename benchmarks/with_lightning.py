"""Train our ConvNet on MNIST or CIFAR-10 with Lightning's Trainer: peers.py compares it with our
recipes.

    pip install lightning torchvision
    python benchmarks/with_lightning.py --dataset mnist --devices 2

As Lightning's documentation suggests: a LightningModule, DataLoaders, a Trainer.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import lightning as L
import small_images  # beside this file
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from images.models import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=0)
    return parser.parse_args()


class Classifier(L.LightningModule):
    def __init__(self, args, shape):
        super().__init__()
        self.args = args
        self.model = ConvNet(**shape)

    def configure_optimizers(self):
        return torch.optim.SGD(
            self.parameters(), self.args.lr, momentum=0.9, weight_decay=self.args.weight_decay
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True)

    def on_train_epoch_start(self):
        self.began = time.perf_counter()

    def on_validation_start(self):
        self.ended = time.perf_counter()

    def on_train_epoch_end(self):
        # Lightning calls this after the epoch's validation.
        accuracy = self.trainer.callback_metrics["val_accuracy"]
        images = len(self.trainer.train_dataloader.dataset)
        rate = images / (self.ended - self.began)
        self.print(f"\nepoch {self.current_epoch + 1}: Accuracy: {accuracy:.2%}")
        self.print(f"{rate:,.0f} images/s")


def main():
    args = parse_args()
    L.seed_everything(0)
    train_set, val_set, shape = small_images.load(args.dataset, args.data_dir)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers)
    val_loader = DataLoader(val_set, 1000, num_workers=args.workers)
    trainer = L.Trainer(max_epochs=args.epochs, devices=args.devices)
    model = Classifier(args, shape)
    trainer.fit(model, train_loader, val_loader)


if __name__ == "__main__":
    main()
