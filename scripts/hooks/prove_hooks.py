"""What scripts/prove.py has each rank write down, once its script has imported common/run.py.

After each step this is a checksum of each tensor of `state`, in PROVE/rank-N.jsonl. It keeps the
weights of rank 0 before and after the first step and after the last one, looks for objects that
change and are not in `state`, and asks the models of all ranks about one batch. It also sends the
signal that the proof is about.
"""

import contextlib
import functools
import json
import os
import signal
import sys

from hook_tools import checksum, is_tensor, leaves, normalise_each_sample

# What changes in training has changed by then.
LOOK_AGAIN_AFTER = 3


def install(module):
    """Let common.run.Run tell a Recorder of each step."""
    run_class = module.Run
    steps, save = run_class.steps, run_class.save

    def recorded_steps(run, train):
        if not hasattr(run, "recorder"):
            run.recorder = Recorder(run)
            advance = run.position.advance

            def advance_and_look():
                advance()
                run.recorder.look()

            run.position.advance = advance_and_look
        return steps(run, train)

    def recorded_save(run, *args, **kwargs):
        save(run, *args, **kwargs)
        # Before the last evaluation.
        if hasattr(run, "recorder") and "PROVE_EVALUATE" in os.environ:
            run.recorder.take_weights(os.environ["PROVE_EVALUATE"])

    run_class.steps, run_class.save = recorded_steps, recorded_save


class Recorder:
    def __init__(self, run):
        import torch

        self.run = run
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed:
            self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        elif "horovod.torch" in sys.modules:
            import horovod.torch as hvd

            self.rank, self.ranks = hvd.rank(), hvd.size()
        else:
            self.rank, self.ranks = 0, 1
        self.folder = os.environ["PROVE"]
        self.steps = run.position.steps
        self.first = self.steps + 1
        if os.environ.get("PROVE_LIKE_ONE"):
            self.leave_out_dropout()
            self.leave_out_batch_statistics()
        if os.environ.get("PROVE_DISTURB"):
            self.disturb()
        self.keep_weights("before.pt")
        self.keep_first_batch()
        self.outside = None

    def look(self):
        """Write down what there is after a step, of which the batch may be a part."""
        steps = self.run.position.steps
        if steps == self.steps:
            return
        self.steps = steps
        line = {"step": steps, "ranks": self.ranks, "checksums": self.checksums()}
        if steps == self.first:
            self.keep_weights("after.pt")
            line["has_batch_norm"] = any(self.batch_norms())
            self.outside = self.objects_outside()
        elif steps == self.first + LOOK_AGAIN_AFTER:
            line["outside"] = self.changed()
            line["checksums"].update(self.answer_to_first_batch())
        if steps == self.run.position.max_steps:
            self.keep_weights("end.pt")
        with open(f"{self.folder}/rank-{self.rank}.jsonl", "a") as file:
            print(json.dumps(line), file=file, flush=True)
        if os.environ.get("PROVE_KILL") == str(steps):
            os.kill(os.getpid(), signal.SIGKILL)
        # The last rank, as rank 0 is the one that saves.
        if os.environ.get("PROVE_TERM") == str(steps) and self.rank == self.ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def state(self):
        return {name: part.state_dict() for name, part in self.run.state.items()}

    def checksums(self):
        """{name: checksum} of all tensors and numbers of the state. Sums are added up later."""
        parts = {name: part for name, part in self.state().items() if name != "sums"}
        # None is what rank 0 alone has, with FSDP.
        return {name: checksum(value) for name, value in leaves(parts) if value is not None}

    def models(self):
        """{name: a part of the state that has weights}; an EMA is one of them."""
        from torch import nn

        # That of FSDP is no module.
        return {
            name: part
            for name, part in self.run.state.items()
            if name == "model" or isinstance(part, nn.Module)
        }

    def keep_weights(self, name):
        """Write the weights of rank 0 to a file, once: {"model": its state_dict, ...}."""
        import torch

        weights = {model: part.state_dict() for model, part in self.models().items()}
        path = f"{self.folder}/{name}"
        if self.rank == 0 and not os.path.exists(path):
            torch.save(weights, path)

    def take_weights(self, path):
        """Let the models have those of another run's end, for the last evaluation."""
        import torch

        if self.steps != self.run.position.max_steps:
            return
        weights = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in self.models().items():
            part.load_state_dict(weights[name])

    def parts(self):
        """The objects in the state, and their attributes: FSDP's wrapper has its model as one."""
        parts = [*self.run.state.values()]
        return parts + [value for part in parts for value in vars(part).values()]

    def modules(self):
        """Yield each module in the state."""
        from torch import nn

        for part in self.parts():
            if isinstance(part, nn.Module):
                yield from part.modules()

    def leave_out_dropout(self):
        """Each rank draws its own."""
        from torch import nn

        for module in self.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            # nn.LSTM, nn.MultiheadAttention and others.
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0

    def leave_out_batch_statistics(self):
        """Let BatchNorm normalise each sample by itself, as each rank has a batch of its own."""
        for module in self.batch_norms():
            module.forward = functools.partial(normalise_each_sample, module)

    def batch_norms(self):
        """Yield each module that takes the statistics of a rank's batch."""
        from torch import nn

        for module in self.modules():
            is_one = isinstance(module, nn.modules.batchnorm._BatchNorm)
            is_frozen = not module.training
            if is_one and not is_frozen and not isinstance(module, nn.SyncBatchNorm):
                yield module

    def disturb(self):
        """Change each weight by about one rounding, to see how far that grows."""
        import torch

        generator = torch.Generator().manual_seed(0)
        for module in self.modules():
            for weight in module.parameters(recurse=False):
                if not weight.is_floating_point():
                    continue
                # FSDP's tensor is whole on one process.
                tensor = weight.to_local() if hasattr(weight, "to_local") else weight
                signs = torch.randint(-1, 2, tensor.shape, generator=generator)
                roundings = signs.to(tensor) * torch.finfo(tensor.dtype).eps
                tensor.detach().mul_(1 + roundings)

    def keep_first_batch(self):
        """Let the model of rank 0 write what it is first given to a file."""
        import torch
        from torch.utils._pytree import tree_map

        model = self.run.state["model"]
        path = f"{self.folder}/batch.pt"
        if self.rank > 0 or os.path.exists(path) or not can_be_asked(model):
            return

        def keep(module, args, kwargs):
            handle.remove()
            # A view is saved with all that it is a view of.
            batch = tree_map(lambda v: v.clone() if is_tensor(v) else v, (args, kwargs))
            # It may hold anything.
            with contextlib.suppress(Exception):
                torch.save(batch, path)

        handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def answer_to_first_batch(self):
        """{name: checksum} of what the model makes of rank 0's first batch.

        So a model shows what it has learned and keeps outside of its state_dict.
        """
        import copy

        import torch

        model = self.run.state["model"]
        if not can_be_asked(model):
            return {}
        try:
            # Only what was on the device of rank 0 moves to that of this rank.
            device = {"cuda:0": str(next(model.parameters()).device)}
            path = f"{self.folder}/batch.pt"
            args, kwargs = torch.load(path, map_location=device, weights_only=False)
            with torch.no_grad(), torch.random.fork_rng():
                # The ranks have drawn different numbers.
                torch.manual_seed(0)
                answer = copy.deepcopy(model).eval()(*args, **kwargs)
            tensors = [checksum(value) for _, value in leaves(answer) if is_tensor(value)]
        # It may be anybody's, and say no to a copy, to eval, or to its input.
        except Exception:
            return {}
        return {"the answer to one batch": checksum(tensors)} if tensors else {}

    def objects_outside(self):
        """{id: (name, object, checksum)} of what may be a part of training, and is not saved."""
        import gc
        import random

        import numpy
        import torch
        from torch import nn

        kinds = (
            nn.Module,
            torch.optim.Optimizer,
            torch.optim.lr_scheduler.LRScheduler,
            torch.amp.GradScaler,
            torch.Generator,
            numpy.random.Generator,
        )
        # Libraries have such of their own.
        kinds_if_named = (numpy.random.RandomState, random.Random)
        # A generator is known to its variable alone, and not to the garbage collector.
        of_callers = [item for variables in variables_of_callers() for item in variables.items()]
        named = {id(value): name for name, value in of_callers if name != "self"}
        existing = [*gc.get_objects(), *(value for _, value in of_callers)]
        parts = self.parts()
        saved = set(map(id, parts))
        tensors = {value.data_ptr() for _, value in leaves(self.state()) if is_tensor(value)}
        modules = [part for part in parts if isinstance(part, nn.Module)]
        parts_of_others = {id(module) for part in modules for module in part.modules()}
        candidates = {}
        for each in existing:
            # Not isinstance: it asks proxies, which may raise anything.
            wanted = kinds + kinds_if_named if id(each) in named else kinds
            if not issubclass(type(each), wanted) or id(each) in saved:
                continue
            if isinstance(each, nn.Module):
                parts_of_others |= {id(part) for part in each.modules() if part is not each}
                own = [*each.parameters(), *each.buffers()]
                if not own or {tensor.data_ptr() for tensor in own} <= tensors:
                    continue
            candidates[id(each)] = each
        return {
            number: (named.get(number, ""), each, checksum_of(each))
            for number, each in candidates.items()
            if number not in parts_of_others
        }

    def changed(self):
        """The names of those objects that have changed since the first step."""
        return [
            f"{type(each).__name__} {name}".strip()
            for name, each, before in self.outside.values()
            if checksum_of(each) != before
        ]


def can_be_asked(model):
    """Whether all ranks should give the same answer to a batch.

    Not with FSDP, whose wrapper is no module, and with statistics of each rank. And torch.compile
    would trace the hook.
    """
    from torch import nn

    statistics = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return (
        isinstance(model, nn.Module)
        and model._compiled_call_impl is None
        and not any(
            isinstance(module, statistics) and module.training and module.track_running_stats
            for module in model.modules()
        )
    )


def variables_of_callers():
    """Yield the local variables, a dict, of each function that is running."""
    frame = sys._getframe()
    while frame:
        yield dict(frame.f_locals)
        frame = frame.f_back


def checksum_of(each):
    """Of an object that is not in the state."""
    if hasattr(each, "state_dict"):
        try:
            state = each.state_dict()
        # It may be anybody's.
        except Exception as error:
            state = str(error)
    elif hasattr(each, "get_state"):
        state = each.get_state()
    elif hasattr(each, "getstate"):
        state = each.getstate()
    else:
        state = repr(each.bit_generator.state)
    return [checksum(value) for _, value in leaves(state)]
