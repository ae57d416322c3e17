"""The device of a process, and what makes it fast."""

import atexit
import ctypes
import math
import os
import platform
import re
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

import torch

from common import graph
from common.errors import InputError
from common.files import cache_folder
from common.process import cgroups
from common.ranks import World

# Where torchrun, horovodrun, Open MPI, MPICH and srun put the number of processes on this machine.
# srun is last: it may have started one of the other launchers, whose number counts.
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    # Such as 4(x2), on two machines.
    "SLURM_STEP_TASKS_PER_NODE",
)


def use(args, local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """Pick and set up the device of process `local_rank` of those on this machine.

    Reads --device, --deterministic and --cuda-graph. Raises InputError as pick() does.
    """
    device = pick(args.device, local_rank, local_world_size)
    share_cores(local_world_size)
    tune(device, args.deterministic)
    if device.type != "cpu":
        # Calls without a device, such as a seed or a new process group, now use this one.
        torch.accelerator.set_device_index(device.index)
    if args.cuda_graph:
        graph.prepare(args, device)
    return device


def pick(name: str, local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """The device for process `local_rank` of `local_world_size` on this machine.

    `name` is a type, such as cuda or cpu, a single device, such as cuda:1, or auto.
    Raises InputError if there are fewer devices than processes.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator else "cpu"
    try:
        device = torch.device(found if name == "auto" else name)
    except RuntimeError as error:
        raise InputError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count() if device.type == found else 0
    one_for_several = count == 1 and local_world_size > 1
    if device.index is None and one_for_several and sees_only_its_own():
        return torch.device(device.type, 0)
    if device.index is None:
        wanted = local_world_size
        device = torch.device(device.type, local_rank)
    elif local_world_size > 1:
        raise InputError(f"--device {name}: give a type, as each process has a device of its own")
    else:
        wanted = device.index + 1
    if count < wanted:
        raise InputError(
            f"torch sees {count} {device.type} devices, and {wanted} are needed: "
            "start fewer processes, or use --device cpu"
        )
    return device


def sees_only_its_own() -> bool:
    """Whether a scheduler or a wrapper may have given each process a device of its own.

    SLURM's --gpu-bind=single and --gpus-per-task do. If all processes see the same device after
    all, NCCL reports it when they connect.
    """
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    return any(os.environ.get(name) for name in names)


def own_cores(process: int = 0) -> list[int]:
    """The cores that this process may use, or the process with that id."""
    # Linux only.
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(process))
    return list(range(os.cpu_count()))


def cores_per_process(processes: int | None = None) -> int:
    """The number of cores for each process of a run on this machine: its own, or its share.

    With `processes`, this one starts that many, and binds none to cores (mp.spawn). Without it, a
    launcher started this one. srun binds each process to its own cores. Any other launcher is taken
    to have done so if it may use more cores than this process; else all share the same cores.
    """
    own = own_cores()
    bound = False
    if processes is None:
        sizes = [re.match("[1-9][0-9]*", os.environ.get(name, "")) for name in LOCAL_SIZES]
        processes = next((int(size[0]) for size in sizes if size), 1)
        bound = started_by_srun() or set(own) < set(own_cores(os.getppid()))
    share = len(own) if bound else len(own) // processes
    # A launcher can also bind several processes to the same cores, such as those of a socket.
    return max(1, min(share, cores_of_machine() // processes))


def cores_of_machine() -> int:
    """The cores of this machine, or the CPU quota of its cgroup (docker run --cpus), in cores."""
    quota = math.inf
    # A file system can hide the limits.
    with suppress(OSError, ValueError):
        quota = cgroups.cpu_quota()
    return max(1, int(min(os.cpu_count(), quota)))


def started_by_srun() -> bool:
    """Whether srun started this process directly, with no other launcher in between."""
    others = ("TORCHELASTIC_RUN_ID", *LOCAL_SIZES[1:-1])
    return "SLURM_STEP_TASKS_PER_NODE" in os.environ and not any(map(os.environ.get, others))


def share_cores(local_world_size: int) -> None:
    """Use one thread per core of this process's share, unless OMP_NUM_THREADS is set."""
    # OpenMP ignores a value that is not a number; each process would then use all cores.
    is_set = re.match("[1-9]", os.environ.get("OMP_NUM_THREADS", ""))
    chosen = torch.get_num_threads()
    share = max(1, min(chosen, cores_of_machine()) // local_world_size)
    # A single process without a limit keeps torch's choice.
    if share < chosen and not is_set:
        torch.set_num_threads(share)


def describe(device: torch.device) -> str:
    """The device's type and name, for the log."""
    name = (
        f"{os.cpu_count()} cores" if device.type != "cuda" else torch.cuda.get_device_name(device)
    )
    return f"{device.type} ({name})"


def tune(device: torch.device, deterministic: bool = False) -> None:
    """Make training fast: cuDNN's search for algorithms, TF32, and settings for a CPU.

    A `deterministic` run computes the same bits each time on the same machine, which is slower on
    a GPU. An operation without a deterministic algorithm then raises RuntimeError.
    """
    # cuDNN tries the algorithms for each convolution once, and keeps the fastest.
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # cuBLAS is deterministic only with a workspace of fixed size. It reads this when it starts.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if device.type == "cuda":
        # TF32 for matrix products, as torch uses in convolutions.
        torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        libc = ctypes.CDLL(None)
        # glibc only.
        if hasattr(libc, "mallopt"):
            keep_freed_memory(libc)
            schedule_as_batch(libc)


def keep_freed_memory(libc: ctypes.CDLL) -> None:
    """Keep glibc from returning freed memory: each step would page-fault it in (docs/cpu.md)."""
    M_TRIM_THRESHOLD = -1
    M_MMAP_MAX = -4
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)


def schedule_as_batch(libc: ctypes.CDLL) -> None:
    """SCHED_BATCH for all threads: a woken thread does not preempt its waker (docs/cpu.md)."""
    no_priority = bytes(4)
    # A chroot may have no /proc.
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            libc.sched_setscheduler(int(thread), os.SCHED_BATCH, no_priority)


def warn_if_slow(world: World, dtype: torch.dtype) -> None:
    """Print a line if the device is a CPU without instructions for this 16-bit type."""
    # torch 2.8 cannot tell which units a CPU has.
    if world.device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    # Such as avx512_bf16 and amx_bf16. For other architectures torch may list none.
    units = {name: there for name, there in torch.cpu.get_capabilities().items() if short in name}
    if units and not any(units.values()):
        world.say(f"this CPU has no {short} units ({', '.join(units)}): fp32 is faster on it")


def adapt(model: torch.nn.Module, args) -> None:
    """Apply --channels-last and --compile to `model`, in place; raises InputError."""
    if args.channels_last:
        use_channels_last(model)
    if args.compile:
        compile_model(model)


def use_channels_last(model: torch.nn.Module) -> None:
    """Keep weights and images (each input [N, C, H, W]) in NHWC, which suits tensor cores."""

    def convert(_, inputs):
        return tuple(
            value.contiguous(memory_format=torch.channels_last)
            if isinstance(value, torch.Tensor) and value.dim() == 4
            else value
            for value in inputs
        )

    model.to(memory_format=torch.channels_last)
    model.register_forward_pre_hook(convert)


def compile_model(model: torch.nn.Module) -> None:
    """torch.compile `model` in place, so that weights keep their names. Raises InputError."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise InputError("--compile needs a C++ compiler: apt-get install g++, or set CXX")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder_for_kernels())
    model.compile()


def folder_for_kernels() -> Path:
    """A cache folder for what torch.compile builds on this kind of CPU. Raises InputError.

    torch's default is /tmp/torchinductor_USER: anybody could create that folder, and torch
    unpickles what it finds there. If the cache is read-only, it is a new temporary folder.
    """
    with suppress(RuntimeError, OSError):
        folder = cache_folder() / "torchinductor" / kind_of_cpu()
        folder.mkdir(parents=True, exist_ok=True)
        # g++ would take a path with a space for two.
        if os.access(folder, os.W_OK) and not re.search(r"\s", str(folder)):
            return folder
    try:
        folder = tempfile.mkdtemp(prefix="torchinductor-")
    except OSError as error:
        raise InputError(
            f"--compile needs a folder ({error.strerror}): set TORCHINDUCTOR_CACHE_DIR"
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def kind_of_cpu() -> str:
    """A name for this kind of CPU. Kernels are built for one kind, and nodes can share a home."""
    kind = platform.machine()
    # Linux only.
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        of_kind = re.findall("^(?:model name|flags|Features).*", text, re.MULTILINE)
        kind += f"-{zlib.crc32(repr(sorted(set(of_kind))).encode()):08x}"
    return kind
