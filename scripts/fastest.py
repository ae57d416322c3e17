"""Find the fastest way to train with a recipe on this machine.

    python scripts/fastest.py mnist/single.py
    python scripts/fastest.py imagenet/ddp_amp.py --synthetic 100000 --model resnet18 -b 32

Flags after the recipe are the recipe's own. Each trial starts a recipe of that folder as you would,
lets it train for a few seconds, and ends it. It tries precisions with memory formats, then, with
the fastest of them, --compile, processes and threads, and loaders. All trials train the same: the
global batch and the rate stay those of the default. At the end the default and the two fastest take
turns, and the ratio of the medians is what you can expect of a long run. The machine should be
otherwise idle.
"""

import itertools
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import torch

from common import devices, flags
from common.errors import InputError, RunError
from scripts.commands import Command, logged, plain_exits

RECIPES = ("single.py", "ddp_launch.py", "ddp_amp.py")
# No trial takes longer than this many seconds.
PATIENCE = 120
# Roughly the number of trials before the final turns: it depends on what they find.
TRIALS = 12
# A flag is called slower below this ratio; nearer to 1 it may be noise.
SLOWER = 0.95
# Below this ratio a trial ends at its first line.
HOPELESS = 0.25


@dataclass(frozen=True)
class Setting:
    """How a recipe is started; None is the recipe's own default."""

    precision: str
    processes: int
    threads: int | None = None
    tf32: bool = True
    channels_last: bool = False
    compile: bool = False
    cuda_graph: bool = False
    workers: int | None = None
    loader: str | None = None

    def command(self, folder: Path, given: list[str]) -> str:
        """The line that starts it, as typed into a shell; `given` are further flags.

        single.py stands for ddp_launch.py in one process: they compute the same.
        """
        words = []
        if self.threads:
            words.append(f"OMP_NUM_THREADS={self.threads}")
        if not self.tf32:
            words.append("NVIDIA_TF32_OVERRIDE=0")
        mixed = self.precision in ("bf16", "fp16")
        if mixed:
            script = "ddp_amp.py"
        elif self.processes == 1:
            script = "single.py"
        else:
            script = "ddp_launch.py"
        if script == "single.py":
            words.append("python")
        else:
            words += ["torchrun", "--standalone", f"--nproc-per-node={self.processes}"]
        words += [str(folder / script), *given]
        if mixed:
            words += ["--amp-dtype", self.precision]
        if self.channels_last:
            words.append("--channels-last")
        if self.compile:
            words.append("--compile")
        if self.cuda_graph:
            words.append("--cuda-graph")
        if self.workers is not None:
            words += ["--workers", str(self.workers)]
        if self.loader is not None:
            words += ["--loader", self.loader]
        return shlex.join(words)

    def difference(self, other: "Setting") -> str:
        """How this setting differs from `other`, in words."""
        words = []
        if self.precision != other.precision:
            words.append(self.precision)
        if self.tf32 != other.tf32:
            words.append("no TF32")
        if self.channels_last != other.channels_last:
            words.append("--channels-last" if self.channels_last else "no --channels-last")
        if self.compile != other.compile:
            words.append("--compile" if self.compile else "no --compile")
        if self.cuda_graph != other.cuda_graph:
            words.append("--cuda-graph" if self.cuda_graph else "no --cuda-graph")
        if (self.processes, self.threads) != (other.processes, other.threads):
            threads = f", OMP_NUM_THREADS={self.threads}" if self.threads else ""
            words.append(f"processes: {self.processes}{threads}")
        if self.workers != other.workers:
            words.append(f"--workers {self.workers}")
        if self.loader != other.loader:
            words.append(f"--loader {self.loader}")
        return " ".join(words)


@dataclass
class Trial:
    """The result of a setting: samples/s, GiB or NaN, seconds from command to first line."""

    speed: float
    memory: float
    start: float
    config: dict


def trained(events: list[dict]) -> tuple[float, float]:
    """(samples, seconds) between the training lines of the log, from the first one on.

    A line has the average speed since its epoch began, which gives the time since then.
    """
    samples = 0
    seconds = 0.0
    for before, after in itertools.pairwise(events):
        if before["epoch"] == after["epoch"]:
            samples += after["samples"] - before["samples"]
            seconds += time_of(after) - time_of(before)
    return samples, seconds


def time_of(event: dict) -> float:
    """The seconds from the start of an event's epoch to the event."""
    return event["samples"] / event["perf/samples_per_sec"]


def gpu_memory() -> float:
    """The GiB in use on the fullest GPU of this machine; NaN if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return max(map(float, done.stdout.split())) / 1024
    # AMD's driver has no nvidia-smi. Some GPUs share the CPU's memory, and report [N/A].
    except (OSError, subprocess.CalledProcessError, ValueError):
        return math.nan


def run(
    line: str, seconds: float, interval: int | None, on_gpu: bool, hopeless: float = 0
) -> Trial:
    """Train for `seconds`, and log every `interval` steps (None: as often as the recipe does).

    If it makes less than `hopeless` samples/s, its first line is enough. Raises InputError or
    RunError with the last line that the command printed.
    """
    line += " --log-seconds 0.3 --max-steps 1000000000"
    if interval:
        line += f" --log-interval {interval}"
    with tempfile.TemporaryDirectory() as folder:
        log_dir = Path(folder, "log")
        with Command(f"{line} --log-dir {log_dir}") as command:
            first_line = wait_for_steps(command, log_dir, seconds, hopeless)
            used = gpu_memory() if on_gpu else 0
            failed = command.has_ended()
        if failed:
            kind = InputError if command.status == InputError.status else RunError
            raise kind(command.last_words() or f"it ended with status {command.status}")
        steps = logged(log_dir, "step")
        if not steps:
            raise RunError(f"no step in {PATIENCE} s")
        memory = used if on_gpu else command.gib
        return Trial(speed_of(steps), memory, first_line, logged(log_dir, "start")[0]["config"])


def speed_of(steps: list[dict]) -> float:
    """samples/s between the training lines; a single line includes the warm-up."""
    samples, seconds = trained(steps)
    return samples / seconds if samples else steps[-1]["perf/samples_per_sec"]


def wait_for_steps(command, log_dir, seconds, hopeless):
    """Wait until it has trained for `seconds` or ended; return the seconds to its first line."""
    first_line = None
    while not command.has_ended() and time.perf_counter() - command.began < PATIENCE:
        time.sleep(0.1)
        steps = logged(log_dir, "step")
        if not steps:
            continue
        first_line = first_line or time.perf_counter() - command.began
        _, done = trained(steps)
        is_hopeless = steps[-1]["perf/samples_per_sec"] < hopeless
        if is_hopeless or done >= seconds:
            break
    return first_line


class Search:
    """The trials on this machine, of the recipes in a folder."""

    def __init__(self, args, given: list[str]):
        self.folder = args.recipe.parent
        self.given = given
        self.default = default_of(args)
        self.seconds = args.seconds
        self.on_gpu = on_gpu(args.device)
        self.interval = 1
        # Flags that keep the training the same on another number of processes.
        self.same_training = []
        self.trials = {}
        self.slower = []

    def command(self, setting: Setting) -> str:
        given = self.given
        if setting.processes != self.default.processes:
            given = [*given, *self.same_training]
        return setting.command(self.folder, given)

    def probe(self) -> dict:
        """Run the default briefly, to see how long a step takes; return its flags."""
        trial = run(self.command(self.default), 0.1, self.interval, self.on_gpu)
        config = trial.config
        batch = config["global_batch"]
        self.same_training = ["-G", str(batch), "--lr", repr(config["peak_lr"])]
        # Each logged step waits for the device, so with quick steps the recipe chooses when.
        self.interval = 1 if batch / trial.speed > 0.1 else None
        return config

    def run(self, setting: Setting, hopeless: float = 0) -> Trial:
        command = self.command(setting)
        return run(command, self.seconds, self.interval, self.on_gpu, hopeless)

    def measure(self, setting: Setting, hopeless: float = 0) -> None:
        """Run a trial, and print its row; raises InputError or RunError if it fails."""
        trial = self.run(setting, hopeless)
        self.trials[setting] = trial
        ratio = trial.speed / self.speed(self.default)
        name = setting.difference(self.default) or "default"
        memory = "-" if math.isnan(trial.memory) else f"{trial.memory:.1f}"
        cells = f"{trial.speed:,.0f} | {ratio:.2f} | {memory} | {trial.start:.0f}"
        print(f"| {name} | {cells} |", flush=True)

    def try_all(self, settings: list[Setting]) -> None:
        """Measure those that are new, and note which are slower than the fastest before them."""
        base = self.best()
        for setting in settings:
            if setting in self.trials:
                continue
            # The first line of a compiled model includes the compilation.
            hopeless = 0 if setting.compile else HOPELESS * self.speed(base)
            try:
                self.measure(setting, hopeless)
            except (InputError, RunError) as error:
                print(f"| {setting.difference(self.default)} | failed: {error} |", flush=True)
                continue
            ratio = self.speed(setting) / self.speed(base)
            if ratio < SLOWER:
                self.slower.append(f"{setting.difference(base)} ({ratio:.2f})")

    def speed(self, setting: Setting) -> float:
        return self.trials[setting].speed

    def best(self) -> Setting:
        return max(self.trials, key=self.speed)

    def has_hope(self, setting: Setting) -> bool:
        """Whether its trial did not fail, and was not hopelessly slow."""
        return setting in self.trials and self.speed(setting) > HOPELESS * self.speed(self.best())

    def finals(self, turns: int) -> dict[Setting, float]:
        """The median speeds of the default and of the two fastest, which take turns."""
        fastest = sorted(self.trials, key=self.speed, reverse=True)
        # The default may be one of them.
        speeds = {setting: [] for setting in (self.default, *fastest[:2])}
        for _ in range(turns):
            for setting, found in speeds.items():
                found.append(self.run(setting).speed)
        return {setting: statistics.median(found) for setting, found in speeds.items()}


def default_of(args) -> Setting:
    """The setting of the recipe with the given flags, and one process per device."""
    processes = 1 if args.recipe.name == "single.py" else count_devices(args.device)
    precision = args.amp_dtype if args.recipe.name == "ddp_amp.py" else "fp32"
    return Setting(
        precision,
        processes,
        channels_last=args.channels_last,
        compile=args.compile,
        cuda_graph=args.cuda_graph,
        workers=args.workers,
        loader=args.loader,
    )


def on_gpu(device: str) -> bool:
    return device != "cpu" and torch.cuda.is_available()


def count_devices(device: str) -> int:
    """How many processes share this machine: one per GPU, or per core."""
    if on_gpu(device):
        return torch.cuda.device_count()
    return len(devices.own_cores())


def placements(base: Setting, device: str) -> list[Setting]:
    """One process, and one per device; on a CPU also one process with half the threads."""
    number = count_devices(device)
    one = replace(base, processes=1, threads=None)
    found = [one, replace(base, processes=number, threads=None)]
    if not on_gpu(device):
        # With hyperthreading a core counts twice.
        found.append(replace(one, threads=max(1, number // 2)))
    return found


def kinds(args, default: Setting) -> list[Setting]:
    """The default in each precision."""
    precisions = ["fp32"]
    if (args.recipe.parent / "ddp_amp.py").exists():
        precisions.append("bf16")
        # A CPU trained at 1/60 of its speed in fp32, even with AVX512-FP16 (mnist/ddp_amp.py; 2
        # cores of an Intel Xeon with AMX; torch 2.14.1; 2026-11-26).
        if on_gpu(args.device):
            precisions.append("fp16")
    found = [replace(default, precision=precision) for precision in precisions]
    # TF32 is NVIDIA's.
    if on_gpu(args.device) and torch.version.hip is None:
        found.append(replace(default, precision="fp32", tf32=False))
    return found


def loading(base: Setting, config: dict, device: str) -> list[Setting]:
    """If files are read: other numbers of loader workers, and on a GPU the other loader."""
    if "workers" not in config or config["synthetic"]:
        return []
    workers = config["workers"]
    found = [replace(base, workers=other) for other in {workers // 2, 2 * workers} - {workers}]
    # nvImageCodec is NVIDIA's.
    if on_gpu(device) and torch.version.hip is None:
        found.append(replace(base, loader="nvimgcodec"))
    return found


def find(args, given) -> None:
    """Print the trials, what is slower, and the fastest command."""
    search = Search(args, given)
    default = search.default
    began = time.perf_counter()
    config = search.probe()
    seconds = time.perf_counter() - began + args.seconds
    trials = TRIALS + 3 * args.turns
    minutes = math.ceil(trials * seconds / 60)
    print(f"about {trials} trials of {seconds:.0f} s or more each: at least {minutes} minutes")
    print(f"the default: {search.command(default)}\n")
    print("| setting | samples/s | of the default | GiB | s to the first line |")
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    search.measure(default)
    in_question = kinds(args, default)
    for channels_last in (False, True):
        settings = [replace(each, channels_last=channels_last) for each in in_question]
        search.try_all(settings)
        # What is hopeless in one memory format is not tried in the other.
        in_question = [each for each in settings if search.has_hope(each)]
    search.try_all([replace(search.best(), compile=not default.compile)])
    if on_gpu(args.device):
        search.try_all([replace(search.best(), cuda_graph=not default.cuda_graph)])
    search.try_all(placements(search.best(), args.device))
    search.try_all(loading(search.best(), config, args.device))
    if search.slower:
        print(f"slower here: {', '.join(search.slower)}")
    speeds = search.finals(args.turns)
    best = max(speeds, key=speeds.get)
    if best == default:
        print(f"in {args.turns} turns nothing was faster here than the default")
        return
    ratio = speeds[best] / speeds[default]
    in_trial = search.speed(best) / search.speed(default)
    print(
        f"the fastest trained {speeds[best]:,.0f} samples/s, {ratio:.2f} times as many as the "
        f"default (medians of {args.turns} turns; in its trial {in_trial:.2f} times):"
    )
    print(f"    {search.command(best)}")


def parse_args():
    parser = flags.Parser(__doc__)
    parser.add_argument("recipe", type=Path, help=", ".join(RECIPES))
    add = parser.add_argument
    add("--seconds", type=flags.positive_float, default=2, help="training time of each trial")
    add("--turns", type=flags.positive_int, default=3, help="turns of the final comparison")
    # The trials vary these flags of the recipe.
    add("--amp-dtype", choices=("bf16", "fp16"), default="bf16", help="the recipe's own")
    add("--channels-last", action="store_true", help="the recipe's own")
    add("--compile", action="store_true", help="the recipe's own")
    add("--cuda-graph", action="store_true", help="the recipe's own")
    add("-j", "--workers", type=flags.non_negative_int, help="the recipe's own")
    add("--loader", help="the recipe's own")
    add("--device", choices=("auto", "cpu"), default="auto", help="the recipe's own")
    args, given = parser.parse_known_args()
    if args.recipe.name not in RECIPES or not args.recipe.exists():
        raise InputError(
            f"{args.recipe}: give one of {', '.join(RECIPES)}, such as mnist/single.py"
        )
    if args.device != "auto":
        given += ["--device", args.device]
    return args, given


if __name__ == "__main__":
    with plain_exits():
        find(*parse_args())
