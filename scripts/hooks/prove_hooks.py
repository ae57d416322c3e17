"""Hooks for scripts/prove.py, installed once the script has imported common/run.py.

For each step rank N writes a line to PROVE/steps-N.jsonl: checksums of each tensor of `state`, of
the batch and of the random states, and the rates. A line of PROVE/evaluations-N.jsonl describes the
modes and weights of an evaluation. Rank 0 saves its weights before and after the first step of a
process, and at the end. The hooks also send the signal of the proof.

An epoch ends after EPOCH_STEPS steps, and an evaluation has VAL_SAMPLES samples, in batches of
VAL_BATCH: so a short run has several of both, and neither divides evenly.
"""

import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import types

from hook_tools import checksum, is_tensor, leave_out_dropout, leaves, normalise_each_sample

EPOCH_STEPS = 4
# A prime, so that no number of ranks and no batch size divides it.
VAL_SAMPLES = 37
VAL_BATCH = 5
# After this many further steps, everything that training changes has changed.
LOOK_AGAIN_AFTER = 3
# A longer list of numbers is data, not state.
LONGEST_VARIABLE = 20
# The parts that Run adds to the state.
OF_THE_RUN = ("position", "sums", "best")
LIKE_ONE = "PROVE_LIKE_ONE" in os.environ

# The Recorder of this process, once training has started.
recorder = None


def install_nn(module):
    """Let each kind of dropout report that it draws, or turn it off."""
    torch = types.SimpleNamespace(nn=module)
    leave_out_dropout(torch, drew=note_draw, leave_out=LIKE_ONE)


def note_draw(_):
    import torch

    if torch.compiler.is_compiling():
        return
    if recorder and recorder.evaluated:
        recorder.evaluated["modes"].add("dropout draws")


def install(module):
    """Let common.run report each step, save and evaluation to a Recorder."""
    run_class = module.Run
    steps, save, batches = run_class.steps, run_class.save, run_class.batches
    seed_step = module.seed_step

    def recorded_steps(run, train):
        global recorder
        if recorder is None:
            recorder = Recorder(run)
            advance = run.position.advance

            def advance_and_look():
                advance()
                recorder.look()

            run.position.advance = advance_and_look
        recorder.train_loader = train.loader
        for batch in steps(run, train):
            recorder.take_batch(batch)
            yield batch

    def recorded_seed_step(*args, **kwargs):
        seed_step(*args, **kwargs)
        recorder.seeded = random_states(recorder.run.world.device)

    def recorded_batches(run, loader):
        if recorder is None:
            yield from batches(run, loader)
            return
        # Some scripts evaluate on training data.
        if loader is not recorder.train_loader:
            shorten(loader)
        with recorder.evaluation():
            yield from batches(run, loader)

    def recorded_save(run, *args, **kwargs):
        save(run, *args, **kwargs)
        if recorder is None:
            return
        recorder.saved = recorder.checksums_of_weights()
        # This is the save before the last evaluation.
        if "PROVE_EVALUATE" in os.environ and recorder.steps == run.position.max_steps:
            recorder.take_weights(os.environ["PROVE_EVALUATE"])

    module.Position = short_epochs(module.Position)
    module.seed_step = recorded_seed_step
    run_class.steps = recorded_steps
    run_class.batches = recorded_batches
    run_class.save = recorded_save


def short_epochs(position_class):
    """A Position with EPOCH_STEPS steps per epoch, but with the rates of full-length epochs."""

    class ShortEpochs(position_class):
        @property
        def length(self):
            return min(self.sampler.length, EPOCH_STEPS * self.sampler.global_batch)

        @property
        def epochs_done(self):
            return (self.epoch * self.length + self.samples) / self.sampler.length

        @property
        def epoch_over(self):
            return self.samples + self.sampler.global_batch > self.length

        @property
        def _steps_left_in_epoch(self):
            return max(0, self.length - self.samples) // self.sampler.global_batch

    return ShortEpochs


def shorten(loader):
    """Limit an evaluation to the first samples of its data set, in small batches."""
    # A DataLoader's batch_sampler has its sampler and batch size.
    holder = getattr(loader, "batch_sampler", None)
    if holder is None:
        holder = loader
    sampler = getattr(holder, "sampler", None)
    if sampler is None or hasattr(holder, "is_short"):
        return
    if hasattr(sampler, "num_replicas"):
        # torch's DistributedSampler makes equal shares of its whole data set.
        data_set = range(min(VAL_SAMPLES, len(sampler.dataset)))
        options = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
        sampler.__init__(data_set, *(getattr(sampler, option) for option in options))
    elif hasattr(sampler, "global_batch"):
        # EpochSampler drops samples that do not fill a global batch.
        sampler.length = max(min(VAL_SAMPLES, sampler.length), sampler.global_batch)
        sampler.set_epoch(sampler.epoch)
    else:
        # The sampler may yield something other than numbers.
        with contextlib.suppress(TypeError):
            holder.sampler = [index for index in sampler if index < VAL_SAMPLES]
    holder.batch_size = VAL_BATCH
    holder.is_short = True


class Recorder:
    def __init__(self, run):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.run = run
        self.rank = run.world.rank
        self.ranks = run.world.size
        self.folder = os.environ["PROVE"]
        self.steps = run.position.steps
        self.first = self.steps + 1
        # The peak rates, before the schedule changes them.
        self.peaks = self.rates()
        # Checksums of the batches of a step, and of the random states at its start.
        self.batches = []
        self.seeded = {}
        # The names of weights that had a gradient, and the weights in an optimizer, at a step.
        self.with_gradient = set()
        self.in_optimizer = set()
        # What is known of the current evaluation, and the checksums of the last save.
        self.evaluated = None
        self.saved = set()
        register_optimizer_step_pre_hook(self.note_gradients)
        if LIKE_ONE:
            self.leave_out_dropout()
            self.leave_out_batch_statistics()
        if "PROVE_DISTURB" in os.environ:
            self.disturb()
        self.keep_weights(f"before-{self.first}.pt")
        self.keep_first_batch()
        self.outside = None
        self.trained = None

    def take_batch(self, batch):
        self.batches.append(checksum([checksum(value) for _, value in leaves(batch)]))

    def look(self):
        """Record the state after a step."""
        steps = self.run.position.steps
        if steps == self.steps:
            return
        self.steps = steps
        line = {
            "step": steps,
            "ranks": self.ranks,
            "checksums": self.checksums(),
            "epoch": self.run.position.epoch,
            "shuffled": getattr(self.run.position.sampler, "shuffle", True),
            "batch": checksum(self.batches),
            "drawn": self.drawn(),
            "rates": self.peaks,
            "no_longer_trained": self.no_longer_trained(),
        }
        self.batches = []
        if steps == self.first:
            line["has_batch_norm"] = any(self.batch_norms())
            self.outside = self.objects_outside()
        elif steps == self.first + LOOK_AGAIN_AFTER:
            line["outside"] = self.changed()
            line["checksums"].update(self.answer_to_first_batch())
        kept = os.environ.get("PROVE_KEEP", "").split(",")
        if steps == self.first or str(steps) in kept:
            self.keep_weights(f"after-{steps}.pt")
        if steps == self.run.position.max_steps:
            self.keep_weights("end.pt")
            line["weights"] = self.known_of_weights()
            line["variables"] = variables_of_script()
        self.write("steps", line)
        if os.environ.get("PROVE_KILL") == str(steps):
            os.kill(os.getpid(), signal.SIGKILL)
        # Signal the last rank: rank 0, which saves, must learn of it.
        if os.environ.get("PROVE_TERM") == str(steps) and self.rank == self.ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def write(self, kind, line):
        with open(f"{self.folder}/{kind}-{self.rank}.jsonl", "a") as file:
            print(json.dumps(line), file=file, flush=True)

    def state(self):
        return {name: part.state_dict() for name, part in self.run.state.items()}

    def checksums(self):
        """{name: checksum} of all tensors and numbers of the state, except sums, added up later."""
        parts = {name: part for name, part in self.state().items() if name != "sums"}
        # With FSDP, values that only rank 0 has are None elsewhere.
        return {name: checksum(value) for name, value in leaves(parts) if value is not None}

    def drawn(self):
        """{generator: checksum} of the generators that drew numbers in this step."""
        now = random_states(self.run.world.device)
        return {name: value for name, value in now.items() if self.seeded.get(name) != value}

    def rates(self):
        """{group: its rate} of all optimizers in the state."""
        return {
            f"{name} group {number}": float(group["lr"])
            for name, part in self.run.state.items()
            for number, group in enumerate(getattr(unwrapped(part), "param_groups", []))
        }

    def parts_with_weights(self):
        """{name: part of the state} whose weights an evaluation may use, such as an EMA."""
        return {
            name: part
            for name, part in self.run.state.items()
            if name not in OF_THE_RUN and not hasattr(unwrapped(part), "param_groups")
        }

    def keep_weights(self, name):
        """Write the weights of rank 0 to a file, once: {"model": its state_dict, ...}."""
        import torch

        weights = {part: of.state_dict() for part, of in self.parts_with_weights().items()}
        path = f"{self.folder}/{name}"
        if self.rank == 0 and not os.path.exists(path):
            torch.save(weights, path)

    def take_weights(self, path):
        """Load the weights from the end of another run, for the last evaluation."""
        import torch

        weights = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in self.parts_with_weights().items():
            part.load_state_dict(weights[name])

    def parts(self):
        """The objects in the state, and their attributes: WholeModel's model is one."""
        parts = [*self.run.state.values()]
        return parts + [value for part in parts for value in vars(part).values()]

    def modules(self):
        """Yield each module in the state."""
        from torch import nn

        for part in self.parts():
            if isinstance(part, nn.Module):
                yield from part.modules()

    def named_models(self):
        """{name: the module that a part of the state is, or wraps}."""
        from torch import nn

        found = {name: unwrapped(part) for name, part in self.run.state.items()}
        return {name: part for name, part in found.items() if isinstance(part, nn.Module)}

    def named_weights(self):
        """Yield (name, weight) for all models, with the names of keep_weights()."""
        for part, model in self.named_models().items():
            for name, weight in model.named_parameters():
                yield f"{part}.{name}", weight

    def note_gradients(self, optimizer, args, kwargs):
        """Note the gradients before a step of any optimizer."""
        self.with_gradient |= {
            name for name, weight in self.named_weights() if weight.grad is not None
        }
        self.in_optimizer |= {
            id(weight) for group in optimizer.param_groups for weight in group["params"]
        }

    def known_of_weights(self):
        """{name: whether the weight should train, had a gradient, and is in an optimizer}."""
        return {
            name: {
                "trains": weight.requires_grad,
                "has_gradient": name in self.with_gradient,
                "in_optimizer": id(weight) in self.in_optimizer,
            }
            for name, weight in self.named_weights()
        }

    def no_longer_trained(self):
        """The modules that were in training mode in the first step, but are not now."""
        in_training = {
            (part, name)
            for part, model in self.named_models().items()
            for name, module in model.named_modules()
            if module.training
        }
        if self.trained is None:
            self.trained = in_training
        # Leave out averages of the weights: their mode does not matter in a step.
        parts = {name.partition(".")[0] for name in self.with_gradient}
        gone = self.trained - in_training
        return sorted(f"{part}.{name}".strip(".") for part, name in gone if part in parts)

    @contextlib.contextmanager
    def evaluation(self):
        """Record the modes and weights that an evaluation uses."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self.evaluated = {"modes": set(), "inside": 0, "outside": set(), "seen": set()}
        before = self.checksums_by_name()
        hook = register_module_forward_pre_hook(self.note_module)
        try:
            yield
        finally:
            hook.remove()
            known, self.evaluated = self.evaluated, None
            after = self.checksums_by_name()
            line = {
                "step": self.steps,
                "modes": sorted(known["modes"]),
                "inside": known["inside"],
                "outside": sorted(known["outside"]),
                "changed": [name for name in before if before[name] != after.get(name)],
            }
            self.write("evaluations", line)

    def note_module(self, module, inputs):
        """Called before the forward of any module in an evaluation."""
        import torch

        if torch.compiler.is_compiling() or module in self.evaluated["seen"]:
            return
        self.evaluated["seen"].add(module)
        if takes_batch_statistics(module) and module.training:
            self.evaluated["modes"].add(f"{type(module).__name__} takes the batch's statistics")
        # Shards cannot be compared with the full weights of a checkpoint.
        if self.is_sharded():
            return
        for name, weight in module.named_parameters(recurse=False):
            if checksum(weight) in self.saved:
                self.evaluated["inside"] += 1
            elif weight.dtype in (torch.float32, torch.float64):
                self.evaluated["outside"].add(f"{type(module).__name__}.{name} {checksum(weight)}")

    def is_sharded(self):
        return any(hasattr(weight, "to_local") for _, weight in self.named_weights())

    def checksums_by_name(self):
        """{name: checksum} of the weights and buffers of this rank's models."""
        return {
            f"{part}.{name}": checksum(value)
            for part, model in self.named_models().items()
            for name, value in (*model.named_parameters(), *model.named_buffers())
        }

    def checksums_of_weights(self):
        """Checksums of all tensors of the state, as a set; all ranks make this call."""
        found = set(self.checksums_by_name().values())
        return found | {checksum(value) for _, value in leaves(self.state()) if is_tensor(value)}

    def leave_out_dropout(self):
        """Turn off dropout in nn.LSTM and the like, which do not call torch.nn.functional."""
        from torch import nn

        for module in self.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0

    def leave_out_batch_statistics(self):
        """Let BatchNorm normalise each sample by itself, because each rank has its own batch."""
        for module in self.batch_norms():
            module.forward = functools.partial(normalise_each_sample, module)

    def batch_norms(self):
        """Yield each module that uses the statistics of its rank's batch."""
        from torch import nn

        for module in self.modules():
            is_frozen = not module.training
            is_one = takes_batch_statistics(module) and not isinstance(module, nn.SyncBatchNorm)
            if is_one and not is_frozen:
                yield module

    def disturb(self):
        """Change each weight by about one rounding error, to see how far that grows."""
        import torch

        generator = torch.Generator().manual_seed(0)
        for module in self.modules():
            for weight in module.parameters(recurse=False):
                if not weight.is_floating_point():
                    continue
                # With FSDP, this rank's shard.
                tensor = weight.to_local() if hasattr(weight, "to_local") else weight
                signs = torch.randint(-1, 2, tensor.shape, generator=generator)
                roundings = signs.to(tensor) * torch.finfo(tensor.dtype).eps
                tensor.detach().mul_(1 + roundings)

    def keep_first_batch(self):
        """Let rank 0 write the first input of its model to a file."""
        import torch
        from torch.utils._pytree import tree_map

        model = self.run.state["model"]
        path = f"{self.folder}/batch.pt"
        if self.rank > 0 or os.path.exists(path) or not can_be_asked(model):
            return

        def keep(module, args, kwargs):
            handle.remove()
            # Clone: a view would be saved with its whole base tensor.
            batch = tree_map(lambda v: v.clone() if is_tensor(v) else v, (args, kwargs))
            # The input may hold anything.
            with contextlib.suppress(Exception):
                torch.save(batch, path)

        handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def answer_to_first_batch(self):
        """{name: checksum} of the model's outputs for rank 0's first batch.

        They also depend on anything that the model has learned but keeps outside of its state_dict.
        """
        import copy

        import torch

        model = self.run.state["model"]
        if not can_be_asked(model):
            return {}
        try:
            # Move what was on rank 0's device to this rank's; leave the rest.
            device = {"cuda:0": str(next(model.parameters()).device)}
            path = f"{self.folder}/batch.pt"
            args, kwargs = torch.load(path, map_location=device, weights_only=False)
            with torch.no_grad(), torch.random.fork_rng():
                # By now the random states of the ranks differ.
                torch.manual_seed(0)
                answer = copy.deepcopy(model).eval()(*args, **kwargs)
            tensors = [checksum(value) for _, value in leaves(answer) if is_tensor(value)]
        # Any model: it may raise on deepcopy, on eval() or on its input.
        except Exception:
            return {}
        return {"the output for one batch": checksum(tensors)} if tensors else {}

    def objects_outside(self):
        """{id: (name, object, checksum)} of what may be part of training, but is not saved."""
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
        # Only if the script has a name for them: libraries have their own.
        kinds_if_named = (numpy.random.RandomState, random.Random)
        # The garbage collector does not track generators: find them by variable.
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
            # Not isinstance: with proxy objects it may raise anything.
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
        """The names of the objects outside of the state that have changed since the first step."""
        return [
            f"{type(each).__name__} {name}".strip()
            for name, each, before in self.outside.values()
            if checksum_of(each) != before
        ]


def unwrapped(part):
    """The model or optimizer that a part of the state is, or has as an attribute (WholeModel)."""
    import torch

    kinds = (torch.nn.Module, torch.optim.Optimizer)
    if isinstance(part, kinds):
        return part
    return next((each for each in vars(part).values() if isinstance(each, kinds)), part)


def takes_batch_statistics(module):
    from torch import nn

    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def random_states(device):
    """{generator: checksum of its state} of the generators that seed_step() seeds."""
    import random

    import numpy
    import torch

    states = {
        "torch": checksum(torch.get_rng_state()),
        "numpy": checksum(numpy.random.get_state()[1:3]),
        "random": checksum(random.getstate()),
    }
    if device.type != "cpu":
        states[device.type] = checksum(torch.get_device_module(device).get_rng_state())
    return states


def can_be_asked(model):
    """Whether all ranks should compute the same output for a batch.

    Not with FSDP, whose part of the state is not a module; nor with BatchNorm, whose statistics
    differ between ranks; nor with torch.compile, which would trace the hook.
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


def callers():
    """Yield the frame of each function that is running."""
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back


def variables_of_callers():
    """Yield the local variables, a dict, of each function that is running."""
    for frame in callers():
        yield dict(frame.f_locals)


def variables_of_script():
    """{name: value} of the numbers in the script's variables, and in objects of its classes."""
    # The script's module is __mp_main__ in a process of mp.spawn.
    names = ("__main__", "__mp_main__")
    variables = {}
    for frame in callers():
        if frame.f_globals.get("__name__") in names:
            variables |= frame.f_globals | frame.f_locals
    numbers = {}
    for name, value in variables.items():
        if type(value).__module__ in names:
            value = getattr(value, "__dict__", None)
        found = list(itertools.islice(leaves(value, name), LONGEST_VARIABLE + 1))
        # Leave out, for example, the parameter group of an optimizer.
        is_of_torch = any(is_tensor(part) for _, part in found)
        if len(found) <= LONGEST_VARIABLE and not is_of_torch:
            numbers |= {part: number for part, number in found if type(number) in (int, float)}
    return numbers


def checksum_of(each):
    """A checksum of an object that is not in the state."""
    if hasattr(each, "state_dict"):
        try:
            state = each.state_dict()
        # Any object: it may raise anything.
        except Exception as error:
            state = str(error)
    elif hasattr(each, "get_state"):
        state = each.get_state()
    elif hasattr(each, "getstate"):
        state = each.getstate()
    else:
        state = repr(each.bit_generator.state)
    return [checksum(value) for _, value in leaves(state)]
