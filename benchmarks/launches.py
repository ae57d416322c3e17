"""Count what each step of each recipe asks of a GPU: launches of kernels, and lines at which Python
waits for it.

    python benchmarks/launches.py

On a pretended GPU (tests/helpers/pretended_gpu.py); the default models, and two processes where the
recipe takes several. The counts depend neither on the batch nor on the images. Apex is counted if
Python can import it.
"""

import collections
import importlib.util
import json
import os
import tempfile
from pathlib import Path

import runs
from tqdm import tqdm

START = {"single.py": "python", "dp.py": "python", "hvd.py": "horovodrun --gloo -np 2 python"}
TORCHRUN = "torchrun --standalone --nproc-per-node=2"
INTERVAL = 10


def count(dataset, recipe, more=""):
    """(launches in most steps, [lines that wait] per step, in the steps between two log intervals,
    and at one).
    """
    batch = "-b 2 --synthetic 96" if recipe not in ("single.py", "dp.py") else "-b 4 --synthetic 96"
    small = "--image-size 64 --test-batch-size 8" if dataset == "imagenet" else ""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "PRETENDED_GPUS": "1" if recipe == "single.py" else "2",
            "PRETENDED_STEPS": f"{folder}/steps",
        }
        start = f"{START.get(recipe, TORCHRUN)} tests/helpers/pretended_gpu.py {dataset}/{recipe}"
        flags = (
            f"{batch} {small} --epochs 1 --lr 1e-4 --log-interval {INTERVAL} --log-dir "
            f"{folder}/log {more}"
        )
        runs.finish(runs.start(f"{start} {flags}", threads=1))
        steps = [json.loads(line) for line in Path(folder, "steps").read_text().splitlines()]
    launches = collections.Counter(number for number, _ in steps).most_common(1)[0][0]
    between = [waits for k, (_, waits) in enumerate(steps) if k > 2 and k % INTERVAL]
    return launches, sum(map(len, between)) / len(between), len(steps[INTERVAL][1])


def main():
    parser = runs.flags.Parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results"
    )
    parser.add_argument("--recipes", nargs="+", metavar="FOLDER/RECIPE", help="only these")
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    os.chdir(runs.ROOT)
    cases = [
        (dataset, recipe, more)
        for dataset in ("mnist", "cifar10", "imagenet")
        for recipe, more in (
            ("single.py", ""),
            ("dp.py", ""),
            ("ddp_launch.py", ""),
            ("ddp_amp.py", ""),
            ("ddp_amp.py", ("--amp-dtype fp16")),
            ("apex_amp.py", ("--opt-level O1")),
            ("hvd.py", ""),
        )
        if importlib.util.find_spec(
            {"apex_amp.py": "apex", "hvd.py": "horovod"}.get(recipe, "torch")
        )
        and (not arguments.recipes or f"{dataset}/{recipe}" in arguments.recipes)
    ]
    result = runs.about(arguments) | {
        "counts": {
            f"{case[0]}/{case[1]} {case[2]}".strip(): count(*case)
            for case in tqdm(cases, unit="run")
        }
    }
    rows = [
        [name, launches, f"{between:.0f}", at]
        for name, (launches, between, at) in result["counts"].items()
    ]
    runs.save(
        arguments,
        "launches",
        result,
        "\n".join(
            [
                "# Launches and waits per training step, on a pretended GPU",
                "",
                runs.heading(result),
                "",
                runs.table(
                    [
                        "recipe",
                        ("launches in a step"),
                        ("waits in a step"),
                        f"in a step that logs (each {INTERVAL}th)",
                    ],
                    rows,
                ),
            ]
        ),
    )


if __name__ == "__main__":
    with runs.plain_exits():
        main()
