"""Predict a training step on up to 1,024 processes by an alpha-beta model of the all-reduce, fitted
to measurements.

    python benchmarks/model.py

Reads allreduce-*.json and scaling.json of --out, which allreduce.py and scaling.py have written,
and writes model.md and model.svg beside them. A message of n bytes takes alpha + n beta seconds
from one process to the next; an all-reduce over p processes then takes

    ring:  2 (p - 1) alpha + 2 (p - 1)/p n beta      tree:  2 log2(p) (alpha + n beta)

and an all-gather or a reduce-scatter takes half as long as the ring (Thakur et al. 2005,
doi:10.1177/1094342005051521; Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). DDP sends
buckets as backward fills them. If other hardware does the sending (a GPU's copy engines), it
overlaps with backward; on a CPU whose cores are all busy, sending takes time from computing.
"""

import json
import math
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
# A published table, {GPUs: seconds for 32 epochs}, from 1 to 32 GPUs. CIFAR-10 is fastest on 8,
# MNIST on 32. Model, batch and network are unknown; the model and batch here are our recipes'
# defaults.
PUBLISHED = {"cifar10": {1: 522.3, 8: 73.5}, "mnist": {1: 499.8, 32: 55.7}}
EPOCHS, IMAGES, BATCH = 32, {"cifar10": 50_000, "mnist": 60_000}, {"cifar10": 128, "mnist": 64}
PER_MACHINE = 8


def ring(p, size, alpha, beta):
    """Seconds of a ring all-reduce of `size` bytes over `p` processes."""
    return 2 * (p - 1) * alpha + 2 * (p - 1) / p * size * beta


def tree(p, size, alpha, beta):
    """Seconds of an all-reduce that sums up a binary tree and sends the result down again."""
    return 2 * math.log2(p) * (alpha + size * beta)


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


def published(dataset):
    """From the published times: (steps on one GPU, seconds of one step, {GPUs: seconds added to
    it}).
    """
    times = PUBLISHED[dataset]
    steps = EPOCHS * IMAGES[dataset] / BATCH[dataset]
    one = times[1] / steps
    return steps, one, {p: seconds * p / steps - one for p, seconds in times.items() if p > 1}


def published_model():
    """(a function (data set, GPUs) -> seconds of the 32 epochs, alpha and beta between machines).

    Between machines, alpha is fitted to MNIST on 32 GPUs, and beta is the smallest with which
    CIFAR-10 is as slow on 32 as on 8. Within a machine, beta is fitted to CIFAR-10 on 8.
    """
    alpha = published("mnist")[2][32] / (2 * 31)
    size = {
        "mnist": gradient_bytes("mnist", "convnet"),
        "cifar10": gradient_bytes("cifar10", "resnet18"),
    }
    steps, one, waits = published("cifar10")
    # Seconds of all-reduce that make 32 as slow as 8.
    needed = PUBLISHED["cifar10"][8] * 32 / steps - one
    beta = (needed - ring(32, 0, alpha, 0)) / ring(32, size["cifar10"], 0, 1)
    within = waits[8] / ring(8, size["cifar10"], 0, 1)

    def seconds(dataset, p):
        steps, one, _ = published(dataset)
        if p == 1:
            return steps * one
        wait = (
            ring(p, size[dataset], alpha, beta)
            if p > PER_MACHINE
            else ring(p, size[dataset], 0, within)
        )
        return steps / p * (one + wait)

    return seconds, alpha, beta


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
        "by that of a step of p processes.",
        "",
    ]
    alpha, beta = fits["gloo", 2]
    sizes = [2, 8, 32, 128, 1024]
    table = []
    for work in works:
        alone = (work["step"], work["backward"], work["bytes"])
        for name, form, overlap in (
            ("ring", ring, False),
            ("ring, hidden behind backward", ring, True),
            ("tree", tree, False),
        ):
            table.append(
                [
                    work["dataset"],
                    name,
                    *(
                        f"{work['step'] / step(*alone, all_reduce, overlap):.2f}"
                        for all_reduce in [
                            lambda n, p=p, form=form: form(p, n, alpha, beta) for p in sizes
                        ]
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
                    for p in sizes
                ),
            ]
        )
    names = ["data set", "communication", *(f"{p:,} processes" for p in sizes)]
    return "\n".join(
        [
            *lines,
            runs.table(names, table, left=2),
            "",
            *published_lines(),
            "",
            ("![the fit, the prediction and the published table](model.svg)"),
        ]
    )


def published_lines():
    """The lines on the published table."""
    seconds, alpha, beta = published_model()
    steps = {dataset: f"{published(dataset)[1] * 1e3:.1f} ms ({dataset})" for dataset in PUBLISHED}
    over_network = ring(16, gradient_bytes("cifar10", "resnet18"), alpha, beta)

    def cell(dataset, p):
        known = PUBLISHED[dataset].get(p)
        return f"{seconds(dataset, p):,.1f}" + (f" ({known})" if known else "")

    gpus = [1, 2, 4, 8, 16, 32]
    return [
        "## The published table",
        "",
        "32 epochs on 1 to 32 GPUs: CIFAR-10 took 522.3 s on one and at best 73.5 s, on 8; MNIST "
        "499.8 s on one and at",
        "best 55.7 s, on 32. Its hardware, models and batch are unknown. With those of our "
        "recipes (ConvNet, batch 64;",
        f"ResNet-18, batch 128), {PER_MACHINE} GPUs in a machine, alpha = {alpha * 1e6:,.0f} us "
        "(from MNIST on 32) and",
        f"a network of {1e-9 / beta:.2f} GB/s (the fastest for which CIFAR-10 is no quicker on "
        "32 than on 8) the model",
        "gives, in s (in brackets: the published times, to which alpha and the bandwidths are "
        "fitted):",
        "",
        runs.table(
            ["data set", *(f"{p} GPU{'s' * (p > 1)}" for p in gpus)],
            [[dataset, *(cell(dataset, p) for p in gpus)] for dataset in PUBLISHED],
        ),
        "",
        f"On one GPU a step takes {' and '.join(steps.values())}. On p GPUs an epoch has p times "
        "fewer steps, so",
        "more GPUs help as long as a step takes less than p times as long. Within a machine "
        "CIFAR-10's grows by",
        f"{published('cifar10')[2][8] * 1e3:.1f} ms on 8 GPUs. The all-reduce over the network "
        "takes "
        f"{over_network * 1e3:.0f} ms on 16, more than the step itself:",
        "16 GPUs are slower than 8. For a small model only alpha counts, which the ring pays 2 "
        "(p - 1) times.",
    ]


def panels(columns):
    """(figure, [axes]) of matplotlib, side by side."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.hashsalt": "recipes",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
        }
    )
    return plt.subplots(1, columns, figsize=(5 * columns, 4), layout="constrained")


def draw(arguments, measured, fits, works):
    fig, (left, middle, right) = panels(3)
    for number, result in enumerate(measured):
        key = result["backend"], result["processes"]
        sizes = [point["bytes"] for point in result["sizes"]]
        color = f"C{number}"
        left.plot(
            sizes,
            [1e3 * point["seconds"] for point in result["sizes"]],
            "o",
            color=color,
            markersize=4,
            label=f"{key[0]}, {key[1]} processes",
        )
        left.plot(sizes, [1e3 * ring(key[1], size, *fits[key]) for size in sizes], color=color)
    left.set(
        xscale="log",
        yscale="log",
        title=("all-reduce: measured, and alpha-beta fit"),
        xlabel="bytes",
        ylabel="ms",
    )
    left.legend()
    alpha, beta = fits["gloo", 2]
    processes = [2**k for k in range(11)]
    for number, work in enumerate(works):
        for form, overlap, style in ((ring, False, "-"), (ring, True, "--"), (tree, False, ":")):
            steps = [
                step(
                    work["step"],
                    work["backward"],
                    work["bytes"],
                    lambda n, p=p, form=form: form(p, n, alpha, beta),
                    overlap,
                )
                for p in processes
            ]
            name = f"{work['dataset']}, {form.__name__}{', hidden' if overlap else ''}"
            middle.plot(
                processes,
                [work["step"] / seconds for seconds in steps],
                style,
                color=f"C{number}",
                label=name,
            )
        on_cores = {
            p: seconds
            for p, seconds in work["measured"].items()
            if p <= measured[0]["hardware"]["cores"]
        }
        middle.plot(
            list(on_cores),
            [work["step"] / seconds for seconds in on_cores.values()],
            "o",
            color=f"C{number}",
        )
    middle.set(
        xscale="log",
        xticks=[1, 4, 16, 64, 256, 1024],
        xticklabels=["1", "4", "16", "64", "256", "1,024"],
        ylim=(0, 1.05),
        title=("weak scaling, a core per process (dots: measured)"),
        xlabel="processes",
        ylabel="efficiency",
    )
    middle.legend()
    seconds, _, _ = published_model()
    gpus = [1, 2, 4, 8, 16, 24, 32]
    for number, (dataset, times) in enumerate(PUBLISHED.items()):
        right.plot(
            gpus, [seconds(dataset, p) for p in gpus], color=f"C{number}", label=f"{dataset}, model"
        )
        right.plot(
            list(times),
            list(times.values()),
            "o",
            color=f"C{number}",
            label=f"{dataset}, published",
        )
    right.set(
        xscale="log",
        yscale="log",
        xticks=[1, 2, 4, 8, 16, 32],
        xticklabels=["1", "2", "4", "8", "16", "32"],
        yticks=[50, 100, 200, 500],
        yticklabels=["50", "100", "200", "500"],
        title="the published table: 32 epochs",
        xlabel="GPUs",
        ylabel="s",
    )
    right.minorticks_off()
    right.legend()
    fig.savefig(arguments.out / "model.svg", metadata={"Date": None}, facecolor="white")


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
    draw(arguments, measured, fits, works)


if __name__ == "__main__":
    with runs.plain_exits():
        main()
