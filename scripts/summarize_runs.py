"""Print a table of runs: the arguments that differ, and the results.

    python scripts/summarize_runs.py runs/array-42

The folder has a folder for each run, with the results.json that every recipe writes.
"""

import json
import sys
from pathlib import Path

files = [file for folder in sys.argv[1:] for file in sorted(Path(folder).glob("*/results.json"))]
if not files:
    print("summarize_runs.py: no runs found: give the folder of an array, runs/array-JOBID", file=sys.stderr)
    sys.exit(2)
runs = [json.loads(file.read_text()) for file in files]
arguments = [run["arguments"] for run in runs]
of_a_run = "log_dir", "checkpoint_dir", "resume"
names = [name for name in arguments[0] if name not in of_a_run and len({str(a.get(name)) for a in arguments}) > 1]
print("| run |", *(f"{name} |" for name in names), "epochs | best val accuracy | last val loss |")
print("| --- |" + " ---: |" * (len(names) + 3))
for file, run in zip(files, runs, strict=True):
    val = [epoch["val"] for epoch in run["epochs"]]  # none, if the run ended in its first epoch
    best = f"{max(v['accuracy'] for v in val):.2%} | {val[-1]['loss']:.4f}" if val else "- | -"
    print(f"| {file.parent} |", *(f"{run['arguments'].get(name)} |" for name in names),
          f"{len(val)}/{run['arguments']['epochs']} | {best} |")
