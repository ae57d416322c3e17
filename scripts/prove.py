"""Prove that a script resumes exactly, and trains the same on one process and on several.

    python scripts/prove.py torchrun --nproc-per-node=2 train.py --synthetic
    python scripts/prove.py horovodrun -np 2 python train.py --synthetic

The script is one that was made from a recipe or an example. It is run for a few steps at a time:
twice undisturbed; with SIGKILL to all ranks, and with SIGTERM to one, each resumed; and with the
same global batch on all processes and on one, which then evaluate the same weights. After each step
the ranks are compared. The table says what is the same, bit by bit or to rounding, and what is not:
the step, the tensor and the rank where it begins. docs/your-own.md says what that usually means. It
ends with status 1 if something is wrong.
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))

import torch

from common import checkpoint, flags, results
from common.errors import InputError, RunError

# A checkpoint comes every five steps, and the signals between two of them. Both cut groups of two,
# three, four and six batches.
CHECKPOINT_EVERY = 5
SIGNAL_AFTER = 7
# How far one process and several may be apart: of an update relative to its norm, and of a figure.
ROUNDING = 1e-3
ROUNDING_IN_16_BITS = 0.1
# Rounding grows from step to step, in some scripts up to the whole update. So the weights of one
# process are rounded once more in a run of their own; several may grow so many times as far apart.
GROWTH = 10
FLAGS_OF_16_BITS = ("amp_dtype", "fp16_allreduce", "opt_level", "param_dtype")
# BatchNorm's statistics are those of each rank's batches; rank 0's are evaluated and saved.
OF_A_RANK = re.compile(r"running_(mean|var)$")
MEANINGS = {
    "two runs": "something draws random numbers that the seed of the step does not set, or the "
    "order of its sums changes",
    "SIGKILL": "a part of the training is not in `state`, or its state_dict leaves something out",
    "SIGTERM": "the run stops within a group of batches, or a rank does not see the stop",
    "replicas": "the ranks hold different states, and a checkpoint keeps that of rank 0, or none",
    "one process": "a loss is divided by the samples of its rank instead of those of all, padding "
    "takes part in it, the ranks do not share the data as one process sees it, or each draws "
    "random numbers in the step",
    "figures": "a figure is a mean of batches or of ranks instead of all samples, or padding or "
    "random numbers take part in it",
    "outside": "it changes in training, and a resumed run begins with a new one: put it in `state`",
}


class Proof:
    """The runs of a command, and the rows of the table."""

    def __init__(self, command: list[str], steps: int, folder: Path):
        self.command = command
        self.steps = steps
        self.folder = folder
        # What the wrong rows usually mean.
        self.wrong = {}

    def run(self, name: str, command=None, more=(), **environment) -> Path:
        """Run it up to its last step, or to its signal; return the folder of what it recorded."""
        recorded = self.folder / name
        recorded.mkdir(exist_ok=True)
        words = [
            *(command or self.command),
            *("--max-steps", str(self.steps)),
            *("--checkpoint-every", str(CHECKPOINT_EVERY)),
            *("--log-dir", str(recorded / "log")),
            *("--resume", "auto"),
            *("--log-interval", "1"),
            *more,
        ]
        start = str(ROOT / "scripts" / "hooks")
        path = os.pathsep.join(filter(None, [start, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PROVE": str(recorded), **environment}
        with open(recorded / "output", "a") as output:
            done = subprocess.run(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        expected_to_fail = "PROVE_KILL" in environment
        if done.returncode != 0 and not expected_to_fail:
            raise RunError(
                f"{shlex.join(words)} ended with status {done.returncode}: {last_line(recorded)}"
            )
        if not list(recorded.glob("rank-*.jsonl")):
            raise InputError(f"no step was seen: {last_line(recorded)}")
        expected_to_stop = expected_to_fail or "PROVE_TERM" in environment
        if not (expected_to_stop or (recorded / "end.pt").exists()):
            raise RunError(
                f"{shlex.join(words)} ended before step {self.steps}: {last_line(recorded)}"
            )
        return recorded

    def interrupt(self, check: str, name: str, whole: Path, wrong: str, **signal_after) -> None:
        """Run it up to a signal, resume it, and compare it with the whole run."""
        recorded = self.run(name, **signal_after)
        first_part = lines_of(recorded / "rank-0.jsonl")
        self.run(name)
        second_part = lines_of(recorded / "rank-0.jsonl")[len(first_part) :]
        if first_part[-1]["step"] == self.steps:
            self.row(check, "**it went on to its end**", wrong)
        elif second_part[0]["step"] == 1:
            self.row(check, "**it began again at step 1**", wrong)
        else:
            self.compare(check, whole, recorded, wrong)

    def row(self, check: str, result: str, wrong: str = "") -> None:
        """Print a row; `wrong` is the key of what it usually means."""
        print(f"| {check} | {result} |", flush=True)
        if wrong:
            self.wrong[wrong] = f"{check}: {MEANINGS[wrong]}"

    def compare(self, check: str, whole: Path, other: Path, wrong: str) -> None:
        """Bit by bit: the first step, rank and tensor that differ."""
        difference = first_difference(trace(whole), trace(other))
        if not difference:
            self.row(check, "same bits")
            return
        apart = distance(weights(whole / "end.pt"), weights(other / "end.pt"))
        # More than two ranks add up in another order after a start.
        if ranks_of(whole) > 2 and apart < ROUNDING:
            self.row(check, f"same to rounding: {apart:.0e} apart at the end")
        else:
            self.row(check, f"**differs** from {difference}; {apart:.0e} apart at the end", wrong)


def last_line(recorded: Path) -> str:
    """The last line in which a script or Python names an error, or the last one."""
    lines = (recorded / "output").read_text(errors="replace").splitlines()
    named = re.compile(r"(\[rank\d+\]: )?(\w+\.py|[\w.]*(Error|Exception)): ")
    # Below it torchrun prints an error of its own, and a summary.
    errors = [line for line in lines if named.match(line) and "elastic" not in line]
    return (errors or lines or ["it printed nothing"])[-1]


def trace(recorded: Path) -> dict:
    """{step: {rank: {name: checksum}}} of a run; a resumed one repeats some steps."""
    found = {}
    for path in sorted(recorded.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in lines_of(path):
            found.setdefault(line["step"], {})[rank] = line["checksums"]
    return found


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ranks_of(recorded: Path) -> int:
    return lines_of(recorded / "rank-0.jsonl")[0]["ranks"]


def first_difference(whole: dict, other: dict) -> str:
    """Where two runs begin to differ, in words; empty if they are the same."""
    for step in sorted(whole):
        for rank, checksums in sorted(whole[step].items()):
            others = other.get(step, {}).get(rank)
            if others is None:
                return f"step {step}: rank {rank} did not come to it"
            for name, value in checksums.items():
                # Those of other ranks than 0 begin anew after a resume.
                if rank > 0 and OF_A_RANK.search(name):
                    continue
                if others.get(name) != value:
                    return f"step {step}: {name} of rank {rank}"
    return ""


def difference_of_ranks(recorded: Path) -> str:
    """Where the ranks of a run begin to differ, in words."""
    for step, ranks in sorted(trace(recorded).items()):
        for rank in sorted(ranks):
            for name, value in ranks[0].items():
                same = ranks[rank].get(name, value) == value
                if not same and not OF_A_RANK.search(name):
                    return f"step {step}: {name} of rank {rank} is not that of rank 0"
    return ""


def all_have_answered(recorded: Path) -> bool:
    """Whether each rank gave its answer to one batch, at some step."""
    return any(
        all("the answer to one batch" in checksums for checksums in ranks.values())
        for ranks in trace(recorded).values()
    )


def weights(path: Path) -> dict:
    """Those of the model in a file of prove_hooks."""
    return torch.load(path, map_location="cpu")["model"]


def distance(ours: dict, theirs: dict, start: dict | None = None) -> float:
    """The difference of two sets of weights, relative to their change since `start`, or to 0."""
    apart = 0.0
    whole = 0.0
    for name, value in ours.items():
        if not value.is_floating_point() or OF_A_RANK.search(name):
            continue
        value, other = value.double(), theirs[name].double()
        change = value if start is None else value - start[name].double()
        apart += (value - other).square().sum().item()
        whole += change.square().sum().item()
    return (apart / whole) ** 0.5 if whole else apart


def on_one_process(command: list[str]) -> list[str] | None:
    """The same command for one process, or None if it does not say how many there are."""
    text = shlex.join(command)
    number = r"(--nproc[-_]per[-_]node[= ]|--nproc[= ]|-np |-n |-g |--gpus[= ])\d+"
    changed, times = re.subn(number, r"\g<1>1", text)
    return shlex.split(changed) if times else None


def same_training(config: dict) -> list[str]:
    """The flags that give one process the global batch and the rate of several."""
    return ["--global-batch-size", str(config["global_batch"]), "--lr", repr(config["peak_lr"])]


def prove(proof: Proof) -> None:
    whole = proof.run("whole")
    print("| check | result |\n| --- | --- |", flush=True)
    again = proof.run("again")
    proof.compare("two runs", whole, again, "two runs")

    check = f"SIGKILL after step {SIGNAL_AFTER}, resumed"
    proof.interrupt(check, "killed", whole, "SIGKILL", PROVE_KILL=str(SIGNAL_AFTER))
    check = f"SIGTERM after step {SIGNAL_AFTER}, resumed"
    proof.interrupt(check, "told", whole, "SIGTERM", PROVE_TERM=str(SIGNAL_AFTER))

    lines = lines_of(whole / "rank-0.jsonl")
    outside = next((line["outside"] for line in lines if "outside" in line), [])
    if outside:
        proof.row("changes, and is in no checkpoint", f"**{', '.join(outside)}**", "outside")
    else:
        proof.row(
            "changes, and is in no checkpoint",
            "no model, optimizer, scheduler, scaler or generator",
        )

    ranks = ranks_of(whole)
    if ranks == 1:
        proof.row("ranks, and one process", "start it on two processes for these")
        return
    if difference := difference_of_ranks(whole):
        proof.row(f"the {ranks} ranks hold the same", f"**no** from {difference}", "replicas")
    elif all_have_answered(whole):
        proof.row(f"the {ranks} ranks hold the same", "yes, and give one batch the same answer")
    else:
        proof.row(f"the {ranks} ranks hold the same", "yes")
    compare_with_one(proof, whole, ranks)


def compare_with_one(proof: Proof, whole: Path, ranks: int) -> None:
    """Train with the same global batch on one process, and evaluate the same weights there."""
    check = f"one process in place of {ranks}"
    command = on_one_process(proof.command)
    if command is None:
        proof.row(check, "not tried: the command names no number of processes")
        return
    saved, _ = checkpoint.read(whole / "log" / "last.pt")
    if not {"global_batch", "peak_lr"} <= saved["config"].keys():
        proof.row(check, "not tried: the script has no --global-batch-size and --scale-lr")
        return
    if lines_of(whole / "rank-0.jsonl")[0]["has_batch_norm"]:
        proof.row("BatchNorm", "takes the statistics of a rank; in the rows below, of a sample")
    # Both with the same flags, as the rate of one process is where a warm-up begins.
    flags_of_both = same_training(saved["config"])

    # Without what each rank has of its own, dropout and BatchNorm's statistics: they would hide a
    # wrong loss.
    def run(name, command, **environment):
        return proof.run(name, command, flags_of_both, PROVE_LIKE_ONE="1", **environment)

    several = run("several", proof.command)
    one = run("one", command, PROVE_EVALUATE=str(several / "end.pt"))
    disturbed = run("disturbed", command, PROVE_DISTURB="1")
    short = any(saved["config"].get(flag) for flag in FLAGS_OF_16_BITS)
    rounding = ROUNDING_IN_16_BITS if short else ROUNDING
    compare_weights(proof, check, several, one, disturbed, rounding)
    compare_figures(proof, figures(several), figures(one), ranks, rounding)


def compare_weights(
    proof: Proof,
    check: str,
    several: Path,
    one: Path,
    disturbed: Path,
    rounding: float,
) -> None:
    """Compare the weights of several processes and of one, after the first step and at the end."""
    start = weights(several / "before.pt")
    end, end_of_one = weights(several / "end.pt"), weights(one / "end.pt")
    first = distance(weights(several / "after.pt"), weights(one / "after.pt"), start)
    last = distance(end, end_of_one, start)
    last_by_rounding = distance(weights(disturbed / "end.pt"), end_of_one, start)
    growth = f"{first:.0e} of the first update, {last:.0e} of all {proof.steps}"
    if first < rounding and last < max(rounding, GROWTH * last_by_rounding):
        proof.row(check, f"same to rounding: {growth}")
    else:
        furthest = furthest_apart(end, end_of_one)
        proof.row(check, f"**differs** by {growth}; most in {furthest}", "one process")


def compare_figures(proof: Proof, several: dict, one: dict, ranks: int, rounding: float) -> None:
    """Compare the figures of `ranks` processes and of one, which evaluated the same weights."""
    check = "evaluated on one process"
    for name, value in several.items():
        of_one = one[name]
        close = math.isclose(value, of_one, rel_tol=rounding, abs_tol=1e-6)
        both_undefined = math.isnan(value) and math.isnan(of_one)
        if not (close or both_undefined):
            values = f"{name} is {value:.6g} on {ranks} processes, {of_one:.6g} on one"
            proof.row(check, f"**differs**: {values}", "figures")
            return
    names = ", ".join(several)
    proof.row(check, f"same to rounding: {names}" if several else "there are no figures")


def figures(recorded: Path) -> dict:
    """The figures of the last evaluation of a run, if there was one."""
    found = {}
    for event in results.read(recorded / "log" / "results.jsonl"):
        if event["event"] == "evaluation":
            found = {name: value for name, value in event.items() if name.startswith("val/")}
    return found


def furthest_apart(ours: dict, theirs: dict) -> str:
    """The name of the weight that has most of the difference."""
    apart = {
        name: (value.double() - theirs[name].double()).norm().item()
        for name, value in ours.items()
        if not OF_A_RANK.search(name)
    }
    return max(apart, key=apart.get)


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("--steps", type=flags.positive_int, default=12, help="of each run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep outputs and checkpoints")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="as you start the script")
    args = parser.parse_args()
    if not args.command:
        raise InputError("give the command that starts the script, such as: python train.py")
    if args.steps <= SIGNAL_AFTER + 1:
        raise InputError(f"--steps {args.steps}: give more than {SIGNAL_AFTER + 1}")
    command = args.command
    on_cpu = re.search("--device[ =]cpu", shlex.join(command))
    if torch.cuda.is_available() and not on_cpu:
        command.append("--deterministic")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"--keep {folder}: give a new folder")
        proof = Proof(command, args.steps, folder)
        prove(proof)
    print(f"\n{time.monotonic() - began:.0f} s")
    if "SIGKILL" in proof.wrong:
        # What SIGKILL loses, SIGTERM loses, too.
        proof.wrong.pop("SIGTERM", None)
    for each in proof.wrong.values():
        print(f"{each} (docs/your-own.md#prove-it)")
    return 1 if proof.wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InputError, RunError) as error:
        print(f"prove.py: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
