"""Print a table of runs: the flags that differ, and the results.

    python scripts/summarize_runs.py runs/array-42

Give a folder of runs, each a folder with the results.jsonl that every recipe writes.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from common import results
from common.errors import show

OF_A_RUN = ("log_dir", "resume", "peak_lr")
# For a value that a run does not have.
NONE = "-"


def read(path):
    """Return (flags, evaluations) from a results.jsonl; both are empty if the run ended early."""
    try:
        events = results.read(path)
    except OSError as error:
        print(f"summarize_runs.py: {path}: {error.strerror}", file=sys.stderr)
        events = []
    configs = [event["config"] for event in events if event["event"] == "start"]
    config = configs[-1] if configs else {}
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
    # Runs that ended before they wrote their flags have none.
    configs = [config for config, _ in runs if config]
    names = []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = {str(config.get(name)) for config in configs}
        if name not in OF_A_RUN and len(values) > 1:
            names.append(name)
    columns = ["run", *names, "epochs", "best val accuracy", "last val loss"]
    print("| " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (len(columns) - 1))
    for file, (config, evaluations) in zip(files, runs, strict=True):
        row = [file.parent, *(config.get(name, NONE) for name in names)]
        row += last_cells(config, evaluations)
        show("| " + " | ".join(map(str, row)) + " |")


def last_cells(config, evaluations):
    """The last three cells of a run; there is no evaluation if it ended in its first epoch."""
    epochs = config.get("epochs", NONE)
    if not evaluations:
        return [f"0/{epochs}", NONE, NONE]
    last = evaluations[-1]
    # Not every task has an accuracy.
    accuracies = [event["val/accuracy"] for event in evaluations if "val/accuracy" in event]
    accuracy = f"{max(accuracies):.2%}" if accuracies else NONE
    loss = f"{last['val/loss']:.4f}" if "val/loss" in last else NONE
    return [f"{last.get('epoch', NONE)}/{epochs}", accuracy, loss]


if __name__ == "__main__":
    main()
