"""Find mistakes in the events that scripts/hooks/check_hooks.py wrote, for scripts/check.py.

Each function of ROWS looks at one thing, and yields a Finding for what is wrong or worth a look.
"""

import collections
import itertools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The line of minimal/ that does it right: a file, and a part of the line.
RIGHT = {
    "broadcast": ("hvd.py", "hvd.broadcast_parameters(model.state_dict()"),
    "wrapper": ("ddp_launch.py", "logits = ddp_model("),
    "backward": ("ddp_launch.py", "optimizer.zero_grad()"),
    "optimizer": ("fsdp.py", "optimizer = torch.optim.SGD("),
    "rate": ("ddp_launch.py", "optimizer = torch.optim.SGD("),
    "seed": ("fsdp.py", "torch.manual_seed(0)"),
    "sampler": ("ddp_launch.py", "sampler = DistributedSampler("),
    "set_epoch": ("ddp_launch.py", "sampler.set_epoch(epoch)"),
    "share": ("ddp_launch.py", "share = range("),
    "sum": ("ddp_launch.py", "dist.all_reduce(correct)"),
    "buffers": ("ddp_launch.py", "dist.broadcast(buffer"),
    "eval": ("ddp_launch.py", "model.eval()"),
    "train": ("ddp_launch.py", "model.train()"),
    "full": ("fsdp.py", "options = StateDictOptions(full_state_dict=True"),
    "save": ("ddp_launch.py", "torch.save("),
    "average": ("hvd.py", "hvd.DistributedOptimizer("),
    "divide": ("ddp_launch.py", "return correct.item() /"),
}


@dataclass
class Finding:
    """A row: a verdict (wrong, look, not seen or ok), a sentence, and a key of RIGHT."""

    verdict: str
    text: str
    right: str = ""

    def row(self) -> str:
        where = line_of(*RIGHT[self.right]) if self.right else ""
        return f"| {self.verdict} | {self.text} | {where} |"


def wrong(text: str, right: str = "") -> Finding:
    return Finding("wrong", text, right)


def look(text: str, right: str = "") -> Finding:
    return Finding("look", text, right)


def not_seen(text: str) -> Finding:
    return Finding("not seen", text)


def line_of(name: str, text: str) -> str:
    """file:line of the first line in minimal/`name` with this text."""
    lines = (ROOT / "minimal" / name).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f"minimal/{name}:{number}"


def names(some) -> str:
    """The first three names, without the numbers that check_hooks.py adds."""
    some = [re.sub(r"^\d+\.\d+:", "", name) for name in some]
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else "")


class Seen:
    """The events that the processes of a run wrote."""

    def __init__(self, folder: Path):
        self.ranks = {}
        self.workers = []
        for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
            events = [json.loads(line) for line in path.read_text().splitlines()]
            if any(event["event"] in ("step", "pass") for event in events):
                self.ranks.setdefault(events[-1]["rank"], []).extend(events)
            self.workers += [event for event in events if event["event"] == "random"]
        self.ranks = dict(sorted(self.ranks.items()))
        self.first = next((rank for rank in self.ranks if self.of("step", rank)), None)
        self.several = len(self.ranks) > 1

    def of(self, kind: str, rank: int | None = None) -> list[dict]:
        """The events of a kind, of `rank` or else of the first rank that trains."""
        events = self.ranks[self.first if rank is None else rank]
        return [event for event in events if event["event"] == kind]

    def of_all(self, kind: str) -> list[list[dict]]:
        return [self.of(kind, rank) for rank in self.ranks]

    def aligned(self, kind: str):
        """Yield the first event of each rank, then the second of each, ..."""
        return zip(*self.of_all(kind), strict=False)

    def passes(self) -> dict:
        """{(loader, number): {rank: pass}} in the order of the passes."""
        found = {}
        for rank in self.ranks:
            for event in self.of("pass", rank):
                found.setdefault(tuple(event["place"]), {})[rank] = event
        return found


def differ(values) -> bool:
    return len({str(value) for value in values}) > 1


# Rows: each function yields its findings; ROWS has the text of a row without findings.


def weights(seen: Seen):
    """All ranks hold the same weights; each weight gets a gradient and is in an optimizer."""
    sharded = seen.of("step")[0]["sharded"]
    if seen.several and not sharded:
        yield from itertools.islice(different_weights(seen), 1)
    steps = [steps for steps in seen.of_all("step") if steps]
    if len(steps) < len(seen.ranks):
        yield wrong(f"{len(seen.ranks) - len(steps)} of {len(seen.ranks)} ranks take no step")
    for number in sorted({step["optimizer"] for step in steps[0]}):
        yield from gradients_of(number, steps)
    for event in seen.of("lost"):
        if event["nested"]:
            text = "used in a model, but in no optimizer (a list instead of ModuleList?)"
            yield wrong(f"{text}: {names(event['names'])}", "optimizer")
        else:
            yield look(f"used in training, but in no optimizer: {names(event['names'])}")
    rates = [[step["rates"] for step in line] for line in steps_in_common(seen)]
    if any(map(differ, rates)):
        yield wrong("the ranks train with different rates", "rate")
    shards = [events[0]["crc"] for events in seen.of_all("shard") if events]
    if differ(shards):
        yield wrong("the ranks shard models with different weights: use the same seed", "seed")


def steps_in_common(seen: Seen) -> list[tuple]:
    """The steps that all ranks take in common, up to the first one that differs."""

    def is_same(line):
        return not differ((step["step"], step["trains"]) for step in line)

    return list(itertools.takewhile(is_same, seen.aligned("step")))


def different_weights(seen: Seen):
    lines = steps_in_common(seen)
    for position, line in enumerate(lines):
        begin = different_names([step["before"] for step in line])
        end = different_names([step["after"] for step in line])
        if not (begin or end):
            continue
        number = line[0]["step"]
        unlike = different_names([step["gradients"] for step in line])
        if all(name.endswith("of no module") for name in begin or end):
            why, right = "was the optimizer made before the model was changed?", "optimizer"
        elif begin and number == 1:
            why, right = "rank 0's were not broadcast", "broadcast"
        elif begin:
            why, right = "they change between two steps", "buffers"
        elif unlike:
            why, right = f"the gradients of {names(unlike)} were not averaged", "wrapper"
        else:
            why, right = "the gradients are the same: do rates, decays or states differ?", "rate"
        when = f"{'before' if begin else 'after'} step {number}"
        text = f"the ranks hold different weights {when}: {names(begin or end)}"
        again = [
            later[0]["step"]
            for later in lines[position + 1 :]
            if not different_names([step["before"] for step in later])
        ]
        if again:
            yield look(f"{text}, but the same before step {again[0]}: averaged on purpose?")
        else:
            yield wrong(f"{text} ({why})", right)


def different_names(found: list[dict]) -> list[str]:
    """The names whose values are not the same in all of these."""
    return [name for name in found[0] if differ(each.get(name) for each in found)]


def gradients_of(number: int, steps_of_ranks: list[list[dict]]):
    """Whether the weights of an optimizer get gradients, and change."""
    steps = [step for steps in steps_of_ranks for step in steps if step["optimizer"] == number]
    if len(steps) < 3 * len(steps_of_ranks):
        return
    every = list(steps[0]["gradients"])
    dead = [name for name in every if not any(step["gradients"].get(name) for step in steps)]
    if every and len(dead) == len(every):
        of_no_module = all(name.endswith("of no module") for name in every)
        if of_no_module:
            why = "they belong to no model: was it made before the model was wrapped or moved?"
        else:
            why = "zero_grad() after backward(), detach() or no_grad()?"
        yield wrong(f"no weight of optimizer {number + 1} ever got a gradient: {why}", "backward")
    elif dead:
        yield look(f"no gradient in any of {len(steps)} steps: {names(dead)}")
    if any(step["stale"] for step in steps):
        yield wrong("a gradient still contains earlier steps: call zero_grad()", "backward")
    moved = any(step["before"] != step["after"] for step in steps)
    if not moved and len(dead) < len(every):
        rates = {rate for step in steps for rate in step["rates"]}
        rate = ": its rate is 0" if rates == {0.0} else ""
        yield wrong(f"no weight of optimizer {number + 1} changes{rate}", "rate")


def clipping(seen: Seen):
    """Gradients are clipped by the norm of the averaged, unscaled gradients."""
    if seen.several and any(
        differ(f"{clip['norm']:.4g}" for clip in line) for line in seen.aligned("clip")
    ):
        yield wrong("each rank clips by its own norm: clip after averaging")
    if any(step["scaled"] for step in seen.of("step")):
        yield wrong("steps with scaled gradients: call scaler.step(optimizer), which unscales them")
    elif any(clip["scaled"] for clip in seen.of("clip")):
        yield wrong("clips scaled gradients: call scaler.unscale_(optimizer) first")


def training_data(seen: Seen):
    """Each pass has its own order, and each of its samples goes to one rank."""
    passes = {place: shares for place, shares in seen.passes().items() if trains(shares)}
    if not any(share["batches"] for shares in passes.values() for share in shares.values()):
        yield not_seen("which samples are trained on: no map-style data set in a DataLoader")
    if is_alike(seen):
        verdict = look if seen.of("step")[0]["parallel"] else wrong
        yield verdict("each rank's model gets the same input in each step", "sampler")
    told = set()
    for (loader, _), shares in passes.items():
        finding = loader not in told and seen.several and shares_of_pass(loader, shares)
        if finding:
            told.add(loader)
            yield finding
    for (_, shares), (_, following) in passes_in_a_row(passes):
        rank = min(shares)
        if rank in following and (finding := orders(shares[rank], following[rank])):
            yield finding
            break
    for share in itertools.chain(*(shares.values() for shares in passes.values())):
        # Workers take turns, so equal batches follow each other.
        same = sum(one == other for one, other in itertools.pairwise(share["inputs"]))
        if same > 1 and 2 * same + 2 >= len(share["inputs"]):
            yield wrong(f"loader {share['place'][0] + 1}: its workers yield the same batches")
            break
    yield from undivided_accumulation(seen)


def trains(shares: dict) -> bool:
    return any(share["trains"] for share in shares.values())


def loaders_that_train(seen: Seen) -> set[int]:
    return {place[0] for step in seen.of("step") for place in step["trains"]}


def flat(share: dict) -> list[str]:
    """The samples of a pass."""
    return [str(index) for batch in share["batches"] or [] for index in batch]


def is_alike(seen: Seen) -> bool:
    """Whether the models of all ranks get the same inputs."""
    by_step = [{event["step"]: event["crc"] for event in events} for events in seen.of_all("input")]
    common = set.intersection(*map(set, by_step)) if by_step else set()
    same = [not differ(inputs[step] for inputs in by_step) for step in common]
    return seen.several and len(same) > 1 and all(same)


def shares_of_pass(loader: int, shares: dict) -> Finding | None:
    """What is wrong with the ranks' shares of a pass, or None."""
    length = next(iter(shares.values()))["length"]
    each = [flat(share) for share in shares.values()]
    samples = sum(map(len, each))
    different = len(set(itertools.chain(*each)))
    done = all(share["done"] for share in shares.values())
    # Samples drawn with replacement, or from a stream that starts again.
    repeats = any(len(set(share)) < len(share) for share in each)
    if not length or len(each) < 2 or not samples or repeats:
        return None
    is_partition = done and different == min(length, samples) and max(map(len, each)) < length
    if differ(share["content"] for share in shares.values()):
        if is_partition:
            text = f"the ranks share the indices of loader {loader + 1}, but not its samples"
            return wrong(f"{text}: shuffled or split with different seeds?", "sampler")
        # Each rank may have its own files.
        return None
    if done and all(len(share) >= length for share in each):
        text = f"each rank reads all {length} samples in each pass over loader {loader + 1}"
        return wrong(f"{text}, not a share of them", "sampler")
    # DistributedSampler pads the shares to equal length.
    if samples - different > len(each):
        twice = f"{samples - different} of {samples} samples of a pass over loader {loader + 1}"
        return wrong(f"{twice} are read by two ranks", "sampler")
    if done and different < 0.9 * length:
        left = f"{length - different} of {length} samples"
        return look(f"a pass over loader {loader + 1} leaves out {left}", "sampler")
    return None


def passes_in_a_row(passes: dict):
    """Yield pairs of passes in a row: over one loader, or over the same data with a new one."""
    by_loader = collections.defaultdict(list)
    for place, shares in passes.items():
        by_loader[place[0]].append((place, shares))
    by_data = collections.defaultdict(list)
    for each in by_loader.values():
        yield from itertools.pairwise(each)
        if len(each) == 1:
            by_data[next(iter(each[0][1].values()))["data"]].append(each[0])
    for each in by_data.values():
        yield from itertools.pairwise(each)


def orders(share: dict, following: dict) -> Finding | None:
    first, second = flat(share), flat(following)
    if share["inputs"]:
        first, second = share["inputs"], following["inputs"]
    both = min(len(first), len(second))
    if both < 3 or first[:both] != second[:both]:
        return None
    passes = f"loader {share['place'][0] + 1}: two passes have the same order"
    numbers = [int(index) for index in first if str(index).isdigit()]
    if share["inputs"]:
        return look(f"{passes}: does the stream know the epoch, even in its workers?", "set_epoch")
    if share["shuffles"]:
        return wrong(f"{passes} (set_epoch?)", "set_epoch")
    is_sorted = numbers == sorted(numbers)
    return look(f"{passes}, {'that of the data' if is_sorted else 'of its own sampler'}", "sampler")


def undivided_accumulation(seen: Seen):
    """A step has several batches, whose gradients are summed, not averaged."""
    steps = seen.of("step")
    whole = [
        step
        for step in steps
        if step["batches"] > 1
        and step["backwards"] == step["batches"] == len(step["loss_gradients"])
        and not differ([1.0, *step["loss_gradients"]])
    ]
    if len(whole) > 1 and 2 * len(whole) > len(steps[:5]):
        count = whole[0]["batches"]
        yield look(f"the gradient of a step is the sum of {count} batches, not their average")


def evaluation_data(seen: Seen):
    """An evaluation counts each sample once, over all ranks."""
    loaders = loaders_that_train(seen)
    passes = {
        place: shares
        for place, shares in seen.passes().items()
        if place[0] not in loaders and any(share["evaluates"] for share in shares.values())
    }
    if not passes:
        yield not_seen("an evaluation: no separate DataLoader within no_grad()")
    told = set()
    for place, shares in passes.items():
        loader = place[0]
        if loader in told or not all(share["done"] for share in shares.values()):
            continue
        told.add(loader)
        yield from counted_samples(seen, loader, shares, samples_beside(place, passes))
    for place, shares in passes.items():
        if finding := not_added_up(seen, place, shares):
            yield finding
            break


def samples_beside(place: tuple, passes: dict) -> set[int]:
    """The samples of the same data that another loader reads in the same evaluation."""
    share = next(iter(passes[place].values()))
    others = [shares for other, shares in passes.items() if other[0] != place[0]]
    shares = itertools.chain(*(shares.values() for shares in others))
    same = [
        each for each in shares if (each["data"], each["step"]) == (share["data"], share["step"])
    ]
    return {sample for each in same for sample in each["samples"]}


def counted_samples(seen: Seen, loader: int, shares: dict, beside: set[int]):
    length = next(iter(shares.values()))["length"]
    each = [flat(share) for share in shares.values()]
    different = len(set(itertools.chain(*each)))
    samples = sum(map(len, each))
    whole = all(len(share) >= length for share in each) if length else True
    if length and whole and len(each) > 1:
        yield from cut_shares(loader, shares)
    if not length or whole:
        return
    left_out = length - different - len(beside)
    if left_out > 0:
        left = f"{left_out} of {length} samples"
        yield wrong(f"the evaluation on loader {loader + 1} leaves out {left}", "share")
    if different < samples:
        text = f"the evaluation on loader {loader + 1} reads {samples - different} samples twice"
        if any(event["gathers"] for event in seen.of("end")):
            yield look(f"{text}: are they cut off once they are gathered?", "share")
        else:
            yield wrong(f"{text}, and they count twice", "share")


def cut_shares(loader: int, shares: dict):
    """Check the shares if each rank has its own data set, a part of a common one."""
    read = set(itertools.chain(*(share["samples"] for share in shares.values())))
    left = next(iter(shares.values()))["of"] - len(read)
    if 0 < left < len(shares):
        yield wrong(
            f"the shares of loader {loader + 1}, for evaluation, leave out {left} samples", "share"
        )


def not_added_up(seen: Seen, place: tuple, shares: dict) -> Finding | None:
    """Whether each rank evaluates a share, and no collective follows."""
    rank = min(shares)
    length = shares[rank]["length"]
    is_share = length and len(shares) > 1 and len(flat(shares[rank])) < length
    if not is_share:
        return None
    events = seen.ranks[rank]
    at = events.index(shares[rank])
    after = [event for event in events[at:] if event["event"] in ("step", "end")]
    if not after or after[0]["reductions"] + after[0]["gathers"] > shares[rank]["before"]:
        return None
    text = f"each rank evaluates a share of loader {place[0] + 1}, and nothing adds them up"
    return wrong(f"{text}: rank 0's figures are those of its own share", "sum")


def modes(seen: Seen):
    """Evaluations are in evaluation mode, and training continues in training mode."""
    loaders = loaders_that_train(seen)
    events = [event for event in seen.of("mode") if event["passes"]]
    for event in events:
        in_training = any(place[0] in loaders for place in event["passes"])
        if event["training"] and event["root"] and not in_training:
            what = "BatchNorm" if event["norm"] else "dropout"
            yield wrong(f"evaluates with {what} in training mode: call model.eval()", "eval")
            break
    trained = [
        event
        for event in events
        if event["gradient"] and any(place[0] in loaders for place in event["passes"])
    ]
    began = {event["model"]: event["step"] for event in reversed(trained) if event["training"]}
    off = [event for event in trained if not (event["training"] or event["root"])]
    if any(event["step"] > began.get(event["model"], math.inf) for event in off):
        yield wrong(
            "continues to train in evaluation mode after an evaluation: call model.train()", "train"
        )
    yield from statistics(seen)
    yield from evaluated_weights(seen)


def evaluated_weights(seen: Seen):
    """Whether the weights that are evaluated are those that are trained and saved."""
    loaders = loaders_that_train(seen)
    events = [
        event
        for event in seen.of("weights")
        if event["crc"] and event["passes"] and event["passes"][0][0] not in loaders
    ]
    steps = sorted({event["step"] for event in events if event["step"]})
    trained = any(step["before"] != step["after"] for step in seen.of("step"))
    if (
        len(steps) > 1
        and trained
        and all(
            event["crc"] == first["crc"]
            for event in events
            for first in events
            if event["model"] == first["model"] and event["step"] and first["step"]
        )
    ):
        yield wrong("the weights that are evaluated are not those that are trained", "eval")
    sharded = seen.of("step")[0]["sharded"]
    for save in [] if sharded else seen.of("save"):
        evaluated = [event["crc"] for event in events if event["step"] == save["step"]]
        if save["crc"] and evaluated and not set(save["crc"]) & set(itertools.chain(*evaluated)):
            yield look("the evaluated weights are in no saved file", "save")
            return


def statistics(seen: Seen):
    loaders = loaders_that_train(seen)
    for line in seen.aligned("statistics"):
        passes = line[0]["passes"]
        evaluated = passes and all(place[0] not in loaders for place in passes)
        same_pass = not differ(event["passes"] for event in line)
        if seen.several and evaluated and same_pass and differ(event["crc"] for event in line):
            text = "each rank evaluates with its own BatchNorm statistics"
            yield wrong(f"{text}: broadcast rank 0's, which are saved", "buffers")
            return


def random_numbers(seen: Seen):
    """Each rank draws its own dropout, and each pass its own augmentation."""
    draws = [{event["at"]: event["crc"] for event in events} for events in seen.of_all("draws")]
    same = seen.several and draws[0] and all(each == draws[0] for each in draws)
    if same and not is_alike(seen) and not seen.of("step")[0]["parallel"]:
        yield wrong("all ranks draw the same dropout: seed by rank once the model is built", "seed")
    elif not seen.workers:
        yield from draws_of_steps(seen)
    by_place = collections.defaultdict(list)
    for event in seen.workers:
        by_place[event["rank"], event["worker"]].append(str(event["states"]))
    if any(len(set(states)) < len(states) for states in by_place.values()):
        text = "a data set draws the same random numbers in two passes"
        yield wrong(f"{text}: a worker_init_fn with a constant seed?", "seed")
    pairs = itertools.combinations(by_place, 2)
    if any(a[0] != b[0] and set(by_place[a]) & set(by_place[b]) for a, b in pairs):
        yield wrong("the data sets of two ranks draw the same random numbers: seed by rank", "seed")


def draws_of_steps(seen: Seen):
    """Whether steps draw random numbers, and these are the same on all ranks."""
    lines = steps_in_common(seen)[:5]
    # Only the first pass: the start of a pass draws random numbers, too.
    lines = [line for line in lines if line[0]["trains"] == lines[0][0]["trains"]]
    if not seen.several or not lines:
        return
    for generator in range(len(lines[0][0]["states"])):
        states = [[step["states"][generator] for step in line] for line in lines]
        draws = differ(of_ranks[0] for of_ranks in states)
        if draws and not any(map(differ, states)):
            yield look("all ranks draw the same random numbers in a step: seed by rank", "seed")
            return


def files(seen: Seen):
    """One rank saves, and the file can be resumed from, and loaded without the wrapper."""
    saves = [{event["path"] for event in events} for events in seen.of_all("save")]
    writers = collections.Counter(itertools.chain(*saves))
    for path, count in writers.items():
        if count > 1:
            yield wrong(f"{count} ranks write {os.path.basename(path)}", "save")
    saves = list(itertools.chain(*seen.of_all("save")))
    if len(writers) == 1 and seen.several and any(event["shards"] for event in saves):
        yield wrong("only one rank saves, and only its own shards", "full")
    if any(event["prefix"] for event in saves):
        yield look("saves names with the wrapper's prefix, module.", "save")
    if saves and not any(event["resumes"] for event in saves):
        yield look("no saved file has an optimizer's state: training cannot resume")
    for event in seen.of("nothing loaded")[:1]:
        counts = f"{event['missing']} of {event['of']} tensors"
        yield wrong(f"load_state_dict(strict=False) left {counts} as they were: different names?")


def waits(seen: Seen):
    """Whether steps read a tensor's value, for which Python waits for the GPU."""
    last = seen.of("step")[-1]
    often = [place for place, count in last["waits"].items() if 2 * count > last["step"]]
    if often:
        yield look(f"waits for the GPU in each step: {names(often)} reads a tensor's value")


def privates(seen: Seen):
    """What the hooks cannot see in this version of torch."""
    for event in seen.of("not seen"):
        yield not_seen(
            f"{event['rows']}: this version of torch is not supported ({event['error']})"
        )


ROWS = {
    weights: "all ranks hold the same weights; each weight gets a gradient and is in an optimizer",
    clipping: "",
    training_data: "each pass has a new order, and each sample goes to one rank",
    evaluation_data: "an evaluation reads each sample once, and its figures cover all ranks",
    modes: "trains in training mode, evaluates in evaluation mode",
    random_numbers: "ranks, passes and workers draw different random numbers",
    files: "no file is written by two ranks",
    waits: "",
    privates: "",
}


def rows(seen: Seen):
    """Yield the findings of all rows."""
    for function, ok in ROWS.items():
        found = list(function(seen))
        if ok and not found:
            found = [Finding("ok", ok)]
        yield from found
