"""Train a small ConvNet on MNIST with nn.DataParallel: one process, all GPUs of the machine.

    python minimal/dp.py

mnist/dp.py has what this leaves out: checkpoints, resume, signals, logs, schedules.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchvision.datasets import MNIST


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--data-dir", default="data", help="MNIST, downloaded if missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def load(folder, train):
    mnist = MNIST(folder, train, download=True)
    images = mnist.data.unsqueeze(1) / 255
    return TensorDataset((images - 0.1307) / 0.3081, mnist.targets)


def convnet():
    first = [nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = torch.zeros((), device=device)
    for images, labels in loader:
        logits = model(images.to(device))
        correct += (logits.argmax(1) == labels.to(device)).sum()
    return correct.item() / len(loader.dataset)


def main():
    args = parse_args()
    device = torch.device(args.device)
    train_set = load(args.data_dir, train=True)
    test_set = load(args.data_dir, train=False)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=1000)
    torch.manual_seed(0)
    model = convnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    # dist: splits each batch over all GPUs. `model` itself is the one to evaluate and to save.
    dp_model = nn.DataParallel(model) if device.type == "cuda" else model
    print(f"1 process on {device.type}, {len(train_loader)} steps per epoch")
    for epoch in range(args.epochs):
        # A new order in each epoch, and the same orders in each run.
        sampler.generator.manual_seed(epoch)
        model.train()
        for step, (images, labels) in enumerate(train_loader, 1):
            # dist: through the wrapper; else the first GPU computes alone.
            logits = dp_model(images.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 200 == 0:
                print(f"epoch {epoch + 1}, step {step}: loss {loss.item():.4f}")
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
        torch.save(model.state_dict(), "mnist.pt")


if __name__ == "__main__":
    main()
