"""Train a small ConvNet on MNIST with Horovod, one process per device.

    horovodrun -np 2 python minimal/hvd.py
    horovodrun --gloo -np 2 python minimal/hvd.py

mnist/hvd.py has what this leaves out: checkpoints, resume, signals, logs, schedules.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST

# dist: --help works without it, and parse_args() says how to get it.
try:
    import horovod.torch as hvd
except ModuleNotFoundError:
    hvd = None


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--data-dir", default="data", help="MNIST, downloaded if missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    # dist: no package index has Horovod built.
    args = parser.parse_args()
    if hvd is None:
        parser.exit(2, "hvd.py: Horovod is not installed: run scripts/install_horovod.sh\n")
    return args


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
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    model.eval()
    correct = torch.zeros((), device=device)
    for images, labels in loader:
        logits = model(images.to(device))
        correct += (logits.argmax(1) == labels.to(device)).sum()
    # dist: each rank counted in its share only: sum over all, then divide once.
    hvd.allreduce_(correct, op=hvd.Sum)
    return correct.item() / len(loader.dataset)


def main():
    args = parse_args()
    device = torch.device(args.device)
    # dist: connects the processes.
    hvd.init()
    # dist: its own GPU; else all processes use GPU 0.
    if device.type == "cuda":
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
    # dist: over all machines.
    rank = hvd.rank()
    world_size = hvd.size()
    # dist: one machine after the other downloads, unless they share the folder and the first one
    # has; else several processes write the same files.
    for turn in range(world_size):
        if turn == rank and hvd.local_rank() == 0:
            MNIST(args.data_dir, download=True)
        hvd.barrier()
    train_set = load(args.data_dir, train=True)
    test_set = load(args.data_dir, train=False)
    # dist: its own share of each epoch, no image twice; else all ranks compute the same gradients.
    sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # dist: each image once; DistributedSampler repeats some, which count twice.
    share = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, batch_size=1000, sampler=share)
    torch.manual_seed(0)
    model = convnet().to(device)
    # dist: the global batch is world_size times larger, and so is the rate.
    optimizer = torch.optim.SGD(model.parameters(), args.lr * world_size, momentum=0.9)
    # dist: all begin with rank 0's weights. broadcast_optimizer_state would take a step.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # dist: averages gradients in backward, and waits for them in step.
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Average)
    # dist: else all ranks print it.
    if rank == 0:
        print(f"{world_size} processes on {device.type}, {len(train_loader)} steps per epoch")
    for epoch in range(args.epochs):
        # A new order in each epoch, and the same orders in each run.
        # dist: the same on all ranks. Without it, each epoch has the order of the first.
        sampler.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(train_loader, 1):
            logits = model(images.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # dist: the loss of rank 0's own images.
            if rank == 0 and step % 200 == 0:
                print(f"epoch {epoch + 1}, step {step}: loss {loss.item():.4f}")
        accuracy = evaluate(model, test_loader, device)
        # dist: else all ranks print, and write the same file.
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
            torch.save(model.state_dict(), "mnist.pt")


if __name__ == "__main__":
    main()
