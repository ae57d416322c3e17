"""Predict a training step on several processes by an alpha-beta model of a ring all-reduce, fitted
to measurements.

    python benchmarks/model.py

Reads allreduce-*.json and scaling.json of --out, which allreduce.py and scaling.py have written,
and writes model.md beside them. A message of n bytes takes alpha + n beta seconds from one process
to the next; an all-reduce over p processes in a ring then takes

    2 (p - 1) alpha + 2 (p - 1)/p n beta

and an all-gather or a reduce-scatter half as long (Thakur et al. 2005,
doi:10.1177/1094342005051521; Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). The ring is
flat: it does not know that some processes share a machine. DDP sends buckets as backward fills
them. If other hardware does the sending (a GPU's copy engines), it
overlaps with backward; on a CPU whose cores are all busy, sending takes time from computing.
"""

import json
import statistics
from pathlib import Path

import runs
import torch
from scaling import rows

from cifar10 import cifar
from common.errors import InputError
from common.fsdp import blocks
from mnist import digits

MIB = 2**20
# The first of DDP's buckets, and all others (torch.nn.parallel.DistributedDataParallel)
BUCKETS = MIB, 25 * MIB
# The share of backward in a step without communication: it takes twice as long as forward.
BACKWARD = 2 / 3
# Machines with fast links inside reduce there first, so a flat ring over more would be wrong.
SIZES = [2, 8, 32]


def ring(p, size, alpha, beta):
    """Seconds of a ring all-reduce of `size` bytes over `p` processes."""
    return 2 * (p - 1) * alpha + 2 * (p - 1) / p * size * beta


def half_ring(p, size, alpha, beta):
    """Seconds of an all-gather or a reduce-scatter in a ring, of `size` bytes in all: half of an
    all-reduce.
    """
    return ring(p, size, alpha, beta) / 2


def fsdp(p, groups, alpha, beta):
    """Seconds of what fsdp.py's step sends, for `groups` as of `shard_groups`, the root's last.

    Each group is gathered for forward and for backward (the root's stays), and its gradients are
    reduce-scattered. (Gloo's reduce-scatter is an all-reduce, which takes twice as long as a
    ring's.)
    """
    return sum(3 * half_ring(p, size, alpha, beta) for size in groups) - half_ring(
        p, groups[-1], alpha, beta
    )


def fit(measured):
    """(alpha, beta) of `ring` for a result of allreduce.py: medians, as single sizes are far off on
    a busy machine.

    alpha is fitted to messages up to 64 KiB, beta to those from 16 MiB, each after subtracting the
    other's share.
    """
    p, alpha, beta = measured["processes"], 0.0, 0.0
    times = [(point["bytes"], point["seconds"]) for point in measured["sizes"]]
    for _ in range(20):
        beta = max(
            0,
            statistics.median(
                (seconds - ring(p, size, alpha, 0)) / ring(p, size, 0, 1)
                for size, seconds in times
                if size >= 16 * MIB
            ),
        )
        alpha = max(
            0,
            statistics.median(
                (seconds - ring(p, size, 0, beta)) / ring(p, size, 1, 0)
                for size, seconds in times
                if size <= 64 * 1024
            ),
        )
    return alpha, beta


def buckets(size):
    """The bytes of each of DDP's all-reduces for gradients of `size` bytes."""
    sizes = [min(size, BUCKETS[0])]
    while sum(sizes) < size:
        sizes.append(min(BUCKETS[1], size - sum(sizes)))
    return sizes


def step(compute, backward, size, all_reduce, overlap):
    """Seconds of a step.

    `compute` is the seconds without communication, of which `backward` are the backward pass, which
    makes gradients at an even rate. `size` is their bytes, and all_reduce(bytes) the seconds of an
    all-reduce.
    """
    if not overlap:
        return compute + sum(all_reduce(bucket) for bucket in buckets(size))
    made, sent = 0, 0.0
    for bucket in buckets(size):
        made += bucket
        sent = max(sent, backward * made / size) + all_reduce(bucket)
    return compute + max(0, sent - backward)


def build(dataset, model):
    """The model, without memory for its weights."""
    module = {"mnist": digits, "cifar10": cifar}[dataset]
    with torch.device("meta"):
        return module.build(model)


def bytes_of(module):
    return sum(4 * weights.numel() for weights in module.parameters())


def gradient_bytes(dataset, model):
    return bytes_of(build(dataset, model))


def shard_groups(dataset, model):
    """The bytes of each group of weights that fsdp.py gathers at once, and last of those that are
    in no block.
    """
    built = build(dataset, model)
    sizes = [bytes_of(block) for block in blocks(built)]
    return [*sizes, bytes_of(built) - sum(sizes)]


def workloads(scaling):
    """For each data set: the step, backward pass and gradients of one process, and DDP's measured
    steps.
    """
    found = []
    for dataset in scaling["datasets"]:
        weak = [
            run
            for run in rows(scaling["runs"])
            if run["mode"] == "weak" and run["dataset"] == dataset
        ]
        single = next(run for run in weak if run["strategy"] == "single")
        found.append(
            {
                "dataset": dataset,
                "model": single["model"],
                "step": single["step"],
                "backward": single["step"] * BACKWARD,
                "bytes": gradient_bytes(dataset, single["model"]),
                "measured": {
                    run["processes"]: run["step"]
                    for run in weak
                    if run["strategy"] in ("single", "ddp_launch")
                },
            }
        )
    return found


def predict(work, p, fits, cores):
    """Seconds of a weak-scaling step with DDP on the `cores` of this machine, which p processes
    share.
    """
    if p == 1:
        return work["step"]
    alpha, beta = fits.get(("gloo", p), fits["gloo", 2])
    return step(
        work["step"] * max(1, p / cores),
        0,
        work["bytes"],
        lambda size: ring(p, size, alpha, beta),
        False,
    )


def markdown(scaling, fits, works, cores):
    lines = [
        "# A model of the all-reduce, and what it predicts",
        "",
        "`python benchmarks/model.py`, from the results of allreduce.py "
        "([allreduce.md](allreduce.md)) and of " + runs.heading(scaling),
        "",
        "alpha: the latency of a message. 1/beta: the bandwidth. See "
        "[allreduce.md](../../docs/allreduce.md).",
        "",
        "## alpha and beta of this machine",
        "",
        runs.table(
            ["backend", "processes", "alpha (us)", "1/beta (GB/s)"],
            [
                [backend, p, f"{alpha * 1e6:,.0f}", f"{1e-9 / beta:.2f}" if beta else "-"]
                for (backend, p), (alpha, beta) in sorted(fits.items())
            ],
        ),
        "",
        "## DDP's step here, predicted and measured",
        "",
        f"Predicted: the step of one process, times processes per core ({cores} cores), "
        "plus a ring all-reduce of",
        "DDP's buckets, none of it hidden behind backward, as all cores compute.",
        "",
        runs.table(
            [
                "data set",
                "model",
                "processes",
                ("predicted (ms)"),
                "measured (ms)",
                ("predicted / measured"),
            ],
            [
                [
                    work["dataset"],
                    work["model"],
                    p,
                    f"{predict(work, p, fits, cores) * 1e3:,.1f}",
                    f"{seconds * 1e3:,.1f}",
                    f"{predict(work, p, fits, cores) / seconds:.2f}",
                ]
                for work in works
                for p, seconds in work["measured"].items()
            ],
            left=2,
        ),
        "",
        "## Weak-scaling efficiency with a core per process and this machine's alpha and beta",
        "",
        "Weak scaling: the batch per process stays the same. Efficiency: the time of one "
        "process's step, divided",
        "by that of a step of p processes. The ring is flat: one through all processes, with alike "
        "links. That holds",
        "for a process per machine. Many processes on machines with faster links inside reduce "
        "there first, or along",
        "a tree, and pay less latency: they are not predicted here.",
        "",
    ]
    alpha, beta = fits["gloo", 2]
    table = []
    for work in works:
        alone = (work["step"], work["backward"], work["bytes"])
        for name, overlap in (("ring", False), ("ring, hidden behind backward", True)):
            table.append(
                [
                    work["dataset"],
                    name,
                    *(
                        f"{work['step'] / step(*alone, all_reduce, overlap):.2f}"
                        for all_reduce in [lambda n, p=p: ring(p, n, alpha, beta) for p in SIZES]
                    ),
                ]
            )
        groups = shard_groups(work["dataset"], work["model"])
        table.append(
            [
                work["dataset"],
                "FSDP's all-gathers and reduce-scatters",
                *(
                    f"{work['step'] / (work['step'] + fsdp(p, groups, alpha, beta)):.2f}"
                    for p in SIZES
                ),
            ]
        )
    names = ["data set", "communication", *(f"{p:,} processes" for p in SIZES)]
    return "\n".join([*lines, runs.table(names, table, left=2)])


def read(folder):
    """The results of allreduce.py and scaling.py in a folder, and (alpha, beta) per backend and
    number of processes.
    """
    paths = sorted(folder.glob("allreduce-*.json"))
    if not (folder / "scaling.json").exists() or not any(
        path.stem == "allreduce-gloo-2" for path in paths
    ):
        raise InputError(
            f"{folder} has no scaling.json and allreduce-gloo-2.json: make benchmarks measures them"
        )
    measured = [json.loads(path.read_text()) for path in paths]
    fits = {(result["backend"], result["processes"]): fit(result) for result in measured}
    return json.loads((folder / "scaling.json").read_text()), measured, fits


def main():
    parser = runs.flags.Parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results"
    )
    arguments = parser.parse_args()
    scaling, measured, fits = read(arguments.out)
    works = workloads(scaling)
    text = markdown(scaling, fits, works, cores=measured[0]["hardware"]["cores"])
    (arguments.out / "model.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    with runs.plain_exits():
        main()
