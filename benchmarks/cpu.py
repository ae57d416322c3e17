"""Measure what the speed flags do on a CPU: images/s of one process with one thread, on generated
images.

    python benchmarks/cpu.py

single.py computes in float32, ddp_amp.py in bf16, each with and without --channels-last and
--compile. The runs alternate, and a ratio is to float32 without flags in the same turn. The first
epoch warms up and does not count.
"""

import runs
import scaling
from tqdm import tqdm

FLAGS = "", "--channels-last", "--compile", "--channels-last --compile"
TITLES = {"single": "float32", "ddp_amp": "bf16"}


def settings():
    return [
        scaling.WORK[dataset]
        | {
            "dataset": dataset,
            "strategy": strategy,
            "processes": 1,
            "flags": flags,
            "images_per_sec": [],
        }
        for dataset in scaling.WORK
        for strategy in TITLES
        for flags in FLAGS
    ]


def markdown(result):
    lines = ["# Speed flags on a CPU", "", runs.heading(result), ""]
    for dataset in scaling.WORK:
        chosen = [run for run in result["runs"] if run["dataset"] == dataset]
        lines += [
            (f"## {dataset}, {chosen[0]['model']}, {chosen[0]['batch']} images per step"),
            "",
            runs.table(
                ["arithmetic", "flags", "images/s", "of float32"],
                [
                    [
                        TITLES[run["strategy"]],
                        run["flags"],
                        runs.marked(run["images_per_sec"]),
                        f"{scaling.ratio(run, chosen[0]):.2f}",
                    ]
                    for run in chosen
                ],
                left=2,
            ),
            "",
        ]
    return "\n".join([*lines, runs.MARK])


def main():
    arguments = runs.parser(__doc__, repeats=3).parse_args()
    result = runs.about(arguments) | {"runs": settings()}
    for run in tqdm(
        [run for _ in range(arguments.repeats) for run in result["runs"]], unit="run", desc="cpu"
    ):
        figures = runs.measure(run, arguments.threads, f"--device cpu {run['flags']}")
        run["images_per_sec"].append(figures["images_per_sec"])
    runs.save(arguments, "cpu", result, markdown(result))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
