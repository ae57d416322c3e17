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
    others = [
        "ResNet-18, the default model for CIFAR-10, reaches "
        f"{run['epochs'][-1]['val']['accuracy']:.2%} "
        f"after {len(run['epochs'])} epochs (one seed; {run['recipe']}, {run['processes']} "
        "processes; commit "
        f"{default['commit']}, {default['date']}). "
        f"{default.get('note', '')}"
        for run in default["runs"]
    ]
    return [
        (
            "**Accuracy** on real data, with the default batch and rate of each model: mean of "
            "three seeds after the"
        ),
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
    rows = []
    for name, turns in result["turns"].items():
        ratios = [f"{ratio:.2f}" for ratio in peers.ratios_of(turns)]
        reached = [
            f"{statistics.median(one['accuracy'] for one in who):.1f}%"
            for who in zip(*turns, strict=True)
        ]
        rows.append([name, peers.PEERS[name].recipe, *result["lines"][name], *ratios, *reached])
    return [
        "**Beside what else people would take**, with the same model, optimizer and batch, and our "
        "schedule.",
        f"Script and recipe ran alternately, {result['repeats']} times each, with `--epochs "
        f"{result['epochs']}`.",
        "Lines are those of code in the script and in the recipe. Time, images/s and memory are "
        "medians of our",
        "figure divided by theirs. Time and memory are those of the whole command, images/s those "
        "of training. The",
        "generated JPEGs have nothing to learn ([peers.md](benchmarks/results/peers.md)).",
        "",
        runs.table(
            [
                "script",
                "our recipe",
                "their lines",
                "ours",
                "time",
                "images/s",
                "memory",
                "their accuracy",
                "ours",
            ],
            rows,
            left=2,
        ),
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
        (
            "**Scaling** of ResNet-18 on CIFAR-10, 32 images per process. Efficiency is the "
            "images/s of p processes"
        ),
        "divided by p times those of one process. 'Of the limit' divides by those of p "
        "processes that do not",
        "communicate. Both are medians of the ratios of each repetition. With more processes "
        "than cores, some",
        "share a core. 'Pinned': each process has its own core, by `scripts/pin.sh`",
        "([scaling.md](benchmarks/results/scaling.md)).",
        runs.MARK,
        "",
        *table,
        "",
        source(result),
        "",
        "![Images per second over processes, and what a step consists "
        "of](benchmarks/results/scaling.svg)",
    ]


def startup_lines(result):
    rows = [
        [
            runs.TITLES[run["strategy"]],
            run["processes"],
            *(f"{statistics.median(times):.1f} s" for times in zip(*run["seconds"], strict=True)),
        ]
        for run in result["runs"]
    ]
    return [
        "**Start-up** ([startup.md](benchmarks/results/startup.md)).",
        "",
        runs.table(
            ["launcher", "processes", ("first line after"), "end of `--dry-run` after"], rows
        ),
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
            ("startup", startup_lines),
        )
        if (result := read(name))
    ]
    path.write_text(
        "\n".join([before + BEGIN, *("\n".join(["", *lines]) for lines in parts), "", END + after])
    )


if __name__ == "__main__":
    with runs.plain_exits():
        main()
