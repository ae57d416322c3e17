"""Write the tables of README.md's section "Measured" again, from the JSON files in
benchmarks/results.

    python benchmarks/readme.py
"""

import json
import statistics

import accuracy
import peers
import runs
import scaling

BEGIN, END = "<!-- python benchmarks/readme.py writes this -->", "<!-- up to here -->"


def read(name):
    """A result, or None if it is not measured yet."""
    path = runs.RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def accuracy_lines(results):
    rows, sources = [], {}  # sources: where figures are from, and which
    for name, (folder, net, epochs, _, starts, _) in accuracy.TRAININGS.items():
        if starts == accuracy.EACH and name in results:
            cells = [statistics.mean(accuracy.reached(results[name], *start)) for start in starts]
            rows.append([folder, net, epochs, *(f"{cell:.2%}" for cell in cells)])
            sources.setdefault(source(results[name]), []).append(f"{folder} {net}")
    default = results.get("cifar10-resnet18", {"runs": []})
    others = []
    for run in default["runs"]:
        reached = run["epochs"][-1]["val"]["accuracy"]
        others.append(
            f"ResNet-18, the default model for CIFAR-10, reaches {reached:.2%} after "
            f"{len(run['epochs'])} epochs (one seed; {run['recipe']}, {run['processes']} "
            f"processes; commit {default['commit']}, {default['date']})."
        )
    if "note" in default:
        others.append(
            "The images are not CIFAR-10's originals: "
            "[accuracy.md](benchmarks/results/accuracy.md) says what that costs."
        )
    return [
        "**Accuracy** on real data, with the default batch and rate of each model: mean of three "
        "seeds after the",
        "last epoch ([accuracy.md](benchmarks/results/accuracy.md) also has their spread, "
        "and the curves).",
        "",
        runs.table(
            ["data set", "model", "epochs", *(f"{start} x{p}" for start, p in accuracy.EACH)],
            rows,
            left=2,
        ),
        "",
        *others,
        *(f"{', '.join(names)}: {text}" for text, names in sources.items()),
    ]


def peers_lines(result):
    rows = [
        [name, peers.PEERS[name].recipe, *(f"{ratio:.2f}" for ratio in peers.ratios_of(turns))]
        for name, turns in result["turns"].items()
    ]
    return [
        "**Beside what else people would take**, with the same model, optimizer, batch and number "
        "of threads: medians of",
        f"our figure divided by theirs, in {result['repeats']} alternated turns of "
        f"{result['epochs']} epoch. Time and memory are those of the whole command,",
        "images/s those of training ([peers.md](benchmarks/results/peers.md): the figures, "
        "accuracies, lines of code).",
        "In one process Lightning and accelerate have a loader worker besides, on the second core.",
        "",
        runs.table(["script", "our recipe", "time", "images/s", "memory"], rows, left=2),
        "",
        source(result),
    ]


def scaling_lines(result):
    lines = scaling.markdown(result, scaling.rows(result["runs"])).split("\n")
    start = (
        next(
            number
            for number, line in enumerate(lines)
            if line.startswith("## cifar10") and "weak" in line
        )
        + 2
    )
    table = lines[start : lines.index("", start)]
    return [
        "**Scaling** of ResNet-18 on CIFAR-10, 32 images per process. Efficiency: images/s of p "
        "processes divided by p times",
        "those of one. 'Of the limit': divided by those of p processes that do not communicate. "
        "'Pinned': each process has its",
        "own core ([scaling.md](benchmarks/results/scaling.md)).",
        runs.MARK,
        "",
        *table,
        "",
        source(result),
    ]


def source(result):
    """Where the figures are from."""
    versions = ", ".join(
        f"{name} {version}" for name, version in result["versions"].items() if name != "python"
    )
    script = " ".join(result["command"].split()[:2])
    return (
        f"(`{script}`; {result['hardware']}; {versions}; commit {result['commit']}, "
        f"{result['date']}.)"
    )


def main():
    path = runs.ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [
        lines(result)
        for name, lines in (
            ("accuracy", accuracy_lines),
            ("peers", peers_lines),
            ("scaling", scaling_lines),
        )
        if (result := read(name))
    ]
    path.write_text(
        "\n".join([before + BEGIN, *("\n".join(["", *lines]) for lines in parts), "", END + after])
    )


if __name__ == "__main__":
    with runs.plain_exits():
        main()
