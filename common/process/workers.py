"""A torch DataLoader whose worker processes start early and end with their rank."""

import os
import signal
import tempfile
import threading

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from common.errors import InputError
from common.process import signals
from common.process.parent import die_with_parent


def data_loader(dataset: Dataset, sampler, batch_size: int, workers: int, **options) -> DataLoader:
    """A DataLoader whose `workers` processes start here, and live until this process ends.

    An IterableDataset takes no `sampler`. `options` are further arguments of DataLoader, such as
    collate_fn and pin_memory.
    """
    if isinstance(dataset, IterableDataset):
        batches = None
        options["batch_size"] = batch_size
    else:
        batches = QuietBatchSampler(sampler, batch_size, drop_last=False)
        options["batch_sampler"] = batches
    if workers:
        check_temporary_folder()
    loader = DataLoader(
        dataset,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=begin_worker,
        # Else each epoch draws a number from the default generator, which dropout uses.
        generator=torch.Generator(),
        # fork, also under mp.spawn: workers share the dataset's memory.
        multiprocessing_context="fork" if workers else None,
        **options,
    )
    # Start the workers now, by an epoch that reads nothing (of a stream, a few batches). Training
    # starts threads (Gloo, autograd), and in CPython 3.11 a fork can deadlock while one creates or
    # deletes its Python state: 1 fork in 400, on two busy cores.
    if workers:
        iter(loader)
    if batches:
        batches.quiet = False
    return loader


def check_temporary_folder() -> None:
    """Raise InputError if its path is too long: workers pass tensors through sockets in it."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise InputError(
            f"loader workers need a folder for temporary files, in TMPDIR or /tmp: {error.strerror}"
        ) from error
    longest = 107 - len("/pymp-12345678/listener-12345678")
    if len(os.fsencode(folder)) > longest:
        raise InputError(
            f"TMPDIR={folder} has more than {longest} characters, too many for the sockets of "
            "loader workers: set TMPDIR to a shorter name"
        )


class QuietBatchSampler(BatchSampler):
    """A BatchSampler that yields nothing while it is `quiet`."""

    quiet = True

    def __iter__(self):
        return iter(()) if self.quiet else super().__iter__()


def sent_by_the_rank() -> bool:
    """Wait for SIGTERM; return whether this worker's rank sent it."""
    if hasattr(signal, "sigwaitinfo"):
        return signal.sigwaitinfo({signal.SIGTERM}).si_pid == os.getppid()
    # macOS does not tell who sent it.
    signal.sigwait({signal.SIGTERM})
    return True


def begin_worker(_) -> None:
    """Let SIGTERM end a worker only if its rank sent it, and ignore SIGUSR1.

    SLURM sends both to all processes of a job, but the rank needs data until it has saved. SIGUSR2
    prints the worker's stacks.
    """

    def wait_for_the_rank():
        while not sent_by_the_rank():
            pass
        os._exit(0)

    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Before any thread starts, as threads inherit the mask: one without it would get SIGTERM.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signals.act_on(signal.SIGUSR2, signals.print_stacks)
    threading.Thread(target=wait_for_the_rank, daemon=True).start()
