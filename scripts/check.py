"""Check any distributed script: is each sample used once, are the gradients averaged?

    python scripts/check.py torchrun --nproc-per-node=2 train.py --epochs 3
    python scripts/check.py horovodrun -np 2 python train.py --epochs 3

The script is not edited. It first runs as it is, except that long passes over its data are cut
short. Then it runs for a few steps at a time: with each rank's share of the data, with all ranks'
data on each rank, and on one process. The table lists what is wrong, with the line of minimal/ that
does it right; what to look at; and what could not be checked. Files that the script overwrites with
torch.save are restored. docs/prove.md explains each row. Exits with status 1 if something is wrong.
"""

import argparse
import contextlib
import itertools
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

from common.errors import InputError
from scripts.findings import Finding, Seen, differ, flat, look, not_seen, rows, trains, wrong

HOOKS = ROOT / "scripts" / "hooks"
# How far updates on shares may differ from updates on the samples of all ranks: correct scripts
# differ by 1e-6. Adam divides by gradients, and the smallest ones are mostly rounding errors.
ROUNDING = 2e-3
ROUNDING_OF_ADAM = 3e-2
ROUNDING_IN_16_BITS = 0.1
# The status of a run that took too long, as the timeout command returns it.
TOO_LONG = 124


class Runs:
    """Runs a command several times, each time in a mode of check_hooks.py."""

    def __init__(self, command: list[str], folder: Path):
        self.command = command
        self.folder = folder
        self.limit = None
        self.status = 0
        # The batches that a run of each mode reads in place of its own.
        self.batches = {}
        # Folders that a run has created to save in.
        self.new_folders = set()

    def __call__(self, name: str, mode: str, command: list[str] | None = None) -> Seen:
        folder = self.folder / name
        folder.mkdir()
        for each, batches in self.batches.items():
            (folder / f"batches-{each}.json").write_text(json.dumps(batches))
        path = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")]))
        more = {"PYTHONPATH": path, "CHECK": str(folder), "CHECK_MODE": mode}
        # torch.compile changes how a step is computed, not the result.
        more["TORCHDYNAMO_DISABLE"] = "1"
        began = time.monotonic()
        try:
            with open(folder / "output", "w") as output:
                self.status = start(command or self.command, more, output, self.limit)
        finally:
            self.put_files_back(folder)
        if self.limit is None:
            self.limit = 60 + 3 * (time.monotonic() - began)
        return Seen(folder)

    def put_files_back(self, folder: Path) -> None:
        """Restore the files that the run overwrote, and remove what it created."""
        for note in folder.glob("file-*.json"):
            file = json.loads(note.read_text())
            self.new_folders |= set(file["new folders"])
            if file["existed"]:
                os.replace(note.with_suffix(".old"), file["path"])
            else:
                Path(file["path"]).unlink(missing_ok=True)
        # Even if this run did not save: the next one should start like the first.
        for new in self.new_folders:
            shutil.rmtree(new, ignore_errors=True)

    def said(self, name: str) -> str:
        """Why the last run failed: the line with its error, or else the last line."""
        if self.status == TOO_LONG:
            return f"it took longer than {self.limit:.0f} s"
        lines = (self.folder / name / "output").read_text(errors="replace").splitlines()
        named = re.compile(r"(\[rank\d+\]: )?(\w+\.py|[\w.]*(Error|Exception)): ")
        errors = [line for line in lines if named.match(line) and "elastic" not in line]
        return (errors or lines or ["it printed nothing"])[-1].strip()


def start(command: list[str], more: dict, output, limit: float | None) -> int:
    """Run a command in a new session; kill whatever is left of it, and return its status."""
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **more},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"{command[0]}: {error.strerror}") from None
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return TOO_LONG
    finally:
        if process.poll() is None:
            # SIGTERM first: launchers then end their ranks.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def on_one_process(command: list[str]) -> list[str] | None:
    """The command for one process; None if no option before the script sets their number."""
    number = re.compile(r"(--nproc[-_]per[-_]node|--nproc|--ntasks|--np|-np|-n)(=\d+)?$")
    for place, word in enumerate(command):
        # The words after the script are its flags.
        is_module = place > 0 and command[place - 1] == "-m"
        is_launcher = word.startswith("torch.distributed.")
        if word.endswith(".py") or (is_module and not is_launcher):
            break
        if found := number.match(word):
            if found[2]:
                return [*command[:place], f"{found[1]}=1", *command[place + 1 :]]
            if command[place + 1].isdecimal():
                return [*command[: place + 1], "1", *command[place + 2 :]]
    return None


# Compare runs.


def compare(runs: Runs, watched: Seen):
    """Run a few steps in several ways, and yield the findings."""
    share = runs("share", "share")
    if share.first is None:
        yield not_seen(
            f"training on shares of the data: a run without dropout failed: {runs.said('share')}"
        )
        return
    if share.several:
        yield from compare_updates(runs, watched, share)
    yield from compare_figures(runs, share)


def compare_updates(runs: Runs, watched: Seen, share: Seen):
    """Compare steps on shares with steps in which each rank gets the batches of all ranks."""
    text = "whether steps on shares match steps on the batches of all ranks"
    drawn = [step["states"] for step in share.of("step")[:3]]
    batches = batches_of_all(share)
    if not batches:
        yield not_seen(f"{text}: no map-style data set in a DataLoader")
        return
    if differ(drawn):
        yield not_seen(f"{text}: a step draws random numbers")
        return
    runs.batches["whole"] = batches
    runs("whole", "whole")
    if runs.status or not (runs.folder / "whole" / "whole-0.pt").exists():
        yield not_seen(f"{text}: the run on all batches failed: {runs.said('whole')}")
        return
    folders = runs.folder / "share", runs.folder / "whole"
    start, first, last = distances(*folders, list(share.ranks))
    if start > 1e-6:
        yield not_seen(f"{text}: the runs start with different weights")
        return
    apart = f"{first:.0e} of the first gradient, {last:.0e} of three updates"
    rounding, of_gradient = rounding_of(watched)
    if first < of_gradient and last < rounding:
        yield Finding("ok", f"steps on shares match steps on the batches of all ranks: {apart}")
        yield from compare_with_one(runs, share)
    elif any(step["gathers"] for step in share.of("step")[:3]):
        yield look(f"the update depends on how samples are shared, and a step gathers: {apart}")
    else:
        why = "a loss divided by the count of its rank, or over pairs of its own batch?"
        yield wrong(
            f"training on shares of a batch differs from training on it: {apart} ({why})", "wrapper"
        )


def rounding_of(watched: Seen) -> tuple[float, float]:
    """How far a correct script may be off: for updates, and for the first gradient."""
    first = watched.of("step")[0]
    if first["short"]:
        return ROUNDING_IN_16_BITS, ROUNDING_IN_16_BITS
    return (ROUNDING if first["kind"] == "SGD" else ROUNDING_OF_ADAM), ROUNDING


def batches_of_all(share: Seen) -> dict:
    """{place: {rank: batches}}: each rank gets the samples of all ranks, batch by batch."""
    found = {}
    for (loader, number), shares in share.passes().items():
        if trains(shares) and all(each["batches"] for each in shares.values()):
            aligned = zip(*(each["batches"] for each in shares.values()), strict=False)
            batches = [list(itertools.chain(*batches)) for batches in aligned]
            found[f"{loader} {number}"] = {str(rank): batches for rank in share.ranks}
    return found


def distances(ours: Path, theirs: Path, ranks: list[int]) -> tuple[float, float, float]:
    """How two runs differ: in their starts, their first gradients, and their updates."""
    import torch

    start = 0.0
    apart = {"gradients": 0.0, "end": 0.0}
    whole = {"gradients": 0.0, "end": 0.0}
    for rank in ranks:
        a = torch.load(next(ours.glob(f"*-{rank}.pt")))
        b = torch.load(next(theirs.glob(f"*-{rank}.pt")))
        for name, weight in a["start"].items():
            if weight.numel() and name in b["start"]:
                start = max(start, (weight - b["start"][name]).abs().max().item())
        for part in apart:
            for name in a[part].keys() & b[part].keys():
                begin = a["start"][name].double() if part == "end" else 0.0
                one, other = a[part][name].double(), b[part][name].double()
                apart[part] += (one - other).square().sum().item()
                whole[part] += (other - begin).square().sum().item()
    relative = [math.sqrt(apart[part] / whole[part]) if whole[part] else 0.0 for part in apart]
    return start, *relative


def compare_with_one(runs: Runs, share: Seen):
    """Compare the first gradient of all ranks with one process: is it a sum, not an average?"""
    command = on_one_process(runs.command)
    if command is None:
        yield not_seen(
            "whether gradients are averaged or summed: the command sets no number of processes"
        )
        return
    runs.batches["one"] = runs.batches["whole"]
    one = runs("one", "one", command)
    if one.first is None or not (runs.folder / "one" / "one-0.pt").exists():
        yield not_seen(
            f"whether gradients are averaged or summed: one process failed: {runs.said('one')}"
        )
        return
    ratio, rest = ratio_of_gradients(runs.folder, len(share.ranks))
    ranks = len(share.ranks)
    rates = share.of("step")[0]["rates"], one.of("step")[0]["rates"]
    rate_is_scaled = rates[1][0] and math.isclose(rates[0][0] / rates[1][0], ranks, rel_tol=0.01)
    if rest < ROUNDING and math.isclose(ratio, ranks, rel_tol=0.01):
        text = f"the gradient is the sum of {ranks} ranks, not their average"
        if rate_is_scaled:
            yield wrong(f"{text}, and the rate is {ranks} times as high, too", "average")
        else:
            yield look(f"{text}: as if the rate were {ranks} times as high", "average")
    elif rest < ROUNDING and math.isclose(ratio, 1 / ranks, rel_tol=0.01):
        text = f"the gradient is 1/{ranks} of that of one process with the same samples"
        yield look(f"{text}: a loss that is a sum, and is averaged over ranks?", "average")
    elif rest > ROUNDING_IN_16_BITS or (rest > ROUNDING and not one.of("step")[0]["short"]):
        yield look(f"the first gradient differs from that of one process by {rest:.0e}", "average")


def ratio_of_gradients(folder: Path, ranks: int) -> tuple[float, float]:
    """The first gradient of all ranks over that of one process, and the relative residual."""
    import torch

    several = [torch.load(folder / "share" / f"share-{rank}.pt") for rank in range(ranks)]
    one = torch.load(folder / "one" / "one-0.pt")["gradients"]
    pairs = []
    for name, gradient in one.items():
        if name not in several[0]["gradients"]:
            continue
        other = several[0]["gradients"][name]
        # FSDP cuts along the first dimension.
        if other.shape != gradient.shape:
            other = torch.cat([each["gradients"][name] for each in several])
        if other.shape == gradient.shape:
            pairs.append((other.double(), gradient.double()))
    product = sum((a * b).sum().item() for a, b in pairs)
    square = sum(b.square().sum().item() for _, b in pairs)
    ratio = product / square if square else 0.0
    rest = sum((a - ratio * b).square().sum().item() for a, b in pairs)
    norm = sum(a.square().sum().item() for a, _ in pairs)
    return ratio, math.sqrt(rest / norm) if norm else 0.0


def compare_figures(runs: Runs, share: Seen):
    """Evaluate the same samples in different batches, and compare the figures."""
    batches = other_batches(share)
    if not batches or not any(share.of_all("figure")):
        return
    runs.batches["regrouped"] = batches
    regrouped = runs("regrouped", "regrouped")
    changed = changed_figure(share, regrouped)
    if runs.status or changed is None:
        return
    # Ignore numbers that change from run to run anyway.
    again = runs("again", "share")
    if changed_figure(share, again) is None:
        text = "a figure of the evaluation depends on how its samples are put into batches"
        yield wrong(f"{text}: {changed} (a mean of the means of batches or ranks?)", "divide")


def other_batches(share: Seen) -> dict:
    """{place: {rank: batches}}: evaluations whose batches differ in size, regrouped."""
    found = {}
    for (loader, number), shares in share.passes().items():
        done = all(each["done"] and each["batches"] for each in shares.values())
        evaluates = any(each["evaluates"] for each in shares.values())
        if trains(shares) or not evaluates or not done:
            continue
        sizes = [len(batch) for each in shares.values() for batch in each["batches"]]
        if not differ(sizes):
            continue
        totals = {rank: len(flat(each)) for rank, each in shares.items()}
        rest = {rank: list(itertools.chain(*each["batches"])) for rank, each in shares.items()}
        # If the script copes with unequal shares, also move samples between them.
        if differ(totals.values()):
            first, last = min(rest), max(rest)
            moved = len(rest[first]) // 4
            rest[last] += rest[first][:moved]
            rest[first] = rest[first][moved:]
        found[f"{loader} {number}"] = {
            str(rank): regroup(rest[rank], len(each["batches"])) for rank, each in shares.items()
        }
    return found


def regroup(samples: list, count: int) -> list[list]:
    """Regroup into `count` batches, the last of which has the most samples."""
    first = max(1, len(samples) // (count + 2))
    batches = [samples[start : start + first] for start in range(0, first * (count - 1), first)]
    return [*batches, samples[first * (count - 1) :]]


def changed_figure(ours: Seen, theirs: Seen) -> str | None:
    """The first figure that differs, in words; None if none does, or if their count varies."""
    for rank in ours.ranks:
        if rank not in theirs.ranks:
            return None
        # Only ranks that print: after a reduce() to rank 0, other ranks' numbers mean nothing.
        if not any(isinstance(figure["value"], str) for figure in ours.of("figure", rank)):
            continue
        a, b = numbers(ours.of("figure", rank)), numbers(theirs.of("figure", rank))
        if len(a) != len(b):
            return None
        for (one, unit), (other, _) in zip(a, b, strict=True):
            if abs(one - other) > max(2 * unit, 1e-5 * abs(one)):
                return f"{one:.6g} becomes {other:.6g}"
    return None


def numbers(figures: list[dict]) -> list[tuple[float, float]]:
    """(number, value of its last digit) of figures, without integers: they may count batches."""
    found = []
    for figure in figures:
        if isinstance(figure["value"], float):
            found.append((figure["value"], 0.0))
            continue
        for text in re.findall(r"-?\d+\.\d+(?:e[-+]?\d+)?", figure["value"]):
            digits = len(text.partition("e")[0].partition(".")[2])
            exponent = int(text.partition("e")[2] or 0)
            found.append((float(text), 10.0 ** (exponent - digits)))
    return found


def check(runs: Runs, with_comparison: bool) -> list[Finding]:
    seen = runs("watch", "watch")
    status = runs.status
    if seen.first is None:
        raise InputError(f"no optimizer step was seen: {runs.said('watch')}")
    found = []
    if status:
        found.append(wrong(f"the script ends with status {status}: {runs.said('watch')}"))
    found += rows(seen)
    if with_comparison and not any("different weights" in finding.text for finding in found):
        found += compare(runs, seen)
    # If shares are not added up, figures depend on the batches anyway: one finding is enough.
    if any("nothing adds them up" in finding.text for finding in found):
        found = [finding for finding in found if "how its samples are put" not in finding.text]
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-comparison", action="store_true", help="run the script only once")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command that starts the script"
    )
    args = parser.parse_args()
    if not args.command:
        raise InputError("give the command that starts the script, such as: torchrun train.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = check(Runs(args.command, Path(folder)), not args.no_comparison)
    print("| verdict | what | right in |\n| --- | --- | --- |")
    order = ["wrong", "look", "not seen", "ok"]
    for finding in sorted(found, key=lambda finding: order.index(finding.verdict)):
        print(finding.row())
    print(f"\n{time.monotonic() - began:.0f} s: {shlex.join(args.command)}")
    return 1 if any(finding.verdict == "wrong" for finding in found) else 0


if __name__ == "__main__":
    # As commands.plain_exits(), whose module would import torch.
    try:
        sys.exit(main())
    except InputError as error:
        print(f"check.py: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
