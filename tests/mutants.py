"""Put small faults into the code, one at a time, and check that a test catches each.

    make mutants
    make mutants ARGS="watchdog fsdp"    # only those with one of these words in their names

MUTANTS lists the faults. First, each text to replace must occur exactly once. Then all their tests
run on an unchanged copy of the repository. Then each mutant's test runs on a copy with its fault,
three at a time, and a row of a Markdown table says which test caught it, and after how long.

It ends with status 1 if a mutant survived, if a text is missing, or if a test fails without a
mutant. A mutant whose test is skipped here is not run, and its row says what is missing.
"""

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parents[1]
# Seconds after which a test that hangs counts as failed.
TIMEOUT = 300
# How many copies of the repository are tested at once.
AT_ONCE = 3
# An environment variable of all processes that a test starts, to find those that it leaves behind.
# The value begins with SESSION.
MARK = "MUTANTS"
SESSION = uuid.uuid4().hex


@dataclass
class Mutant:
    """A fault: in `file` each text of `changes`, which occurs once, is replaced.

    `test` must catch it: the pytest id of a test, or of one with several cases.
    """

    name: str
    file: str
    changes: dict[str, str]
    test: str

    def changed(self, text: str) -> str:
        """The text of the file with the fault."""
        for line, replacement in self.changes.items():
            text = text.replace(line, replacement)
        return text


WRAPPER = "    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)\n"
NO_WRAPPER = "    ddp_model = model\n"
SET_EPOCH = "train.sampler.set_epoch(position.epoch, "
SAME_ORDER = "train.sampler.set_epoch(0, "
VAL_SHARE = "range(world.rank, len(val_set), world.size)"
HOROVOD_OPTIMIZER = """\
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
"""
SHARD = "    shard(args, model, world)\n"

SAMPLER = "tests/common/test_data.py::test_sampler_position"
WATCHDOG = "tests/common/process/test_watchdog.py::test_a_process_that_hangs_ends_with_its_stack"
CHECKPOINT = "tests/common/test_checkpoint.py::"
PARITY = "tests/recipes/test_parity.py::test_parity"
COSTS = "tests/recipes/test_gpu.py::test_costs_of_a_step"
CUDA_GRAPH = "tests/recipes/test_gpu.py::test_cuda_graph"
STOPPED = "tests/recipes/test_signals.py::test_told_to_stop_before_the_first_step"
CLUSTER = "tests/slurm/test_slurm.py::"
COMMANDS = "tests/docs/test_readme.py::test_commands"
EXAMPLE = "tests/examples/test_examples.py::test_the_same_on_two_processes_and_after_a_resume"

MUTANTS = [
    # What a strategy adds: the weights are those of one process.
    Mutant(
        "ddp_spawn without the wrapper",
        "mnist/ddp_spawn.py",
        {WRAPPER: NO_WRAPPER},
        f"{PARITY}[mnist ddp_spawn 2]",
    ),
    Mutant(
        "ddp_launch without the wrapper",
        "mnist/ddp_launch.py",
        {WRAPPER: NO_WRAPPER},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "ddp_launch without the all-reduce",
        "mnist/ddp_launch.py",
        {WRAPPER: f"{WRAPPER}    ddp_model.require_backward_grad_sync = False\n"},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "a run without set_epoch",
        "common/run.py",
        {SET_EPOCH: SAME_ORDER},
        "tests/common/test_run.py::test_each_epoch_has_its_own_order",
    ),
    Mutant(
        "ddp_launch without the scaled rate",
        "mnist/ddp_launch.py",
        {"schedule.peak_lr(args, world.size)": "schedule.peak_lr(args)"},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "ddp_launch without shares of training",
        "mnist/ddp_launch.py",
        {"batch_size, world.rank, world.size": "batch_size, 0, world.size"},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "ddp_launch with gradients that are not zeroed",
        "mnist/ddp_launch.py",
        {"        optimizer.zero_grad()\n": ""},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "fsdp with the optimizer of the whole weights",
        "mnist/fsdp.py",
        {
            SHARD: f"    weights = list(model.parameters())\n{SHARD}",
            "        model.parameters(), lr": "        weights, lr",
        },
        f"{PARITY}[mnist fsdp 2]",
    ),
    Mutant(
        "fsdp without averaging",
        "mnist/fsdp.py",
        {
            "    # fsdp: foreach, as fused SGD does not support shards.\n": (
                "    model.set_requires_gradient_sync(False)\n"
            )
        },
        f"{PARITY}[mnist fsdp 2]",
    ),
    Mutant(
        "fsdp without the root",
        "imagenet/fsdp.py",
        {"    fully_shard(model, mesh=mesh, mp_policy=root_policy)\n": ""},
        "tests/recipes/test_fsdp.py::test_a_whole_checkpoint_is_that_of_ddp",
    ),
    Mutant(
        "hvd without the all-reduce",
        "mnist/hvd.py",
        {HOROVOD_OPTIMIZER: ""},
        f"{PARITY}[mnist hvd_gloo 2]",
    ),
    Mutant(
        "hvd without the scaled rate",
        "mnist/hvd.py",
        {"schedule.peak_lr(args, averaged(args, world.device))": "schedule.peak_lr(args)"},
        f"{PARITY}[mnist hvd_gloo 2]",
    ),
    Mutant(
        "hvd without the broadcast of the first weights",
        "mnist/hvd.py",
        {"    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n": ""},
        "tests/recipes/test_parity.py::test_all_begin_with_the_weights_of_rank_0[hvd_gloo]",
    ),
    Mutant(
        "a loss that is not divided by --accumulate",
        "imagenet/single.py",
        {"(loss / args.accumulate).backward()": "loss.backward()"},
        "tests/imagenet/test_imagenet.py::test_accumulate[single]",
    ),
    # Figures are exact.
    Mutant(
        "a run without the sum of training",
        "common/run.py",
        {"self.sums.result(self.stop.carried_by(self.world.all_reduce))": "self.sums.result()"},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "ddp_launch without the sum of validation",
        "mnist/ddp_launch.py",
        {"sums.result(dist.all_reduce)": "sums.result()"},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "ddp_launch without shares of validation",
        "mnist/ddp_launch.py",
        {VAL_SHARE: "range(len(val_set) - world.rank)"},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "ddp_launch with one share of validation for all",
        "mnist/ddp_launch.py",
        {VAL_SHARE: "range(0, len(val_set), world.size)"},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "hvd without the sum of validation",
        "mnist/hvd.py",
        {"sums.result(all_reduce)": "sums.result()"},
        f"{PARITY}[mnist hvd_gloo 2]",
    ),
    Mutant(
        "a loss in which each batch counts once",
        "mnist/ddp_launch.py",
        {"sums.add(loss=loss * len(labels), ": "sums.add(loss=loss, "},
        f"{PARITY}[mnist ddp_launch 2]",
    ),
    Mutant(
        "ddp_launch evaluates with each rank's own BatchNorm",
        "imagenet/ddp_launch.py",
        {"        dist.broadcast(buffer, src=0)\n": "        pass\n"},
        "tests/recipes/test_resume.py::test_killed_and_warned[ddp_launch]",
    ),
    Mutant(
        "hvd evaluates with each rank's own BatchNorm",
        "cifar10/hvd.py",
        {"    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)\n": ""},
        "tests/recipes/test_resume.py::test_killed_and_warned[hvd_gloo]",
    ),
    Mutant(
        "top-4 counts as top-5",
        "imagenet/single.py",
        {"logits.topk(min(5, logits.shape[1]))": "logits.topk(min(4, logits.shape[1]))"},
        "tests/imagenet/test_imagenet.py::test_top_5",
    ),
    Mutant(
        "best.pt is the worst epoch",
        "mnist/single.py",
        {'best=result["accuracy"]': 'best=-result["accuracy"]'},
        "tests/recipes/test_output.py::test_the_best_epoch_is_kept",
    ),
    Mutant(
        "Best keeps the lowest",
        "common/metrics.py",
        {"better = value > self.value": "better = value < self.value"},
        "tests/common/test_metrics.py::test_best_is_the_highest",
    ),
    # Everything is a function of seed and position.
    Mutant(
        "the share of rank 0 for all ranks",
        "common/data.py",
        {"[self.rank :: self.world_size]": "[0 :: self.world_size]"},
        SAMPLER,
    ),
    Mutant(
        "a sampler that ignores where the epoch resumes",
        "common/data.py",
        {"order[self.start : end]": "order[: end - self.start]"},
        SAMPLER,
    ),
    Mutant(
        "a sampler that continues past an evaluation",
        "common/data.py",
        {"order[self.start : end]": "order[self.start :]"},
        "tests/common/test_data.py::test_an_epoch_up_to_a_step",
    ),
    Mutant(
        "a resumed run that skips its last evaluation",
        "common/position.py",
        {"            return self.steps == self.evaluated_at\n": "            return True\n"},
        "tests/common/test_position.py::test_a_run_that_was_saved_right_before_its_last_evaluation",
    ),
    Mutant(
        "the same dropout in each step",
        "common/position.py",
        {"seed_of(seed, position.epoch, position.samples, rank)": "seed_of(seed, rank)"},
        "tests/common/test_position.py::test_random_state_is_a_function_of_position_and_rank",
    ),
    Mutant(
        "a cosine that rises",
        "common/schedule.py",
        {"0.5 * (1 + math.cos(": "0.5 * (1 - math.cos("},
        "tests/common/test_schedule.py::test_the_rate_of_a_run",
    ),
    Mutant(
        "a crop outside the padded image",
        "cifar10/cifar.py",
        {"self.to_row + left\n": "self.to_row + left + 1\n"},
        "tests/cifar10/test_cifar.py::test_every_crop_is_one_of_the_padded_image",
    ),
    Mutant(
        "machines that do not compare their data",
        "common/ranks.py",
        {
            "    if not all_same([fingerprint(dataset) for dataset in datasets], world):\n": (
                "    if False:\n"
            )
        },
        "tests/imagenet/test_trees.py::test_machines_with_different_images",
    ),
    # Checkpoints.
    Mutant(
        "a CRC-32 that is not compared",
        "common/checkpoint.py",
        {"if archive.testzip() or any(": "if any("},
        f"{CHECKPOINT}test_bit_flips",
    ),
    Mutant(
        "an entry of a checkpoint that is a folder",
        "common/checkpoint.py",
        {" or any(entry.external_attr & 16 for entry in entries)": ""},
        f"{CHECKPOINT}test_bit_flips",
    ),
    Mutant(
        "previous.pt is not kept",
        "common/checkpoint.py",
        {'            link_or_copy(last, folder / "previous.pt")\n': "            pass\n"},
        f"{CHECKPOINT}test_what_stays",
    ),
    Mutant(
        "best.pt is overwritten through its hard link",
        "common/files.py",
        {
            '    partial.unlink(missing_ok=True)\n    try:\n        with open(partial, "xb")': (
                '    try:\n        with open(partial, "wb")'
            )
        },
        f"{CHECKPOINT}test_crash_between_any_two_steps",
    ),
    Mutant(
        "ranks that do not wait for a save",
        "common/run.py",
        {"            self.world.all_reduce(nothing)\n": "            pass\n"},
        "tests/common/test_run.py::test_a_save_may_take_longer_than_a_step",
    ),
    Mutant(
        "two jobs in one folder",
        "common/lease.py",
        {"        acquire_or_raise(lease)": "        lease.force_break() or lease.acquire()"},
        "tests/common/test_lease.py::test_a_folder_in_use_is_refused",
    ),
    # How a run ends.
    Mutant(
        "a watchdog that does not end the process",
        "common/process/watchdog.py",
        {"exit=True": "exit=False"},
        f"{WATCHDOG}[a step]",
    ),
    Mutant(
        "a watchdog that starts at the first batch",
        "common/process/watchdog.py",
        {"        self.waited = 0.0\n        self.arm()\n": "        self.waited = 0.0\n"},
        f"{WATCHDOG}[the first batch]",
    ),
    Mutant(
        "a watchdog that stops at the first save",
        "common/process/watchdog.py",
        {"if self.armed_at is None or given": "if self.armed_at and given"},
        f"{WATCHDOG}[a step after a save]",
    ),
    Mutant(
        "a rank that stops alone",
        "common/process/signals.py",
        {"self.agreed = requests > 0": "self.agreed = self.requested"},
        "tests/common/process/test_signals.py::test_all_ranks_agree_to_stop_if_one_was_asked",
    ),
    Mutant(
        "a run that continues with a loss that is not finite",
        "common/metrics.py",
        {"if not part.isfinite().all():": "if False:"},
        "tests/common/test_metrics.py::test_one_value_that_is_not_finite",
    ),
    Mutant(
        "a second SIGTERM ends a run that has saved",
        "common/process/launch.py",
        {"for number in (signal.SIGTERM, ": "for number in ("},
        "tests/recipes/test_signals.py::test_more_signals_until_it_has_ended[single]",
    ),
    Mutant(
        "a rank that runs Python's destructors at exit",
        "common/process/launch.py",
        {"        end_rank()\n": "        pass\n"},
        "tests/recipes/test_launch.py::test_real_command"
        "[torchrun_--nproc-per-node=2_mnist.ddp_launch.py]",
    ),
    Mutant(
        "SIGTERM before the first step is only noted",
        "common/process/signals.py",
        {"self.listening = False\n": "self.listening = False\n        self.listen()\n"},
        f"{STOPPED}[torchrun]",
    ),
    Mutant(
        "a fork acts on signals through its parent",
        "common/process/signals.py",
        {"start_thread(os.getpid())": "start_thread(0)"},
        "tests/common/process/test_signals.py::test_a_fork_acts_itself",
    ),
    Mutant(
        "SIGTERM ends loader workers",
        "common/process/workers.py",
        {"    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n": ""},
        "tests/recipes/test_faults.py::test_signals_to_loader_workers",
    ),
    Mutant(
        "ranks that outlive their launcher",
        "common/process/parent.py",
        {"    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n": ""},
        "tests/recipes/test_signals.py::test_ranks_end_with_horovodrun_and_mpirun[hvd_mpi]",
    ),
    # What a GPU would wait for, or refuse; all of these train on the CPU as before.
    Mutant(
        "labels on the CPU",
        "common/data.py",
        {
            "[tensor.to(device) for tensor in all_samples]": (
                "[all_samples[0].to(device), all_samples[1]]"
            )
        },
        f"{COSTS}[mnist/single.py]",
    ),
    Mutant(
        "constants on the CPU",
        "images/data.py",
        {"(-mean / std).to(images.device)": "(-mean / std)"},
        f"{COSTS}[mnist/single.py]",
    ),
    Mutant(
        "constants sent in each step",
        "images/data.py",
        {"key not in self.constants": "True"},
        f"{COSTS}[mnist/single.py]",
    ),
    Mutant(
        ".item() in the loop",
        "mnist/ddp_launch.py",
        {"loss.detach()": "loss.item()"},
        f"{COSTS}[mnist/ddp_launch.py]",
    ),
    Mutant(
        "a broadcast in forward",
        "mnist/ddp_launch.py",
        {"    ddp_model.broadcast_buffers = False\n": ""},
        f"{COSTS}[mnist/ddp_launch.py]",
    ),
    Mutant(
        "BatchNorm on the CPU",
        "imagenet/networks.py",
        {"layer.to(part.weight.device)": "layer"},
        "tests/recipes/test_gpu.py::test_sync_bn[hvd.py]",
    ),
    # What is imported, printed and documented.
    Mutant(
        "torchvision is always imported",
        "cifar10/cifar.py",
        {"from torch import nn\n": "import torchvision\nfrom torch import nn\n"},
        "tests/recipes/test_launch.py::test_nothing_is_imported_before_it_is_needed",
    ),
    Mutant(
        "TensorBoard is always imported",
        "common/log.py",
        {"from tqdm import tqdm\n": "import torch.utils.tensorboard\nfrom tqdm import tqdm\n"},
        "tests/recipes/test_launch.py::test_nothing_is_imported_before_it_is_needed",
    ),
    Mutant(
        "images in the order of their archive",
        "imagenet/archives.py",
        {"sorted(range(len(names)), key=key)": "range(len(names))"},
        "tests/imagenet/test_archives.py::test_archives_are_as_folders",
    ),
    Mutant(
        "an index that is kept when its archive has changed",
        "imagenet/archives.py",
        {', header["stat"]) == (FORMAT, stat):': ", stat) == (FORMAT, stat):"},
        "tests/imagenet/test_archives.py::test_the_index_is_made_again",
    ),
    Mutant(
        "a joined tar of which only the first part is read",
        "imagenet/archives.py",
        {"    require_end(file, tar.offset, path)\n": ""},
        "tests/imagenet/test_archives.py::test_a_joined_tar",
    ),
    Mutant(
        "all images in one class",
        "images/folders.py",
        {"    if len(train.classes) < 2:\n": "    if len(train.classes) < 1:\n"},
        "tests/images/test_folders.py::test_one_class",
    ),
    Mutant(
        "transparent pixels without a background",
        "images/decode.py",
        {"    if image.has_transparency_data:\n": "    if False:\n"},
        "tests/images/test_decode.py::test_a_picture_in_the_alpha_channel_is_seen",
    ),
    Mutant(
        "an image of any format",
        "images/decode.py",
        {", formats=FORMATS)": ")"},
        "tests/images/test_decode.py::test_no_program_is_started_on_an_image",
    ),
    Mutant(
        "a doctor that finds no rank slow",
        "scripts/doctor.py",
        {"SLOW = 1.25\n": "SLOW = 12.5\n"},
        "tests/scripts/test_doctor.py::test_a_slow_rank",
    ),
    Mutant(
        "a flag in docs/ that no recipe has",
        "docs/checkpoints.md",
        {"--init-from runs/first/best.pt": "--init-weights runs/first/best.pt"},
        f"{COMMANDS}[docs/checkpoints.md]",
    ),
    Mutant(
        "a command in README.md with a file that does not exist",
        "README.md",
        {"diff mnist/single.py mnist/ddp_launch.py\n": "diff mnist/single.py mnist/ddp.py\n"},
        f"{COMMANDS}[README.md]",
    ),
    Mutant(
        "a constant column that is divided by its deviation",
        "examples/regression.py",
        {"np.where(std > 0, std, np.inf)": "std"},
        "tests/examples/test_examples.py::test_a_table_with_constant_and_large_columns",
    ),
    Mutant(
        "the same noise on each rank",
        "examples/gan.py",
        {"noise[sampler.rank :: sampler.world_size]": "noise[: sampler.batch_size]"},
        f"{EXAMPLE}[gan]",
    ),
    Mutant(
        "an optimizer that is in no checkpoint",
        "examples/gan.py",
        {'        "discriminator_optimizer": discriminator_optimizer,\n': ""},
        f"{EXAMPLE}[gan]",
    ),
    Mutant(
        "a loss over all ranks whose gradient is averaged",
        "examples/contrastive.py",
        {"(loss * world.size).backward()": "loss.backward()"},
        f"{EXAMPLE}[contrastive]",
    ),
    Mutant(
        "a URL that is taken for a folder",
        "common/flags.py",
        {"if is_url(arg_string):": "if False:"},
        "tests/common/test_flags.py::test_a_path_is_no_url",
    ),
    Mutant(
        "each process takes all cores of a container",
        "common/devices.py",
        {"set(own) < set(own_cores(os.getppid()))": "len(own) < os.cpu_count()"},
        "tests/common/test_devices.py::test_cores_of_a_process",
    ),
    Mutant(
        "Ctrl-C that a save turns into another error",
        "common/checkpoint.py",
        {"(OSError, KeyboardInterrupt)": "OSError"},
        "tests/common/test_checkpoint.py::test_interrupted_anywhere_in_a_save",
    ),
    Mutant(
        "momentum of any shape",
        "common/optimizers.py",
        {"(fused and not fits)": "False"},
        "tests/common/test_untrusted.py::test_a_value_that_no_run_has",
    ),
    Mutant(
        "lists that contain each other",
        "common/untrusted.py",
        {"if count + len(left) > MOST_VALUES:": "if False:"},
        "tests/common/test_untrusted.py::test_what_is_refused_is_not_saved",
    ),
    Mutant(
        "names with control characters of a terminal",
        "common/errors.py",
        {'f"{printable(line)}': 'f"{line}'},
        "tests/common/test_untrusted.py::test_nothing_that_a_terminal_acts_on_is_printed",
    ),
    Mutant(
        "an index that is trusted",
        "imagenet/archives.py",
        {"are_within(records, size_of_archive) and labels_fit.all()": "True"},
        "tests/imagenet/test_archives.py::test_an_index_of_somebody_else",
    ),
    Mutant(
        "a buffer that only rank 0 has",
        "common/fsdp.py",
        {"            buffer.copy_(values[name])\n": "            pass\n"},
        "tests/recipes/test_fsdp.py::test_all_of_a_model_is_shared_out",
    ),
    Mutant(
        "a checkpoint that is first built in memory",
        "common/checkpoint.py",
        {
            "        torch.save(content, file)\n": "        import io\n\n"
            "        buffer = io.BytesIO()\n"
            "        torch.save(content, buffer)\n"
            "        file.write(buffer.getvalue())\n"
        },
        "tests/benchmarks/test_benchmarks.py::test_memory",
    ),
    # On a cluster.
    Mutant(
        "an array whose tasks all have the first rate",
        "slurm/array.sh",
        {"${rates[$SLURM_ARRAY_TASK_ID]}": "${rates[0]}"},
        f"{CLUSTER}test_array",
    ),
    Mutant(
        "one requeue more than MAX_REQUEUES",
        "slurm/requeue.sh",
        {'[ "$times" -lt "${MAX_REQUEUES:-10}" ]': '[ "$times" -le "${MAX_REQUEUES:-10}" ]'},
        f"{CLUSTER}test_as_many_requeues_as_it_says",
    ),
    Mutant(
        "USR1 ends a launcher that has no handlers",
        "slurm/requeue.sh",
        {'trap "" USR1 USR2\n"$@" &': '"$@" &'},
        f"{CLUSTER}test_signals_to_a_launcher_without_handlers",
    ),
    Mutant(
        "TERM ends torchrun",
        "slurm/ddp_2nodes.sh",
        {'trap "" USR1 USR2 TERM; exec torchrun': 'trap "" USR1 USR2; exec torchrun'},
        f"{CLUSTER}test_a_job_starts_and_is_told_to_stop[ddp]",
    ),
    Mutant(
        "CUDA graph: the rates are numbers, which the capture freezes",
        "common/graph.py",
        {"group.update(options, lr=rate)": "group.update(options)"},
        f"{CUDA_GRAPH}[mnist/single.py]",
    ),
    Mutant(
        "CUDA graph: the rates on the device stay those of the first step",
        "common/graph.py",
        {
            '                self.rates[index].fill_(group["lr"])\n': (
                "                if self.graph is None:\n"
                '                    self.rates[index].fill_(group["lr"])\n'
            )
        },
        f"{CUDA_GRAPH}[mnist/single.py]",
    ),
    Mutant(
        "CUDA graph: the same dropout in each step",
        "common/graph.py",
        {
            "            self.graph.replay()\n": (
                "            torch.cuda.manual_seed(0)\n            self.graph.replay()\n"
            )
        },
        f"{CUDA_GRAPH}[examples/language_model.py]",
    ),
    Mutant(
        "CUDA graph: each replay uses the batch of the capture",
        "common/graph.py",
        {"                    fixed.copy_(part)\n": "                    pass\n"},
        f"{CUDA_GRAPH}[mnist/single.py]",
    ),
    Mutant(
        "CUDA graph: a Python number in the step, which only the capture adds",
        "common/metrics.py",
        {"if captured or isinstance(": "if isinstance("},
        f"{CUDA_GRAPH}[mnist/single.py]",
    ),
]


def faults_of_the_list() -> list[str]:
    """What is wrong with MUTANTS: texts that do not occur once, or that leave invalid Python."""
    faults = []
    for mutant in MUTANTS:
        path = ROOT / mutant.file
        text = path.read_text() if path.exists() else ""
        for line in mutant.changes:
            if text.count(line) != 1:
                count = text.count(line)
                faults.append(f"{mutant.name}: {count} times in {mutant.file}, not once: {line}")
        try:
            if path.suffix == ".py":
                ast.parse(mutant.changed(text))
        except SyntaxError as error:
            faults.append(f"{mutant.name}: {mutant.file} is no longer valid Python: {error}")
    return faults


def run(tests: list[str], mutant: Mutant | None = None) -> tuple[int, dict, float, str]:
    """Run tests in a copy of the repository, until the first failure if it has a mutant.

    Returns (the status of pytest, {test: (failure, error or skipped, why)} of those that did not
    pass, seconds, what it printed).
    """
    mark = f"{SESSION}-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy = folder / "repository"
        left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "data", "runs")
        shutil.copytree(ROOT, copy, ignore=left_out, symlinks=True)
        if (ROOT.parent / "shared").exists():
            (folder / "shared").symlink_to(ROOT.parent / "shared")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        command += [f"--timeout={TIMEOUT}", f"--basetemp={folder / 'tmp'}"]
        command += [f"--junit-xml={folder / 'report.xml'}", *tests]
        if mutant:
            path = copy / mutant.file
            path.write_text(mutant.changed(path.read_text()))
            command.append("-x")
        else:
            command.append(f"-n{AT_ONCE}")
        began = time.monotonic()
        with open(folder / "printed", "w+") as printed:
            process = subprocess.Popen(
                command,
                cwd=copy,
                env={**os.environ, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                # So that Ctrl-C reaches only this process.
                start_new_session=True,
            )
            try:
                status = process.wait()
            finally:
                kill(mark)
        seconds = time.monotonic() - began
        return status, bad_tests(folder / "report.xml"), seconds, (folder / "printed").read_text()


def kill(mark: str) -> None:
    """Kill all processes whose mark begins with `mark`, even those that failed tests have left."""
    found = True
    while found:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK, "").startswith(mark):
                    process.kill()
                    found.append(process)
            except psutil.Error:
                # The process has ended.
                pass
        psutil.wait_procs(found, timeout=10)


def bad_tests(report: Path) -> dict[str, tuple[str, str]]:
    """{test: (failure, error or skipped, why)} of the tests in a report that did not pass."""
    bad = {}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            test = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
            for part in case:
                if part.tag in ("failure", "error", "skipped"):
                    bad[test] = (part.tag, part.get("message"))
    return bad


def why_not(mutant: Mutant, bad: dict) -> str:
    """Why a mutant's test cannot judge it: it does not pass without it. Empty if it does."""
    for test, (outcome, message) in bad.items():
        if test == mutant.test or test.startswith(f"{mutant.test}["):
            if outcome == "skipped":
                return f"not run: {message}"
            return f"not run: `{test}` fails without it, too"
    return ""


def verdict(status: int, bad: dict) -> str:
    """What became of a mutant: the test that failed, survived, or an error of the list."""
    for test, (outcome, message) in bad.items():
        if outcome == "failure":
            timed_out = message.startswith("Failed: Timeout (>")
            return f"`{test}`, which timed out" if timed_out else f"`{test}`"
    if status == 0:
        return "**survived**"
    # No test has failed: one could not be imported, or its fixture did not work.
    return f"**error**: status {status} of pytest"


def judge(mutant: Mutant, unfit: dict) -> tuple[str, float, str]:
    """Return (what became of a mutant, after how many seconds, what pytest printed).

    If its test does not pass without the mutant (see `unfit`), nothing runs.
    """
    reason = why_not(mutant, unfit)
    if reason:
        return reason, 0, ""
    status, bad, seconds, printed = run([mutant.test], mutant)
    return verdict(status, bad), seconds, printed


def main() -> int:
    if faults := faults_of_the_list():
        print("\n".join(faults), file=sys.stderr)
        return 1
    words = sys.argv[1:]
    chosen = [
        mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)
    ]
    if not chosen:
        print(f"no mutant has one of these words in its name: {' '.join(words)}", file=sys.stderr)
        return 1
    tests = list(dict.fromkeys(mutant.test for mutant in chosen))
    print(f"{len(chosen)} mutants; first, their {len(tests)} tests run without them", flush=True)
    began = time.monotonic()
    status, unfit, seconds, printed = run(tests)
    if status not in (0, 1):
        print(printed, file=sys.stderr)
        return 1
    failed = [test for test, (outcome, _) in unfit.items() if outcome != "skipped"]
    if failed:
        print(printed, file=sys.stderr)
    print(f"{seconds:.0f} s; {len(failed)} failed\n\n| mutant | file | caught by | seconds |")
    print("| --- | --- | --- | ---: |", flush=True)
    problems = len(failed)
    caught = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            judged = pool.map(judge, chosen, [unfit] * len(chosen))
            for mutant, (result, seconds, printed) in zip(chosen, judged, strict=True):
                print(f"| {mutant.name} | {mutant.file} | {result} | {seconds:.0f} |", flush=True)
                if result.startswith("**"):
                    problems += 1
                    print(printed, file=sys.stderr)
                elif printed:
                    caught += 1
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            kill(SESSION)
            raise
    minutes = (time.monotonic() - began) / 60
    print(f"\n{caught} of {len(chosen)} caught, in {minutes:.0f} minutes")
    return 1 if problems else 0


if __name__ == "__main__":
    # Like Ctrl-C: leave nothing behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
