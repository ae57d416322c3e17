"""Draw the pictures of the documents from data in the repository.

    python docs/pictures.py published
    python docs/pictures.py timeline
    python docs/pictures.py speed

Needs tests/requirements.txt. A timeline is recorded first, as docs/profiling.md says, and one step
of it is kept by `python docs/pictures.py keep /tmp/timeline.json`.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

DOCS = Path(__file__).parent
DRAWINGS = DOCS / "drawings"
RESULTS = DOCS.parent / "benchmarks" / "results"
# The stages of a gradient in a timeline of Horovod, and their names in the picture. The last is a
# part of the one before, and is drawn over it.
STAGES = {
    "NEGOTIATE_ALLREDUCE": ("one rank has it, and waits for the other", "lightgrey"),
    "ALLREDUCE": ("queued, and copied to and from the fusion buffer", "tab:orange"),
    "GLOO_ALLREDUCE": ("all-reduce", "tab:blue"),
}
STRATEGIES = {
    "single": "one process",
    "independent": "two that do not communicate",
    "ddp_launch": "DDP, two processes",
    "hvd_gloo": "Horovod with Gloo, two processes",
    "hvd_mpi": "Horovod with MPI, two processes",
}


def published() -> None:
    """The times of docs/allreduce.md's table, and a model of a step that is fitted to them."""
    page = (DOCS / "allreduce.md").read_text()
    found = re.findall(r"^\| (\d+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+|-) \| ([\d.]+) ", page, re.M)
    table = [(int(gpus), *(np.nan if t == "-" else float(t) for t in row)) for gpus, *row in found]
    gpus, cifar, cifar_alone, mnist = np.array(table).T
    known = ~np.isnan(cifar_alone)
    # t(p) = C/p + c + 2(p - 1) alpha: computing, what does not shrink, and the latency of a ring.
    terms = np.stack([1 / gpus, np.ones_like(gpus), 2 * (gpus - 1)], axis=1)
    weights = 1 / cifar_alone[known]
    factors, *_ = np.linalg.lstsq(
        terms[known] * weights[:, None], cifar_alone[known] * weights, rcond=None
    )
    model = terms @ factors
    error = np.abs(model[known] / cifar_alone[known] - 1).max()
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot(gpus, cifar, "o-", label="CIFAR-10, the whole run")
    axis.plot(gpus, mnist, "s-", label="MNIST, the whole run")
    axis.plot(gpus[known], cifar_alone[known], "^-", label="CIFAR-10, its 32 epochs alone")
    label = rf"C/p + c + 2(p-1)$\alpha$, fitted to the last (off by up to {error:.0%})"
    axis.plot(gpus, model, "k--", label=label)
    axis.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds")
    axis.minorticks_off()
    axis.set_xticks(gpus, [f"{p:.0f}" for p in gpus])
    axis.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    axis.legend()
    save(figure, "published")


def keep(recorded: str) -> None:
    """Write the gradients of the last step in a timeline of Horovod to drawings/timeline.jsonl."""
    names = {}
    open_stages = {}
    gradients = {}
    # Horovod may leave out the end of the list.
    text = Path(recorded).read_text().rstrip("], \n")
    for event in json.loads(f"{text}]"):
        tensor = event.get("pid")
        if event.get("name") == "process_name":
            names[tensor] = event["args"].get("name", "")
        elif event.get("ph") == "B":
            open_stages.setdefault(tensor, []).append(event)
        elif event.get("ph") == "E" and open_stages.get(tensor):
            start = open_stages[tensor].pop()
            if start["name"] in STAGES and "sums" not in names[tensor]:
                gradient = gradients.setdefault(names[tensor].removeprefix("allreduce."), {})
                gradient[start["name"]] = [start["ts"], event["ts"] - start["ts"]]
    lines = [json.dumps({"gradient": name, **stages}) for name, stages in gradients.items()]
    (DRAWINGS / "timeline.jsonl").write_text("\n".join(lines) + "\n")


def timeline() -> None:
    """One step of Horovod: when each gradient is ready, and when it is sent."""
    lines = (DRAWINGS / "timeline.jsonl").read_text().splitlines()
    gradients = [json.loads(line) for line in lines]
    first = min(gradient["NEGOTIATE_ALLREDUCE"][0] for gradient in gradients)
    figure, axis = plt.subplots(figsize=(9, 3.8))
    for row, gradient in enumerate(gradients):
        for stage, (_, colour) in STAGES.items():
            start, length = gradient[stage]
            axis.barh(row, length / 1000, left=(start - first) / 1000, color=colour)
    axis.set_yticks(range(len(gradients)), [gradient["gradient"] for gradient in gradients])
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds", title="Gradients of one step, from the last layer to the first")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in STAGES.values()]
    texts = [text for text, _ in STAGES.values()]
    axis.legend(handles, texts, loc="upper center", bbox_to_anchor=(0.45, -0.18), ncol=3)
    save(figure, "timeline")


def speed() -> None:
    """Images per second of each strategy, relative to one process, of benchmarks/scaling.py."""
    lines = (RESULTS / "scaling.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if run.get("processes", 9) <= 2]
    figure, axis = plt.subplots(figsize=(7, 3.5))
    for place, dataset in enumerate(("mnist", "cifar10")):
        of = {
            run["strategy"]: np.median(run["images_per_sec"])
            for run in runs
            if run["dataset"] == dataset
        }
        shares = [of[strategy] / of["single"] for strategy in STRATEGIES]
        bars = axis.barh(np.arange(len(shares)) + 0.4 * place, shares, 0.38, label=dataset)
        axis.bar_label(bars, fmt="%.2f", padding=3)
    axis.set_yticks(np.arange(len(STRATEGIES)) + 0.2, STRATEGIES.values())
    axis.invert_yaxis()
    axis.set(xlim=(0, 2.3), xlabel="images/s, relative to one process")
    axis.legend()
    save(figure, "speed")


def save(figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(DRAWINGS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    drawn = {function.__name__: function for function in (published, keep, timeline, speed)}
    drawn[sys.argv[1]](*sys.argv[2:])
