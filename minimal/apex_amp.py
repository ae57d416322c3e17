"""Train a small ConvNet on MNIST with DistributedDataParallel and the amp of NVIDIA Apex.

    python minimal/apex_amp.py -n 1 -g 1 -nr 0

It needs a GPU and Apex 25.05, the last with amp: docs/install.md. ddp_amp.py needs only torch.
mnist/apex_amp.py has what this leaves out: checkpoints, resume, signals, logs, schedules.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST

# amp: --help works without Apex; parse_args() says how to get it. PyPI's apex is another package.
try:
    from apex import amp
except ImportError:
    amp = None


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--data-dir", default="data", help="MNIST, downloaded if missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    # dist: how many processes there are, and which of them this machine starts.
    parser.add_argument("-n", "--nodes", type=int, default=1, help="machines")
    parser.add_argument("-g", "--gpus", type=int, default=1, help="processes on each machine")
    parser.add_argument("-nr", "--nr", type=int, default=0, help="this machine, from 0")
    # amp: Apex after 25.05 has no amp.
    args = parser.parse_args()
    if amp is None:
        parser.exit(2, "apex_amp.py: Apex with amp is not installed: see docs/install.md\n")
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
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = torch.zeros((), device=device)
    for images, labels in loader:
        logits = model(images.to(device))
        correct += (logits.argmax(1) == labels.to(device)).sum()
    # dist: each rank counted only its share: sum over all, then divide once.
    dist.all_reduce(correct)
    return correct.item() / len(loader.dataset)


def main(local_rank, args):
    device = torch.device(args.device)
    # dist: one GPU per process, before init_process_group; else all use GPU 0.
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # dist: over all machines.
    rank = args.nr * args.gpus + local_rank
    world_size = args.nodes * args.gpus
    # dist: connects the processes: NCCL for GPUs, Gloo for CPUs.
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device.index)
    # dist: one machine after the other downloads, or finds the files in a shared folder; else
    # several processes write the same files.
    for turn in range(world_size):
        if turn == rank and local_rank == 0:
            MNIST(args.data_dir, download=True)
        dist.barrier()
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
    # amp: O1 has products in fp16, weights in fp32. The model is on its GPU, and not wrapped yet.
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    # dist: averages gradients in backward. `model` itself is the one to evaluate and to save.
    ddp_model = DistributedDataParallel(model)
    # dist: else all ranks print it.
    if rank == 0:
        print(f"{world_size} processes on {device.type}, {len(train_loader)} steps per epoch")
    for epoch in range(args.epochs):
        # A new order in each epoch, the same in each run.
        # dist: the same on all ranks, too. Without it, each epoch repeats the order of the first.
        sampler.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(train_loader, 1):
            # dist: through the wrapper; else no gradient is averaged.
            logits = ddp_model(images.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
            optimizer.zero_grad()
            # amp: else small fp16 gradients underflow to 0. Steps that overflow are skipped.
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            # dist: the loss of rank 0's own images.
            if rank == 0 and step % 200 == 0:
                print(f"epoch {epoch + 1}, step {step}: loss {loss.item():.4f}")
        accuracy = evaluate(model, test_loader, device)
        # dist: else all ranks print, and write the same file.
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
            torch.save(model.state_dict(), "mnist.pt")


# dist: mp.spawn calls this in each process, with the number of the process on this machine.
def run(local_rank, args):
    main(local_rank, args)
    # dist: closes the connections, once main() has freed the wrapper; NCCL warns without it.
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args()
    # dist: where the processes meet: an address and a free port of the first machine.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    if args.nodes > 1:
        where = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
        print(f"machine {args.nr} of {args.nodes}: all of them meet at {where}")
    mp.spawn(run, (args,), args.gpus)
