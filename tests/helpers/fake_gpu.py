"""A fake GPU: tensors that say cuda:0 and are computed on the CPU.

    python tests/helpers/fake_gpu.py mnist/single.py --synthetic
    torchrun --nproc-per-node=2 tests/helpers/fake_gpu.py mnist/ddp_launch.py --synthetic

The second command needs FAKE_GPUS=2 in its environment. An operation on tensors of a GPU and
of the CPU fails, as with CUDA. For each training step it counts launches (the operations that start
a kernel on a GPU) and waits (the lines at which Python waits for the GPU). It cannot show a race,
and its operations are those of the CPU: for some of them CUDA starts several kernels, and for a
view of other strides a copy. NCCL is Gloo, and what Horovod does with a tensor is not counted.

A CUDA graph records the operations with their tensors, and a replay runs them again without Python.
So a number or a random seed of Python is frozen, as on a GPU.
"""

import collections
import contextlib
import json
import os
import re
import runpy
import signal
import sys
import traceback
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.parallel.comm as comm
import torch.optim.optimizer as optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

current = 0  # the index of the GPU that this process uses, as torch.cuda.set_device sets it
# They start no kernel: they make a view or reserve memory, or Python asks for a value
NO_LAUNCH = """
    alias as_strided detach detach_ empty empty_like empty_strided expand is_same_size lift_fresh
    _local_scalar_dense narrow new_empty new_empty_strided permute _reshape_alias resize_ select
    slice split set_ split_with_sizes squeeze squeeze_ t transpose unbind unfold unsqueeze
    unsqueeze_ _unsafe_view view
"""
NO_LAUNCH = set(NO_LAUNCH.split())
# The CPU needs a result
WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "unique_dim", "_unique2"}
# With tensors of the CPU, as in CUDA
MIXES = {"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"}
launches, waits = collections.Counter(), collections.Counter()
# The addresses of DDP's buckets, which its C++ gets back from Gloo as tensors of the CPU
reduced = set()
recording = None  # the Graph that is being captured


class GpuTensor(torch.Tensor):
    """The tensor `cpu`, as if it were on the GPU `device`.

    Autograd and DDP's C++ take it for a meta tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cpu, device):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            cpu.size(),
            strides=cpu.stride(),
            storage_offset=cpu.storage_offset(),
            dtype=cpu.dtype,
            device="meta",
        )
        made.on_cpu, made.gpu = cpu, device
        return made

    device, is_cuda, is_meta = property(lambda self: self.gpu), True, False

    def _set_data(self, new):
        torch.Tensor.data.__set__(self, new)
        self.on_cpu = new.on_cpu

    data = property(lambda self: self.detach(), _set_data)

    def type(self, dtype=None):
        return super().type(dtype) if dtype else self.on_cpu.type().replace("torch.", "torch.cuda.")

    def cpu(self):
        return self.to("cpu")

    def tolist(self):
        return self.to("cpu").tolist()

    def new_tensor(self, values, **options):
        return torch.tensor(values, **{"dtype": self.dtype, "device": self.gpu, **options})

    def __getitem__(self, index):
        # C++ would send it to the meta device, where it has no values
        if isinstance(index, list):
            index = torch.tensor(index)
        if isinstance(index, torch.Tensor) and not isinstance(index, GpuTensor):
            index = index.to(self.gpu)
        return super().__getitem__(index)

    def get_device(self):
        return self.gpu.index

    def record_stream(self, stream):
        pass

    def __repr__(self):
        return f"GpuTensor({self.on_cpu}, {self.gpu})"

    def __reduce_ex__(self, protocol):
        return self.on_cpu.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return operate(func, args, kwargs or {})


class Factories(TorchDispatchMode):
    """Catches operations that have no GpuTensor, such as torch.zeros(4, device="cuda")."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return operate(func, args, kwargs or {})


class Operation:
    """`func` with its arguments, tensors of the CPU, and what it gave in the capture of a graph."""

    def __init__(self, func, args, kwargs):
        self.func, self.args, self.kwargs = func, args, kwargs

    def run(self):
        return self.func(*self.args, **self.kwargs)

    def run_again(self):
        """Let the tensors of the result have new values, in the same places."""
        for new, old in zip(tree_leaves(self.run()), tree_leaves(self.result), strict=True):
            if isinstance(new, torch.ScriptObject):
                dist.Work.unbox(new).wait()
            # A view, or what was changed in place, has its values already.
            elif isinstance(new, torch.Tensor) and address(new) != address(old):
                old.copy_(new)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Graph:
    """torch.cuda.CUDAGraph: what was done on the GPU during a capture."""

    def __init__(self):
        self.operations, self.before = [], {}

    def record(self, operation):
        for tensor in tree_leaves((operation.args, operation.kwargs)):
            if isinstance(tensor, torch.Tensor) and address(tensor) not in self.before:
                storage = tensor.untyped_storage()
                self.before[address(tensor)] = storage, storage.clone()
        operation.result = operation.run()
        self.operations.append(operation)
        return operation.result

    def replay(self):
        for operation in self.operations:
            operation.run_again()
        launches["graph"] += 1
        after_step()


@contextlib.contextmanager
def capture(graph, **_):
    """torch.cuda.graph. A GPU computes nothing meanwhile: all is put back at the end."""
    global recording
    recording, state = graph, torch.default_generator.get_state()
    try:
        yield
    finally:
        recording = None
        torch.default_generator.set_state(state)
        for storage, values in graph.before.values():
            storage.copy_(values)
        graph.before.clear()
        launches.clear()


def note_wait(name):
    """Count a line at which Python waits for the GPU."""
    if recording:
        raise RuntimeError("operation not permitted when stream is capturing")
    waits[f"{line()} ({name})"] += 1


def indexed(device):
    """cuda as cuda:0. For a device without its index, C++ would ask CUDA which is the current."""
    lacks_index = device.type == "cuda" and device.index is None
    return torch.device("cuda", current) if lacks_index else device


class Autocast(TorchFunctionMode):
    """torch.autocast("cuda") for the models of the recipes.

    In C++ a GpuTensor is no CUDA tensor, so torch skips it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(torch.device, indexed, (args, kwargs))
        if func in (torch.conv2d, F.linear) and torch.is_autocast_enabled("cuda"):
            args = tree_map_only(
                GpuTensor, lambda tensor: tensor.to(torch.get_autocast_dtype("cuda")), args
            )
        elif func is F.cross_entropy and torch.is_autocast_enabled("cuda"):
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs or {})


def line():
    """The last line of this repository that led to the present operation."""
    for frame in reversed(traceback.extract_stack()):
        if (
            re.search(r"/(common|process|images|mnist|cifar10|imagenet)/[^/]*$", frame.filename)
            and "-packages" not in frame.filename
        ):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"
    return "outside of this repository"


def operate(func, args, kwargs):
    """Run the operation `func` on the CPU's tensors, count it, and return its result on the GPU."""
    leaves = tree_leaves((args, kwargs))
    devices = {leaf.gpu for leaf in leaves if isinstance(leaf, GpuTensor)}
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if asked and asked.type == "meta":  # a copy of the properties of a GpuTensor, made in C++
        asked = torch.device("cuda")
    if asked and asked.type == "cuda":
        asked = torch.device("cuda", current if asked.index is None else asked.index)
    elif not devices:
        return func(*args, **kwargs)
    name, on_gpu = func.overloadpacket.__name__, asked or next(iter(devices))
    if (
        func._can_decompose()
    ):  # in inference mode, operations arrive here before autograd has split them
        with Factories():
            return func.decompose(*args, **kwargs)
    of_cpu = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, GpuTensor)
        and leaf.dim()
        and leaf.untyped_storage().data_ptr() not in reduced
    ]
    if (
        devices and (len(devices) > 1 or of_cpu) and name not in MIXES and func.namespace != "c10d"
    ) or (name == "index" and not isinstance(args[0], GpuTensor)):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found two devices ({func})"
        )
    copies = (name == "copy_" and of_cpu) or (
        name == "_to_copy" and asked and (not devices or asked.type == "cpu")
    )
    blocking = copies and not kwargs.get(
        "non_blocking", name == "copy_" and len(args) > 2 and args[2]
    )
    if name in WAITS or blocking or (name.startswith("index") and of_cpu):
        note_wait(name)
    if asked:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    real_args, real_kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.on_cpu, (args, kwargs))
    onto_itself = name == "copy_" and real_args[0].data_ptr() == real_args[1].data_ptr()
    launches[name] += name not in NO_LAUNCH and func.namespace != "c10d" and not onto_itself
    operation = Operation(ON_CPU.get(name, func), real_args, real_kwargs)
    result = recording.record(operation) if recording else operation.run()
    if func.namespace == "c10d":
        reduced.update(
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves(real_args)
            if isinstance(tensor, torch.Tensor)
        )
        launches[f"c10d.{name}"] += 1
        return (args[0], *result[1:]) if isinstance(result, tuple) else result
    if asked and asked.type == "cpu":
        return result.clone() if result is real_args[0] else result
    result = tree_map_only(torch.Tensor, lambda tensor: GpuTensor(tensor, on_gpu), result)
    return return_and_correct_aliasing(func, args, kwargs, result)


# The operations of SyncBatchNorm, which torch has for CUDA only. x is [batch, channels, ...], a
# statistic [channels].
def per_channel(x):
    return x.transpose(0, 1).flatten(1).float()


def shaped(statistic, x):
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x, eps):
    return per_channel(x).mean(1), (per_channel(x).var(1, unbiased=False) + eps).rsqrt()


def gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    share = counts.view(-1, 1) / counts.sum()
    mean = (means * share).sum(0)
    var = ((invstds**-2 - eps + (means - mean) ** 2) * share).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (var + eps).rsqrt()


def normalise(x, weight, bias, mean, invstd, eps):
    normal = (x - shaped(mean, x)) * shaped(invstd * weight, x) + shaped(bias, x)
    return normal.to(x.dtype)


def backward_reduce(grad, x, mean, invstd, weight, *_):
    sums = (
        per_channel(grad).sum(1),
        (per_channel(grad) * (per_channel(x) - mean.view(-1, 1))).sum(1),
    )
    return *sums, sums[1] * invstd, sums[0].clone()


def backward_elements(grad, x, mean, invstd, weight, sum_grad, sum_grad_x, counts):
    centred = grad - shaped(sum_grad / counts.sum(), x)
    centred -= (x - shaped(mean, x)) * shaped(invstd**2 * sum_grad_x / counts.sum(), x)
    return (centred * shaped(invstd * weight, x)).to(grad.dtype)


def in_float32(func):
    """A CPU without 16-bit arithmetic would be slow, and its results different."""

    def wrapped(*args, **kwargs):
        dtype = args[0].dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return func(*args, **kwargs)
        args = tree_map_only(torch.Tensor, lambda tensor: tensor.float(), args)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype), func(*args, **kwargs))

    return wrapped


ON_CPU = {
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": normalise,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elements,
    **{
        name: in_float32(getattr(torch.ops.aten, name).default)
        for name in ("convolution", "convolution_backward", "addmm", "mm")
    },
}


class Stream(contextlib.nullcontext):
    """A CUDA stream or event, of which every other method does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def is_capturing(self):
        return recording is not None

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def set_device(device):
    global current
    current = device if isinstance(device, int) else torch.device(device).index


def synchronize(*_):
    note_wait("synchronize")


def int_tensor(values):
    return torch.tensor(values, dtype=torch.int32, device=f"cuda:{current}")


def pretend(gpus):
    """Let torch see that many GPUs."""
    generator, cuda = torch.default_generator, torch.cuda
    for module, name, value in [
        *((module, "is_available", True) for module in (cuda, torch.accelerator)),
        *((module, "device_count", gpus) for module in (cuda, torch.accelerator)),
        (torch.accelerator, "current_accelerator", torch.device("cuda")),
        (cuda, "_lazy_init", None),
        (cuda, "is_initialized", True),
        (cuda, "get_device_name", "fake GPU"),
        (cuda, "get_device_capability", (9, 0)),
        (cuda, "is_bf16_supported", True),
        (
            cuda,
            "get_device_properties",
            SimpleNamespace(
                name="fake GPU",
                major=9,
                minor=0,
                uuid="GPU-0",
                total_memory=80 * 2**30,
                multi_processor_count=132,
            ),
        ),
    ]:
        setattr(module, name, lambda *args, value=value, **kwargs: value)
    cuda.set_device = torch.accelerator.set_device_index = set_device
    cuda.current_device = torch.accelerator.current_device_index = lambda: current
    cuda.default_generators = [generator, *(torch.Generator() for _ in range(gpus - 1))]
    cuda.manual_seed = generator.manual_seed
    cuda.get_rng_state = lambda *_: generator.get_state()
    cuda.set_rng_state = lambda state, *_: generator.set_state(state)
    torch.accelerator.current_stream = cuda.current_stream = cuda.Stream = cuda.Event = Stream
    cuda.stream = cuda.set_stream = Stream
    cuda.is_current_stream_capturing = Stream().is_capturing
    cuda.CUDAGraph, cuda.graph = Graph, capture
    cuda.synchronize = torch.accelerator.synchronize = synchronize
    cuda.IntTensor = int_tensor
    torch.Tensor.pin_memory = lambda tensor, *_: tensor.clone()
    # torch.tensor(x, device="cuda") is then a copy, as with CUDA
    torch._C._set_only_lift_cpu_tensors(True)
    optimizer._foreach_supported_types.append(GpuTensor)
    init = dist.init_process_group
    dist.init_process_group = lambda backend=None, device_id=None, **others: init("gloo", **others)
    pretend_data_parallel()
    if "HOROVOD_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        pretend_horovod()


def pretend_data_parallel():
    """Copy between GPUs as DataParallel does in C++."""

    def scatter(tensor, gpus, *_):
        return tuple(
            part.to(f"cuda:{gpu}") for part, gpu in zip(tensor.chunk(len(gpus)), gpus, strict=False)
        )

    def broadcast(tensors, gpus, *_):
        return [[tensor.to(f"cuda:{gpu}", copy=True) for tensor in tensors] for gpu in gpus]

    def gather(tensors, dim, gpu):
        return torch.cat([tensor.to(f"cuda:{gpu}") for tensor in tensors], dim)

    def reduce_add(tensors, gpu, *_):
        return tuple(
            sum(tensor.to(f"cuda:{gpu}") for tensor in copies)
            for copies in zip(*tensors, strict=True)
        )

    comm.scatter, comm.gather = scatter, gather
    comm.broadcast_coalesced, comm.reduce_add_coalesced = broadcast, reduce_add
    torch.cuda.device = torch.accelerator.device_index = lambda gpu: contextlib.nullcontext()


def pretend_horovod():
    """Hand Horovod's C++ code the tensors of the CPU."""
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    class Library:
        def __getattr__(self, name):
            function = getattr(mpi_lib, name.replace("_torch_cuda_", "_torch_"))
            if not callable(function):
                return function
            return lambda *args: function(
                *tree_map_only(GpuTensor, lambda tensor: tensor.on_cpu, args)
            )

    mpi_lib, mpi_ops.mpi_lib = mpi_ops.mpi_lib, Library()
    hvd.nccl_built = lambda: os.environ.get("FAKE_NCCL", "1") == "1"


steps = []  # (launches, [line that waits, ...]) of each training step so far


def after_step(*_):
    """Count a step, after its optimizer or the graph that has it."""
    if recording or not sum(launches.values()):
        return  # Horovod's optimizer calls this twice
    steps.append((sum(launches.values()), list(waits.elements())))
    rank = (
        os.environ.get("RANK")
        or os.environ.get("HOROVOD_RANK")
        or os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    )
    if rank == "0" and "FAKE_STEPS" in os.environ:
        with open(os.environ["FAKE_STEPS"], "a") as file:
            print(json.dumps(steps[-1]), file=file)
    if len(steps) == int(os.environ.get("KILLED_AFTER", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    launches.clear()
    waits.clear()


def run(script):
    """Run a recipe on fake GPUs.

    Return the (number of launches, [line that waits, ...]) of each training step.
    FAKE_GPUS: how many there are.
    FAKE_STEPS: a file to which rank 0 writes what it counts, step by step.
    KILLED_AFTER: the number of steps after which each rank kills itself.
    """
    pretend(int(os.environ.get("FAKE_GPUS", "1")))
    optimizer.register_optimizer_step_post_hook(after_step)
    with Factories(), Autocast():
        runpy.run_path(script, run_name="__main__")
    return steps


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    counted = run(sys.argv[0])
    print("launches in each training step:", *(number for number, _ in counted))
    print(
        f"waits in {len(counted) - 1} steps after the first:",
        *collections.Counter(line for _, lines in counted[1:] for line in lines).most_common(),
        sep="\n    ",
    )
