"""Print a table of runs: what tells them apart, and how each went.

    python scripts/gather.py runs/array-42

The folder has a folder for each run, with the results.json that every recipe writes.
"""

import json
import sys
from pathlib import Path

folders = [Path(argument) for argument in sys.argv[1:]]
runs = [(file.parent, json.loads(file.read_text())) for folder in folders for file in sorted(folder.glob("*/results.json"))]
if not runs:
    sys.exit("gather.py: no */results.json there: give the folder of an array, runs/array-JOBID")
arguments = [run["arguments"] for _, run in runs]
own_to_each = "log_dir", "checkpoint_dir", "resume"
names = [name for name in arguments[0] if name not in own_to_each and len({str(a.get(name)) for a in arguments}) > 1]
print("| run |", *(f"{name} |" for name in names), "epochs | best val accuracy | last val loss |")
print("| --- |" + " ---: |" * (len(names) + 3))
for folder, run in runs:
    val = [epoch["val"] for epoch in run["epochs"]]
    print(f"| {folder} |", *(f"{run['arguments'].get(name)} |" for name in names),
          f"{len(val)}/{run['arguments']['epochs']} | {max(v['accuracy'] for v in val):.2%} | {val[-1]['loss']:.4f} |")
