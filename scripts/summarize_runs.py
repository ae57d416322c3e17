"""Print a table of runs: the flags that differ, and the results.

    python scripts/summarize_runs.py runs/array-42

The folder has a folder for each run, with the results.jsonl that every recipe writes.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import results

OF_A_RUN = ("log_dir", "resume")


def read(path):
    """(the flags, the lines about evaluations) of a results.jsonl."""
    events = results.read(path)
    config = [event["config"] for event in events if event["event"] == "start"][-1]
    return config, [event for event in events if event["event"] == "evaluation"]


def main():
    folders = [Path(name) for name in sys.argv[1:]]
    files = [file for folder in folders for file in sorted(folder.glob("*/results.jsonl"))]
    if not files:
        print(
            "summarize_runs.py: no runs found: give the folder of an array, runs/array-JOBID",
            file=sys.stderr,
        )
        sys.exit(2)
    runs = [read(file) for file in files]
    configs = [config for config, _ in runs]
    names = []
    for name in configs[0]:
        values = {str(config.get(name)) for config in configs}
        if name not in OF_A_RUN and len(values) > 1:
            names.append(name)
    columns = ["run", *names, "epochs", "best val accuracy", "last val loss"]
    print("| " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (len(columns) - 1))
    for file, (config, evaluations) in zip(files, runs, strict=True):
        row = [file.parent, *(config.get(name) for name in names)]
        row += last_cells(config, evaluations)
        print("| " + " | ".join(map(str, row)) + " |")


def last_cells(config, evaluations):
    """The last three cells of a run; it has no evaluation if it ended in its first epoch."""
    if not evaluations:
        return [f"0/{config['epochs']}", "-", "-"]
    # Not every task has an accuracy.
    accuracies = [event["val/accuracy"] for event in evaluations if "val/accuracy" in event]
    best = f"{max(accuracies):.2%}" if accuracies else "-"
    last = evaluations[-1]
    return [f"{last['epoch']}/{config['epochs']}", best, f"{last['val/loss']:.4f}"]


if __name__ == "__main__":
    main()
