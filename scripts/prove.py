"""Prove that a script resumes exactly, and trains the same on one process and on several.

    python scripts/prove.py torchrun --nproc-per-node=2 train.py --synthetic
    python scripts/prove.py horovodrun -np 2 python train.py --synthetic

For scripts made from a recipe or an example. It runs the script for a few steps at a time, in short
epochs that end with an evaluation: twice undisturbed; killed by SIGKILL to all ranks, and resumed;
stopped by SIGTERM to one rank, and resumed; and with the same global batch on all processes and on
one, which then evaluate the same weights. After each step it compares the ranks. The table says
what is the same, bit for bit or up to rounding, and where a difference starts: the step, the tensor
and the rank. docs/prove.md says what it usually means. Exits with status 1 if something is wrong.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
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
from scripts import findings
from scripts.check import on_one_process
from scripts.commands import plain_exits
from scripts.hooks.hook_tools import checksum, leaves

# Save every five steps, and send signals between two saves. Both interrupt groups of two, three,
# four and six batches, and the epochs of four steps that prove_hooks.py sets.
CHECKPOINT_EVERY = 5
SIGNAL_AFTER = 7
# How far the weights may differ between one process and several, relative to their change.
ROUNDING = 1e-3
ROUNDING_IN_16_BITS = 0.1
# The same for their figures with equal weights: all recipes and examples agree to 1e-7.
ROUNDING_OF_FIGURES = 1e-6
ROUNDING_OF_FIGURES_IN_16_BITS = 1e-2
# Rounding errors grow from step to step, in some scripts up to the whole update. So another run on
# one process starts from weights with one more rounding error. Several processes may drift this
# many times as far as that run.
GROWTH = 10
# Training figures are sums, which a resumed run adds up in another order.
ROUNDING_OF_SUMS = 1e-12
FLAGS_OF_16_BITS = ("amp_dtype", "fp16_allreduce", "opt_level", "param_dtype")
IN_32_BITS = (None, False, "fp32", "O0")
# BatchNorm's statistics, which differ between ranks; rank 0's are evaluated and saved.
OF_A_RANK = re.compile(r"running_(mean|var)$")
# Values that are equal in two runs even if sums round differently.
NOT_ROUNDED = re.compile(r"(.*'s )?position\.|the batch")
# What a failed row usually means, causes before their consequences.
MEANINGS = {
    "replicas": "the ranks hold different states, and a checkpoint keeps that of rank 0, or none",
    "batches": "`set_epoch` does not reach the sampler, or a rank does not take its own share",
    "random numbers": "something seeds a generator after the step was seeded, alike on all ranks",
    "two runs": "something draws random numbers that the seed of the step does not set, or the "
    "order of its sums changes",
    "weights": "they are in no optimizer, their gradients are cleared before it steps, or the loss "
    "does not depend on them",
    "evaluation": "`model.eval()` is missing, `training=self.training` in F.dropout, or the model "
    "that is evaluated is not the one that is trained",
    "training": "`model.train()` is missing at the beginning of the loop",
    "outside": "it changes in training, but a resumed run starts with a new one: put it in `state`",
    "SIGKILL": "a part of the training is not in `state`, or its state_dict leaves something out",
    "SIGTERM": "the run stops within a group of batches, or a rank does not see the stop",
    "rates": "`schedule.peak_lr` was not used for each parameter group",
    "one process": "a loss is divided by its rank's samples instead of those of all ranks, padding "
    "affects it, the ranks together do not read the batches of one process, or each draws "
    "random numbers in the step",
    "figures": "a figure is a mean of batches or of ranks instead of all samples, or padding or "
    "random numbers affect it",
}
# A failed row, and the rows that fail because of it: these get no explanation.
FOLLOWING = {
    "replicas": ("SIGKILL", "SIGTERM", "one process"),
    "batches": ("one process",),
    "two runs": ("SIGKILL", "SIGTERM", "one process", "figures"),
    "evaluation": ("SIGKILL", "SIGTERM", "figures"),
    "training": ("SIGKILL", "SIGTERM"),
    "outside": ("SIGKILL", "SIGTERM"),
    "SIGKILL": ("SIGTERM",),
}


class Proof:
    """The runs of a command, and the rows of the table."""

    def __init__(self, command: list[str], steps: int, folder: Path, keep: bool = False):
        self.command = command
        self.steps = steps
        self.folder = folder
        self.keep = keep
        # {key of MEANINGS: the check that failed}, and what check.py calls wrong.
        self.wrong = {}
        self.wrong_in_check = []

    def run(self, name: str, command=None, more=(), **environment) -> Path:
        """Run the script to its last step, or to its signal; return the folder with its records."""
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
        variables = {**os.environ, "PYTHONPATH": path, "PROVE": str(recorded), **environment}
        number = len(list(recorded.glob("output-*"))) + 1
        printed = recorded / f"output-{number}"
        with open(printed, "w") as output:
            status = start_and_wait(words, variables, output)
        is_told = not {"PROVE_KILL", "PROVE_TERM"}.isdisjoint(environment)
        # If a resumed run ends early, its row says so.
        may_end_early = is_told or number > 1
        if status != 0 and "PROVE_KILL" not in environment:
            problem = f"ended with status {status}"
        elif not list(recorded.glob("steps-*.jsonl")):
            raise InputError(f"no step was seen: {self.said(printed)}")
        elif not (may_end_early or (recorded / "end.pt").exists()):
            problem = f"ended before step {self.steps}"
        else:
            return recorded
        raise RunError(f"{shlex.join(words)} {problem}: {self.said(printed)}")

    def said(self, printed: Path) -> str:
        """Why a run failed, and which file has the rest of its output."""
        if not self.keep:
            number, kept = tempfile.mkstemp(prefix="prove-", suffix=".txt")
            os.close(number)
            shutil.copy(printed, kept)
        return f"{cause_in(printed)} (see {printed if self.keep else kept})"

    def interrupt(self, wrong: str, name: str, whole: Path, variable: str, next_step: int) -> None:
        """Run the script to a signal, resume it at `next_step`, and compare with the whole run.

        `wrong` is the name of the signal; the environment variable `variable` makes prove_hooks.py
        send it.
        """
        check = f"{wrong} after step {SIGNAL_AFTER}, resumed"
        recorded = self.run(name, **{variable: str(SIGNAL_AFTER)})
        first_part = steps_of(recorded)
        self.run(name)
        second_part = steps_of(recorded)[len(first_part) :]
        if first_part[-1]["step"] == self.steps:
            self.row(check, "**it ran to its end**", wrong)
        elif not second_part:
            self.row(check, "**it does not resume**", wrong)
        elif second_part[0]["step"] < next_step:
            step = second_part[0]["step"]
            self.row(check, f"**it resumes at step {step}, not at {next_step}**", wrong)
        else:
            self.compare(check, whole, recorded, wrong)

    def row(self, check: str, result: str, wrong: str = "") -> None:
        """Print a row; `wrong` is its key in MEANINGS if it failed."""
        print(f"| {check} | {result} |", flush=True)
        if wrong:
            self.wrong[wrong] = check

    def add(self, verdict: str, text: str) -> None:
        """Print a row of check.py, whose verdict may be "wrong"."""
        if verdict == "wrong":
            self.wrong_in_check.append(text)
            verdict = "**wrong**"
        self.row("check.py", f"{verdict}: {text}")

    def explanations(self) -> list[str]:
        """What the failed rows usually mean, without rows that fail because of another one."""
        following = {each for wrong in self.wrong for each in FOLLOWING.get(wrong, ())}
        return [
            f"{self.wrong[wrong]}: {meaning}"
            for wrong, meaning in MEANINGS.items()
            if wrong in self.wrong and wrong not in following
        ]

    def compare(self, check: str, whole: Path, other: Path, wrong: str) -> None:
        """Compare two runs bit by bit; print the first step, rank and value that differ."""
        difference = first_difference(trace(whole), trace(other))
        if not difference:
            self.row(check, "same bits")
            return
        apart = ""
        if (other / "end.pt").exists():
            start = weights(whole / "before-1.pt")
            relative = distance(weights(whole / "end.pt"), weights(other / "end.pt"), start)
            apart = f"; at the end {relative:.0e} of all updates apart"
            # More than two ranks may sum in another order after each start.
            if ranks_of(whole) > 2:
                more = self.more_than_rounding(whole, other)
                if not more:
                    self.row(check, f"same up to rounding{apart}")
                    return
                difference = more
        self.row(check, f"**differs** from {difference}{apart}", wrong)

    def more_than_rounding(self, whole: Path, other: Path) -> str:
        """Where two completed runs differ by more than rounding, in words."""
        difference = first_difference(trace(whole), trace(other), only=NOT_ROUNDED)
        if difference:
            return difference
        # In the first update of a resumed run rounding errors have not grown yet.
        for before in other.glob("before-*.pt"):
            step = before.stem.removeprefix("before-")
            name = f"after-{step}.pt"
            if (whole / name).exists():
                of_update = distance(weights(whole / name), weights(other / name), weights(before))
                if of_update > ROUNDING:
                    return f"step {step}: {of_update:.0e} of its update"
        rounded = self.folder / "rounded"
        if not rounded.exists():
            self.run("rounded", PROVE_DISTURB="1")
        start = weights(whole / "before-1.pt")
        end = weights(whole / "end.pt")
        by_rounding = distance(end, weights(rounded / "end.pt"), start)
        if distance(end, weights(other / "end.pt"), start) > max(ROUNDING, GROWTH * by_rounding):
            return f"a step after {step}"
        return difference_of_figures(trace(whole), trace(other), trace(rounded))


def start_and_wait(words: list[str], environment: dict, output) -> int:
    """Run a command, and return its status. If this process is told to end, end the command."""
    try:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"cannot start {words[0]}: {error.strerror}") from error
    try:
        return process.wait()
    finally:
        # Longer than the 30 s that torchrun gives its ranks.
        for number, seconds in ((signal.SIGTERM, 40), (signal.SIGKILL, None)):
            if process.poll() is None:
                os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)


def cause_in(printed: Path) -> str:
    """The first error that a rank itself printed, or else the last line."""
    lines = printed.read_text(errors="replace").splitlines()
    named = re.compile(r"(\[rank\d+\]: )?(\w+\.py|[\w.]*(Error|Exception)): ")
    # torchrun then prints an error of its own, and a summary.
    errors = [line for line in lines if named.match(line) and "elastic" not in line]
    of_others = re.compile("another rank has ended|Connection (closed|reset) by peer|Broken pipe")
    own = [line for line in errors if not of_others.search(line)]
    return next(iter(own or errors), (lines or ["it printed nothing"])[-1])


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(recorded: Path, rank: int = 0) -> list[dict]:
    """The records of a rank after each step; a resumed run repeats some."""
    return lines_of(recorded / f"steps-{rank}.jsonl")


def ranks_of(recorded: Path) -> int:
    return steps_of(recorded)[0]["ranks"]


def trace(recorded: Path) -> dict:
    """{step: {rank: {name: checksum or figure}}} of a run."""
    found = {}
    for rank in range(ranks_of(recorded)):
        for line in steps_of(recorded, rank):
            of_step = found.setdefault(line["step"], {})
            of_step[rank] = {"the batch": line["batch"], **line["checksums"]}
    for event in results.read(recorded / "log" / "results.jsonl"):
        if event["event"] == "evaluation" and event["step"] in found:
            found[event["step"]][0] |= figures_in(event)
    last = found[max(found)][0]
    for name in ("last.pt", "best.pt"):
        with contextlib.suppress(FileNotFoundError):
            saved, _ = checkpoint.read(recorded / "log" / name)
            for part in ("format", "config", "sums"):
                saved.pop(part)
            last |= {f"{name}'s {part}": checksum(value) for part, value in leaves(saved)}
    return found


def figures_in(event: dict) -> dict[str, float]:
    """The figures of training and validation in a line of results.jsonl, without the speed."""
    return {name: value for name, value in event.items() if name.startswith(("train/", "val/"))}


def first_difference(whole: dict, other: dict, only: re.Pattern | None = None) -> str:
    """Where two runs start to differ, in words; empty if they are the same."""
    for step in sorted(whole):
        for rank, values in sorted(whole[step].items()):
            others = other.get(step, {}).get(rank)
            if others is None:
                return f"step {step}: rank {rank} did not reach it"
            for name, value in values.items():
                # After a resume, ranks other than 0 start with rank 0's.
                if rank > 0 and OF_A_RANK.search(name):
                    continue
                if only and not only.match(name):
                    continue
                if not same(name, value, others.get(name)):
                    return f"step {step}: {in_words(name, value, others.get(name), rank)}"
    return ""


def same(name: str, value, other) -> bool:
    """Whether a checksum or a figure is the same in two runs."""
    if name.startswith("train/") and other is not None:
        return math.isclose(value, other, rel_tol=ROUNDING_OF_SUMS)
    return value == other or (value != value and other != other)


def in_words(name: str, value, other, rank: int) -> str:
    if name.startswith(("train/", "val/")):
        return f"{name} of its evaluation, {other} in place of {value}"
    return f"{name} of rank {rank}"


def difference_of_figures(whole: dict, other: dict, rounded: dict) -> str:
    """Where figures differ by more than rounding, in words."""
    for step in sorted(whole):
        for name, value in whole[step][0].items():
            if not isinstance(value, float):
                continue
            found = other[step][0].get(name, math.nan)
            allowed = ROUNDING * abs(value) + GROWTH * abs(value - rounded[step][0][name])
            if abs(value - found) > allowed:
                return f"step {step}: {in_words(name, value, found, 0)}"
    return ""


def difference_of_ranks(recorded: Path) -> str:
    """Where the ranks of a run start to differ, in words."""
    for step, ranks in sorted(trace(recorded).items()):
        for rank in sorted(ranks):
            for name, value in ranks[0].items():
                if name == "the batch" or OF_A_RANK.search(name):
                    continue
                if ranks[rank].get(name, value) != value:
                    return f"step {step}: {name} of rank {rank} differs from rank 0's"
    return ""


def all_have_answered(recorded: Path) -> bool:
    """Whether at some step all ranks computed the outputs for the same batch."""
    return any(
        all("the output for one batch" in checksums for checksums in ranks.values())
        for ranks in trace(recorded).values()
    )


def weights(path: Path) -> dict[str, torch.Tensor]:
    """{name: tensor} of all models in a file that prove_hooks.py wrote."""
    saved = leaves(torch.load(path, map_location="cpu"))
    return {name: value for name, value in saved if isinstance(value, torch.Tensor)}


def distance(ours: dict, theirs: dict, start: dict) -> float:
    """The distance between two sets of weights, relative to their change since `start`."""
    apart = 0.0
    whole = 0.0
    for name, value in ours.items():
        if not value.is_floating_point() or OF_A_RANK.search(name):
            continue
        value, other, before = value.double(), theirs[name].double(), start[name].double()
        apart += (value - other).square().sum().item()
        whole += (value - before).square().sum().item()
    return (apart / whole) ** 0.5 if whole else apart


def prove(proof: Proof) -> None:
    kept = f"{CHECKPOINT_EVERY + 1},{SIGNAL_AFTER + 1}"
    whole = proof.run("whole", PROVE_KEEP=kept)
    print("| check | result |\n| --- | --- |", flush=True)
    look(proof, whole)
    check(proof)
    again = proof.run("again")
    proof.compare("two runs", whole, again, "two runs")
    proof.interrupt("SIGKILL", "killed", whole, "PROVE_KILL", CHECKPOINT_EVERY + 1)
    proof.interrupt("SIGTERM", "told", whole, "PROVE_TERM", SIGNAL_AFTER + 1)
    ranks = ranks_of(whole)
    compare_variables(proof, ranks)
    if ranks == 1:
        proof.row("ranks, and one process", "not tried: start the script on two processes")
    else:
        compare_with_one(proof, whole, ranks)


def check(proof: Proof) -> None:
    """Add the rows of check.py that are not ok, from a run with its hooks."""
    events = proof.folder / "check"
    events.mkdir()
    # Without torch.compile, which would trace the hooks.
    checked = {"CHECK": str(events), "CHECK_MODE": "prove", "TORCHDYNAMO_DISABLE": "1"}
    proof.run("checked", **checked)
    for finding in findings.rows(findings.Seen(events)):
        if finding.verdict in ("wrong", "look"):
            proof.add(finding.verdict, finding.text)


def look(proof: Proof, whole: Path) -> None:
    """Print the rows for which one run is enough."""
    ranks = ranks_of(whole)
    if ranks > 1:
        look_at_ranks(proof, whole, ranks)
    look_at_batches(proof, whole, ranks)
    look_at_weights(proof, whole)
    look_at_evaluation(proof, whole)
    look_at_training(proof, whole)
    look_outside(proof, whole)


def look_at_ranks(proof: Proof, whole: Path, ranks: int) -> None:
    """Whether the ranks hold the same state, but draw different random numbers."""
    check = f"the {ranks} ranks hold the same"
    if difference := difference_of_ranks(whole):
        proof.row(check, f"**no**, from {difference}", "replicas")
    elif all_have_answered(whole):
        proof.row(check, "yes, and compute the same output for one batch")
    else:
        proof.row(check, "yes")
    check = "random numbers of the ranks"
    lines = [steps_of(whole, rank) for rank in range(ranks)]
    for of_ranks in zip(*lines, strict=True):
        for generator, state in of_ranks[0]["drawn"].items():
            if any(line["drawn"].get(generator) == state for line in of_ranks[1:]):
                step = of_ranks[0]["step"]
                result = f"**the same** from step {step}, from {generator}"
                proof.row(check, result, "random numbers")
                return
    draws = any(line["drawn"] for of_rank in lines for line in of_rank)
    proof.row(check, "each draws its own in a step" if draws else "none draws in a step")


def look_at_batches(proof: Proof, whole: Path, ranks: int) -> None:
    """Whether each rank and each epoch has its own batches."""
    epochs = []
    for rank in range(ranks):
        of_rank = {}
        for line in steps_of(whole, rank):
            of_rank.setdefault(line["epoch"], []).append(line["batch"])
        epochs.append(list(of_rank.values()))
    check = "batches"
    first, second, *_ = epochs[0]
    alike = [rank for rank in range(1, ranks) if epochs[rank] == epochs[0]]
    if alike:
        proof.row(check, f"**rank {alike[0]} has the batches of rank 0**", "batches")
    elif first != second:
        proof.row(check, "different in each epoch" + (" and on each rank" if ranks > 1 else ""))
    elif steps_of(whole)[0]["shuffled"]:
        proof.row(check, "**the second epoch has the batches of the first**", "batches")
    else:
        proof.row(check, "look: the same in each epoch, because the sampler does not shuffle")


def look_at_weights(proof: Proof, whole: Path) -> None:
    """Whether each weight that should train has changed."""
    check = "each weight changes"
    start, end = weights(whole / "before-1.pt"), weights(whole / "end.pt")
    known = steps_of(whole)[-1]["weights"]
    there = [name for name in known if known[name]["trains"] and name in start and name in end]
    unchanged = [name for name in there if torch.equal(start[name], end[name])]
    without_gradient = [name for name in unchanged if not known[name]["has_gradient"]]
    without_optimizer = [
        name
        for name in unchanged
        if not known[name]["in_optimizer"] and name not in without_gradient
    ]
    if len(unchanged) == len(there):
        proof.row(check, f"**none** of {len(there)}", "weights")
    elif without_optimizer:
        result = f"**not {listed(without_optimizer)}**: with a gradient, but in no optimizer"
        proof.row(check, result, "weights")
    elif without_gradient:
        proof.row(check, f"look: all but {listed(without_gradient)}, which get no gradient")
    elif unchanged:
        proof.row(check, f"look: all but {listed(unchanged)}, whose gradient is nearly 0")
    else:
        proof.row(check, f"all {len(there)}")


def listed(names: list[str]) -> str:
    """The first names of a list."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def look_at_evaluation(proof: Proof, whole: Path) -> None:
    """Whether an evaluation is in evaluation mode, uses trained weights, and changes none."""
    check = "an evaluation"
    paths = sorted(whole.glob("evaluations-*.jsonl"))
    if not paths:
        proof.row(check, "not seen: it does not use run.batches()")
        return
    of_ranks = [lines_of(path) for path in paths]
    modes = sorted({mode for lines in of_ranks for line in lines for mode in line["modes"]})
    # Rank 0 only: the other ranks get its BatchNorm statistics.
    lines = of_ranks[0]
    changed = sorted({name for line in lines for name in line["changed"]})
    # {step: the weights that no checkpoint has, each with its checksum}
    outside = {0: set()} | {line["step"]: set() for line in lines}
    for line in lines:
        outside[line["step"]].update(line["outside"])
    *_, before, last = outside.values()
    names = sorted({each.rpartition(" ")[0] for each in last})
    untrained = last and before == last and lines[-1]["inside"] == 0
    if modes:
        proof.row(check, f"**in training mode**: {listed(modes)}", "evaluation")
    elif changed:
        proof.row(check, f"**it changes** {listed(changed)}", "evaluation")
    elif untrained:
        proof.row(check, f"**with weights that nothing trains**: {listed(names)}", "evaluation")
    elif before != last:
        proof.row(check, f"look: with weights that are in no checkpoint: {listed(names)}")
    else:
        proof.row(check, "in evaluation mode, and it changes no weight and no buffer")


def look_at_training(proof: Proof, whole: Path) -> None:
    """Whether training is in training mode again after an evaluation."""
    check = "training after an evaluation"
    for line in steps_of(whole):
        if modules := line["no_longer_trained"]:
            result = f"**in evaluation mode** from step {line['step']}: {listed(modules)}"
            proof.row(check, result, "training")
            return
    proof.row(check, "in the mode of the first step")


def look_outside(proof: Proof, whole: Path) -> None:
    """What changes in training, but is not saved."""
    check = "changes, and is in no checkpoint"
    outside = next((line["outside"] for line in steps_of(whole) if "outside" in line), [])
    if outside:
        proof.row(check, f"**{', '.join(outside)}**", "outside")
    else:
        proof.row(check, "no model, optimizer, scheduler, scaler or generator")


def compare_variables(proof: Proof, ranks: int) -> None:
    """The script's numbers that differ after a resume: they may be part of the training."""
    runs = [proof.folder / name for name in ("whole", "again", "killed", "told")]
    of_whole, *of_others = [steps_of(recorded)[-1].get("variables", {}) for recorded in runs]
    # More than two ranks may sum in another order after each start.
    rounding = ROUNDING if ranks > 2 else 0
    of_again, of_killed, of_told = [
        {
            name
            for name, value in of_whole.items()
            if math.isclose(variables.get(name, value), value, rel_tol=rounding)
        }
        for variables in of_others
    ]
    changed = sorted(of_again - (of_killed & of_told))
    if changed:
        proof.row("variables after a resume", f"look: these numbers differ: {listed(changed)}")


def compare_with_one(proof: Proof, whole: Path, ranks: int) -> None:
    """Train with the same global batch on one process, and evaluate the same weights there."""
    check = f"one process in place of {ranks}"
    saved, _ = checkpoint.read(whole / "log" / "last.pt")
    config = saved["config"]
    command = on_one_process(proof.command)
    # mp.spawn: the script itself starts the processes, and the last --gpus counts.
    if "mp.spawn" in config.get("saved_by", "") and config.get("nodes") == 1:
        command = [*proof.command, "--gpus", "1"]
    if command is None:
        proof.row(check, "not tried: the command sets no number of processes")
        return
    if not {"global_batch", "peak_lr"} <= config.keys():
        proof.row(check, "not tried: the script lacks --global-batch-size or --scale-lr")
        return
    # Stop it after two steps: during the first one SIGTERM would end it at once.
    compare_rates(proof, whole, proof.run("rates", command, PROVE_TERM="2"), ranks)
    if steps_of(whole)[0]["has_batch_norm"]:
        proof.row("BatchNorm", "uses its rank's statistics; in the rows below, each sample's")
    # Both runs get the global batch and the rate of the whole run.
    same_training = (
        *("--global-batch-size", str(config["global_batch"])),
        *("--lr", repr(config["peak_lr"])),
    )

    # Without dropout and BatchNorm's statistics, which differ between ranks and would hide a wrong
    # loss.
    def run(name, command, **environment):
        return proof.run(name, command, same_training, PROVE_LIKE_ONE="1", **environment)

    several = run("several", proof.command)
    one = run("one", command, PROVE_EVALUATE=str(several / "end.pt"))
    in_16_bits = any(config.get(flag) not in IN_32_BITS for flag in FLAGS_OF_16_BITS)
    rounding = ROUNDING_IN_16_BITS if in_16_bits else ROUNDING
    start = weights(several / "before-1.pt")
    end, end_of_one = weights(several / "end.pt"), weights(one / "end.pt")
    first = distance(weights(several / "after-1.pt"), weights(one / "after-1.pt"), start)
    last = distance(end, end_of_one, start)
    allowed = rounding
    if first < rounding < last:
        disturbed = weights(run("disturbed", command, PROVE_DISTURB="1") / "end.pt")
        allowed = GROWTH * distance(disturbed, end_of_one, start)
    growth = f"{first:.0e} of the first update, {last:.0e} of all {proof.steps}"
    if first < rounding and last < max(rounding, allowed):
        proof.row(check, f"same up to rounding: {growth}")
    else:
        furthest = furthest_apart(end, end_of_one)
        proof.row(check, f"**differs** by {growth}; most in {furthest}", "one process")
    rounding = ROUNDING_OF_FIGURES_IN_16_BITS if in_16_bits else ROUNDING_OF_FIGURES
    compare_figures(proof, figures(several), figures(one), ranks, rounding)


def compare_rates(proof: Proof, whole: Path, one: Path, ranks: int) -> None:
    """Whether the rates of all parameter groups grow alike with the number of processes."""
    rates, of_one = steps_of(whole)[0]["rates"], steps_of(one)[0]["rates"]
    factors = {name: rates[name] / of_one[name] for name in rates if of_one.get(name)}
    check = f"rates on {ranks} processes"
    if not factors:
        proof.row(check, "not seen: no optimizer in `state` has a rate in the first step")
        return
    least, most = min(factors, key=factors.get), max(factors, key=factors.get)
    if math.isclose(factors[least], factors[most], rel_tol=1e-5):
        groups = "the only group" if len(factors) == 1 else f"each of {len(factors)} groups"
        proof.row(check, f"{factors[most]:.4g} times those of one process, in {groups}")
    else:
        times = f"{factors[least]:.4g} times that of one process"
        result = f"{least} has {times}, {most} {factors[most]:.4g} times"
        proof.row(check, f"**differ**: {result}", "rates")


def compare_figures(proof: Proof, several: dict, one: dict, ranks: int, rounding: float) -> None:
    """Compare the figures of `ranks` processes with those of one, for the same weights."""
    check = "evaluated on one process"
    furthest = 0.0
    for name, value in several.items():
        of_one = one.get(name, math.nan)
        if math.isnan(value) and math.isnan(of_one):
            continue
        apart = abs(value - of_one) / max(abs(value), abs(of_one), 1e-6)
        # `not <`, as it may be NaN.
        if not apart < rounding:
            values = f"{name} is {value:.9g} on {ranks} processes, {of_one:.9g} on one"
            proof.row(check, f"**differs**: {values}", "figures")
            return
        furthest = max(furthest, apart)
    names = ", ".join(several)
    result = f"same up to rounding ({furthest:.0e}): {names}" if several else "there are no figures"
    proof.row(check, result)


def figures(recorded: Path) -> dict:
    """The figures of the last evaluation, which is of given weights, and of the first step."""
    found = {}
    for event in results.read(recorded / "log" / "results.jsonl"):
        of_event = figures_in(event)
        if event["event"] == "evaluation":
            found |= {name: value for name, value in of_event.items() if "val/" in name}
        elif event["event"] == "step" and event["step"] == 1:
            found |= of_event
    return found


def furthest_apart(ours: dict, theirs: dict) -> str:
    """The name of the weight that differs most."""
    apart = {
        name: (value.double() - theirs[name].double()).norm().item()
        for name, value in ours.items()
        if not OF_A_RANK.search(name)
    }
    return max(apart, key=apart.get)


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("--steps", type=flags.positive_int, default=12, help="steps of each run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep outputs and checkpoints")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command that starts the script"
    )
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
        proof = Proof(command, args.steps, folder, keep=args.keep is not None)
        prove(proof)
    print(f"\n{time.monotonic() - began:.0f} s")
    for each in proof.explanations():
        print(f"{each} (docs/prove.md)")
    return 1 if proof.wrong or proof.wrong_in_check else 0


if __name__ == "__main__":
    with plain_exits():
        sys.exit(main())
