"""Measure the start-up time of each launcher: from the command to the first line, and to the end of
one step.

    python benchmarks/startup.py
    python benchmarks/startup.py --strategies single --repeats 1 --out /tmp/startup

A recipe prints its first line when the processes are connected, and data, model and optimizer
exist. --dry-run then takes one step of training and one of evaluation, and ends. Generated images,
mnist's ConvNet.
"""

import subprocess
import time

import runs
from tqdm import tqdm


def seconds(line, threads):
    """How long a command takes to its first line, and to its end."""
    began = time.perf_counter()
    process = runs.start(line, threads, subprocess.PIPE)
    times = [time.perf_counter() - began for text in process.stdout if b"world size" in text]
    runs.finish(process)
    return times[0], time.perf_counter() - began


def markdown(result):
    return "\n".join(
        [
            "# Start-up, in seconds",
            "",
            runs.heading(result),
            "",
            runs.table(
                ["launcher", "processes", "first line", "end of --dry-run"],
                [
                    [
                        runs.TITLES[run["strategy"]],
                        run["processes"],
                        *(
                            runs.marked(times, "{:.2f}")
                            for times in zip(*run["seconds"], strict=True)
                        ),
                    ]
                    for run in result["runs"]
                ],
            ),
            "",
            f"Measured from the command: see `python benchmarks/startup.py --help`. {runs.MARK}",
        ]
    )


def parse_args():
    there = [name for name in runs.available() if name not in ("independent", "ddp_pinned")]
    parser = runs.parser(__doc__, repeats=2)
    parser.add_argument(
        "--strategies", nargs="+", choices=there, default=there, help="how the recipe is started"
    )
    return parser.parse_args()


def main():
    arguments = parse_args()
    result = runs.about(arguments) | {
        "runs": [
            {"strategy": name, "processes": 1 if name == "single" else 2, "seconds": []}
            for name in arguments.strategies
        ]
    }
    for run in tqdm(
        [run for _ in range(arguments.repeats) for run in result["runs"]],
        unit="run",
        desc="startup",
    ):
        line = runs.command(run["strategy"], run["processes"], runs.ROOT / "mnist")
        run["seconds"].append(
            seconds(
                f"{line} --dry-run --synthetic 640 --device {arguments.device}", arguments.threads
            )
        )
    runs.save(arguments, "startup", result, markdown(result))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
