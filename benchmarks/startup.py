"""Measure what a start costs: from the command to the first step, for each launcher, and what takes the time.

    python benchmarks/startup.py
    python benchmarks/startup.py --strategies single --repeats 1 --out /tmp/startup

launcher is the time until the process of rank 0 begins; imports, until the recipe has imported all but Horovod; join,
until Horovod is imported and the processes know each other; data and model, until both and the optimizer are made (of
which torch's own import of torch._dynamo by the first optimizer is most); first step, until the first step of training
is done. Generated images, mnist's ConvNet.
"""

import itertools
import statistics

import runs
from scaling import WORK
from tqdm import tqdm

PARTS = {"launcher": "launcher", "imports": "imported", "join": "joined", "data and model": "built",
         "first step": "first_step"}


def seconds(start_up):
    """How long each part took, from what Run noted."""
    times = [0, *(start_up[key] for key in list(PARTS.values())[1:])]
    return [max(0, start_up["launcher"]), *(after - before for before, after in itertools.pairwise(times))]


def markdown(result):
    return "\n".join(["# Start-up, in seconds", "", runs.heading(result), "", runs.table(
        ["launcher", "processes", *PARTS, "in all"],
        [[runs.TITLES[run["strategy"]], run["processes"], *(f"{value:.2f}" for value in run["parts"]),
          runs.marked(run["totals"], "{:.2f}")] for run in result["runs"]]), "",
        f"What each part is: `python {result['command'].split()[1]} --help`. {runs.MARK}"])


def parse_args():
    there = [name for name in runs.available() if name not in ("independent", "dp")]
    parser = runs.parser(__doc__, repeats=2)
    parser.add_argument("--strategies", nargs="+", choices=there, default=there, help="how the recipe is started")
    return parser.parse_args()


def main():
    arguments = parse_args()
    work = WORK["mnist"] | {"dataset": "mnist", "steps": 2, "epochs": 1}
    result = runs.about(arguments) | {"runs": [
        work | {"strategy": name, "processes": 1 if name == "single" else 2, "starts": []}
        for name in arguments.strategies]}
    for run in tqdm([run for _ in range(arguments.repeats) for run in result["runs"]], unit="run", desc="startup"):
        figures = runs.measure(run, arguments.threads, f"--device {arguments.device}")
        run["starts"].append(seconds(figures["start_up"]))
    for run in result["runs"]:
        run["parts"] = [statistics.median(values) for values in zip(*run["starts"], strict=True)]
        run["totals"] = [sum(values) for values in run["starts"]]
    runs.save(arguments, "startup", result, markdown(result))


if __name__ == "__main__":
    main()
