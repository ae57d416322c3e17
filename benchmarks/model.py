"""Predict a training step on several processes by an alpha-beta model of a ring all-reduce, fitted
to measurements.

    python benchmarks/model.py

Reads the figures of allreduce.py and scaling.py in --out, and writes model.md beside them. A
message of n bytes takes alpha + n beta seconds from one process to the next; an all-reduce over p
processes in a ring then takes

    2 (p - 1) alpha + 2 (p - 1)/p n beta

and an all-gather or a reduce-scatter half as long (Thakur et al. 2005,
doi:10.1177/1094342005051521; Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). The ring is
flat: it does not know that some processes share a machine. DDP sends buckets as backward fills
them. If other hardware does the sending (a GPU's copy engines), it overlaps with backward; on a CPU
whose cores are all busy, sending takes time from computing.
"""

import statistics

import runs
import scaling
import torch

from cifar10 import cifar
from common import flags
from common.errors import InputError
from common.fsdp import blocks
from mnist import digits
from scripts.commands import plain_exits

MIB = 2**20
# The first of DDP's buckets, and all others (torch.nn.parallel.DistributedDataParallel)
BUCKETS = MIB, 25 * MIB
# The share of backward in a step without communication: it takes twice as long as forward.
BACKWARD = 2 / 3
# No more: machines with fast links inside reduce there first, so a flat ring would be wrong.
SIZES = [2, 8, 32]


def ring(p, size, alpha, beta):
    """Seconds of a ring all-reduce of `size` bytes over `p` processes."""
    return 2 * (p - 1) * alpha + 2 * (p - 1) / p * size * beta


def fsdp(p, groups, alpha, beta):
    """Seconds of what fsdp.py's step sends; `groups` is what `shard_groups` returns.

    Each group is gathered for forward and for backward (the last, which is the root's, stays), and
    its gradients are reduce-scattered: half of an all-reduce each. (Gloo's reduce-scatter is an
    all-reduce, and takes twice as long as a ring's.)
    """
    halves = [ring(p, size, alpha, beta) / 2 for size in groups]
    return 3 * sum(halves) - halves[-1]


def fit(measured):
    """(alpha, beta) of `ring` for a run of allreduce.py: medians, because single sizes are far off
    on a busy machine.

    alpha is fitted to messages up to 64 KiB, beta to those from 16 MiB, each after subtracting the
    other's share.
    """
    p = measured["processes"]
    alpha = 0.0
    beta = 0.0
    times = [(point["bytes"], point["seconds"]) for point in measured["sizes"]]
    small = [(size, seconds) for size, seconds in times if size <= 64 * 1024]
    large = [(size, seconds) for size, seconds in times if size >= 16 * MIB]
    if not large:
        raise InputError("the figures of allreduce.py lack messages from 16 MiB: measure again")
    for _ in range(20):
        of_large = [(time - ring(p, n, alpha, 0)) / ring(p, n, 0, 1) for n, time in large]
        beta = max(0, statistics.median(of_large))
        of_small = [(time - ring(p, n, 0, beta)) / ring(p, n, 1, 0) for n, time in small]
        alpha = max(0, statistics.median(of_small))
    return alpha, beta


def buckets(size):
    """The bytes of each of DDP's all-reduces for gradients of `size` bytes."""
    sizes = [min(size, BUCKETS[0])]
    while sum(sizes) < size:
        sizes.append(min(BUCKETS[1], size - sum(sizes)))
    return sizes


def step(compute, size, all_reduce, overlap):
    """Seconds of a step.

    `compute` is the seconds without communication; the backward pass makes gradients at an even
    rate. `size` is the gradients' bytes, and all_reduce(bytes) the seconds of an all-reduce.
    """
    if not overlap:
        return compute + sum(all_reduce(bucket) for bucket in buckets(size))
    backward = BACKWARD * compute
    made = 0
    sent = 0.0
    for bucket in buckets(size):
        made += bucket
        sent = max(sent, backward * made / size) + all_reduce(bucket)
    return compute + max(0, sent - backward)


def shard_groups(dataset, model):
    """The bytes of each group of weights that fsdp.py gathers at once; the last group has those
    that are in no block.
    """
    # On the meta device weights take no memory.
    with torch.device("meta"):
        built = {"mnist": digits, "cifar10": cifar}[dataset].build(model)

    def bytes_of(module):
        return sum(4 * weights.numel() for weights in module.parameters())

    sizes = [bytes_of(block) for block in blocks(built)]
    return [*sizes, bytes_of(built) - sum(sizes)]


def measured_here(dataset, single, measured, fits, cores):
    """Rows of DDP's steps on this machine, predicted and measured; p processes share its cores."""
    size = sum(shard_groups(dataset, single["model"]))
    compute = scaling.seconds_of_step(single)
    for run in measured:
        p = run["processes"]
        if run["dataset"] != dataset or run["strategy"] != "ddp_launch":
            continue
        alpha, beta = fits.get(p, fits[2])
        share = compute * max(1, p / cores)
        predicted = step(share, size, lambda n, p=p, a=alpha, b=beta: ring(p, n, a, b), False)
        found = scaling.seconds_of_step(run)
        figures = f"{predicted * 1e3:,.1f}", f"{found * 1e3:,.1f}", f"{predicted / found:.2f}"
        yield [dataset, run["model"], p, *figures]


def predictions(dataset, single, alpha, beta):
    """Rows of the weak-scaling efficiency for each of SIZES."""
    groups = shard_groups(dataset, single["model"])
    compute = scaling.seconds_of_step(single)
    rings = [lambda n, p=p: ring(p, n, alpha, beta) for p in SIZES]
    kinds = {
        "DDP's ring": [step(compute, sum(groups), each, False) for each in rings],
        "DDP's ring, hidden behind backward": [
            step(compute, sum(groups), each, True) for each in rings
        ],
        "FSDP's all-gathers and reduce-scatters": [
            compute + fsdp(p, groups, alpha, beta) for p in SIZES
        ],
    }
    for kind, seconds in kinds.items():
        yield [dataset, kind, *(f"{compute / each:.2f}" for each in seconds)]


def page(of_allreduce, of_scaling):
    (all_reduces,), (trained,) = of_allreduce, of_scaling
    fits = {(run["backend"], run["processes"]): fit(run) for run in all_reduces["runs"]}
    fit_rows = [
        [backend, p, f"{alpha * 1e6:,.0f}", f"{1e-9 / beta:.2f}" if beta else "-"]
        for (backend, p), (alpha, beta) in sorted(fits.items())
    ]
    of_ddp = {p: found for (name, p), found in fits.items() if not name.startswith("horovod")}
    if 2 not in of_ddp:
        raise InputError("the figures of allreduce.py lack torchrun with two processes")
    cores = int(trained["hardware"].split()[0])
    here = []
    predicted = []
    for run in trained["runs"]:
        if run["strategy"] == "single":
            name = run["dataset"]
            here += measured_here(name, run, trained["runs"], of_ddp, cores)
            predicted += predictions(name, run, *of_ddp[2])
    columns = ["data set", "model", "processes", "predicted (ms)", "measured (ms)", "ratio"]
    return runs.document(
        "A model of the all-reduce, and what it predicts",
        "Made by `python benchmarks/model.py` from the figures of [allreduce.md](allreduce.md) and "
        "[scaling.md](scaling.md). alpha: the latency of a message. 1/beta: the bandwidth. See "
        "[docs/allreduce.md](../../docs/allreduce.md).",
        "## alpha and beta of this machine",
        runs.table(["backend", "processes", "alpha (us)", "1/beta (GB/s)"], fit_rows),
        "## A step of DDP here",
        f"Predicted: the step of one process, times processes per core ({cores} cores), plus a "
        "ring all-reduce of DDP's buckets. None of it is hidden behind backward, because all cores "
        "are computing.",
        runs.table(columns, here, left=2),
        "## Weak-scaling efficiency with a core per process",
        "The time of one process's step, divided by that of p processes with the same batch each. "
        "The ring is flat: it runs through all processes over equal links, as with one process per "
        "machine. Machines with faster links inside reduce there first, and pay less latency.",
        runs.table(["data set", "what is sent", *(f"{p} processes" for p in SIZES)], predicted, 2),
    )


def main():
    parser = flags.Parser(__doc__)
    runs.add_out(parser)
    out = parser.parse_args().out
    text = runs.page_of(out, "model")
    (out / "model.md").write_text(text)
    print(text)


if __name__ == "__main__":
    with plain_exits():
        main()
