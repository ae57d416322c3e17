"""Hooks for scripts/check.py: each process of a run writes its events to CHECK/PID.jsonl.

The script is not edited, and the hooks add no collective. CHECK_MODE says which run this is:

    watch      the script as it is; long passes over a loader are cut short
    prove      the script as it is, within a run of prove.py
    share      three steps without dropout, BatchNorm per sample, and the next evaluation
    whole      the same three steps, in which each rank gets the batches of all ranks
    one        the same on one process
    regrouped  like share, but an evaluation gets its samples in batches of other sizes
"""

import collections
import json
import multiprocessing.util
import os
import random
import shutil
import sys
import time
import zlib

from hook_tools import (
    around,
    checksum,
    is_tensor,
    leave_out_dropout,
    leaves,
    local,
    split_batch_norm,
)

# Record the first steps in full, and then every EVERY-th.
FIRST = 5
EVERY = 50
# End a pass after this many batches and steps, and the run after this many training passes.
BATCHES = 50
STEPS = 10
PASSES = 3
# How many steps the compared runs take.
COMPARED_STEPS = 3
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
GATHERS = ("all_gather", "gather", "all_gather_into_tensor", "all_gather_object", "gather_object")
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div")
LOSSES += ("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss")


class Watcher:
    """Records what this process does, and writes events to its file."""

    def __init__(self, torch):
        self.torch = torch
        self.folder = os.environ["CHECK"]
        self.mode = os.environ["CHECK_MODE"]
        self.is_compared = self.mode in ("share", "whole", "one", "regrouped")
        self.known_rank = int(os.environ.get("RANK", 0))
        self.told = set()
        self.steps = 0
        # How many steps are nested: Horovod's step calls the step of the optimizer.
        self.depth = 0
        self.optimizers = []
        self.names = {}
        self.weights = {}
        self.roots = {}
        self.kept = {"start": {}, "end": {}, "gradients": {}}
        # Modules whose forward is running, outermost first; then {id: (module, whether nested)}.
        self.running = []
        self.called = {}
        self.gathers = 0
        self.reductions = 0
        # Passes over loaders, as (loader, number). Pending: the next forward uses their batches.
        self.loaders = {}
        self.passes = []
        self.pending = set()
        self.forward_since_fetch = False
        self.is_fetching = False
        # Unsure: forwards with gradients have used them, but no backward has followed yet.
        self.unsure = set()
        # Used since the last step, in any step (trained), and in any evaluation (evaluated).
        self.used = set()
        self.trained = set()
        self.rounds = 0
        self.evaluated = set()
        self.after_evaluation = False
        self.batches_used = 0
        self.backwards = 0
        self.loss_gradients = []
        self.waits = collections.Counter()
        self.waits_of_step = set()
        self.scaled = False
        self.scaler = None
        # The optimizers whose gradients were set to zero since their last step.
        self.zeroed = set()
        # Folders that the script has created.
        self.made = []
        # Whether it computes in 16 bits.
        self.short = False
        self.batches = {}
        path = f"{self.folder}/batches-{self.mode}.json"
        if os.path.exists(path):
            with open(path) as file:
                self.batches = json.load(file)

    # Events.

    def emit(self, event, **more):
        """Write an event; a forked loader worker has its own file."""
        line = {"event": event, "rank": self.rank(), "step": self.steps}
        line |= {"reductions": self.reductions, "gathers": self.gathers, **more}
        with open(f"{self.folder}/{os.getpid()}.jsonl", "a") as file:
            # Not print(): it is hooked.
            file.write(json.dumps(line, default=str) + "\n")

    def emit_once(self, event, *key, **more):
        if (event, *key) not in self.told:
            self.told.add((event, *key))
            self.emit(event, **more)

    def rank(self):
        """This process's rank, even after the script has destroyed its group."""
        distributed = self.torch.distributed
        hvd = sys.modules.get("horovod.torch")
        if distributed.is_available() and distributed.is_initialized():
            self.known_rank = distributed.get_rank()
        elif hvd and hvd.is_initialized():
            self.known_rank = hvd.rank()
        return self.known_rank

    def end(self):
        """Write the last events, and end the process as if the script had finished."""
        self.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Other ranks may still be waiting for this one.
        time.sleep(0.5)
        os._exit(0)

    def close(self):
        for indices in self.passes:
            indices.tell()
        self.emit_once("end")
        if self.is_compared and self.kept["end"]:
            self.torch.save.original(self.kept, f"{self.folder}/{self.mode}-{self.rank()}.pt")

    # Steps of an optimizer.

    def before_step(self, optimizer, *_):
        self.depth += 1
        # Horovod's broadcast_optimizer_state takes a step before there is a gradient.
        self.is_step = bool(self.steps or self.used or self.backwards)
        if self.depth > 1 or not self.is_step:
            return
        self.is_known = optimizer in self.optimizers
        if not self.is_known:
            self.optimizers.append(optimizer)
            self.find_modules()
            if self.is_compared:
                self.kept["start"] |= copies(self.weights_of(optimizer))
        self.begins_pass = bool(self.used - self.trained)
        if self.mode == "watch" and self.is_over():
            self.end()
        self.due = self.steps < FIRST or self.steps % EVERY == 0 or self.begins_pass
        if self.due:
            self.before = {name: checksum(weight) for name, weight in self.weights_of(optimizer)}

    def after_step(self, optimizer, *_):
        self.depth -= 1
        if self.depth or not self.is_step:
            return
        self.steps += 1
        self.rounds += self.begins_pass
        self.trained |= self.used
        weights = self.weights_of(optimizer)
        self.waits.update(self.waits_of_step)
        if self.due:
            scale = self.scaler.get_scale() if self.scaler else 1.0
            self.emit(
                "step",
                optimizer=self.optimizers.index(optimizer),
                kind=type(optimizer).__name__,
                short=self.short,
                rates=[float(group["lr"]) for group in optimizer.param_groups],
                before=self.before,
                after={name: checksum(weight) for name, weight in weights},
                gradients={name: checksum_of_gradient(weight) for name, weight in weights},
                sharded=any(hasattr(weight, "to_local") for _, weight in weights),
                parallel=any(map(is_split_otherwise, (weight for _, weight in weights))),
                trains=sorted(self.used),
                batches=self.batches_used,
                backwards=self.backwards,
                loss_gradients=[value.item() / scale for value in self.loss_gradients],
                scaled=self.scaled,
                waits=dict(self.waits),
                stale=self.is_known and id(optimizer) not in self.zeroed,
                states=states(self.torch),
            )
        self.zeroed.discard(id(optimizer))
        self.waits_of_step.clear()
        self.loss_gradients.clear()
        self.used = set()
        self.batches_used = 0
        self.backwards = 0
        self.scaled = False
        if self.steps == FIRST:
            self.tell_lost()
        if self.is_compared:
            self.keep(weights)

    def keep(self, weights):
        """Keep what is compared between runs, and end the run when all of it is there."""
        gradients = [(name, weight.grad) for name, weight in weights if weight.grad is not None]
        # Keep the gradients of the first step only.
        self.kept["gradients"] = copies(gradients) | self.kept["gradients"]
        if self.steps == COMPARED_STEPS:
            for optimizer in self.optimizers:
                self.kept["end"] |= copies(self.weights_of(optimizer))
        evaluates = self.mode in ("share", "regrouped")
        if self.steps > COMPARED_STEPS or (self.steps == COMPARED_STEPS and not evaluates):
            self.end()

    def is_over(self):
        """Whether the script has trained for enough passes, or enough steps of an infinite one."""
        used = [each for each in self.passes if each.place in self.used]
        if not all(each.is_finite for each in used) or not used:
            return self.steps >= PASSES * BATCHES
        return self.begins_pass and self.rounds >= PASSES

    def find_modules(self):
        """Find the root modules, which are in no other module, and name their weights."""
        import gc

        nn = self.torch.nn
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        children = {id(child) for module in modules for child in module.children()}
        self.roots = {id(module): module for module in modules if id(module) not in children}
        for root in self.roots.values():
            for name, weight in root.named_parameters():
                name = name.replace("module.", "").replace("_orig_mod.", "")
                self.names[id(weight)] = name
                self.weights[name] = weight

    def weights_of(self, optimizer):
        """[(number of the optimizer, number and name of the weight, the weight)]"""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        which = self.optimizers.index(optimizer)
        names = [self.names.get(id(weight), "of no module") for weight in weights]
        numbered = enumerate(zip(names, weights, strict=True))
        return [(f"{which}.{number}:{name}", weight) for number, (name, weight) in numbered]

    def is_shard(self, name, value):
        """Whether `value` is this rank's shard of a weight, not the full weight."""
        weight = self.weights.get(str(name))
        if weight is None or not hasattr(weight, "to_local") or not is_tensor(value):
            return False
        return hasattr(value, "to_local") or value.shape != weight.shape

    def tell_lost(self):
        """Report the parameters that a forward has used but that are in no optimizer."""
        import gc

        existing = [
            each for each in gc.get_objects() if issubclass(type(each), self.torch.optim.Optimizer)
        ]
        groups = [group for each in existing for group in each.param_groups]
        optimized = {id(weight) for group in groups for weight in group["params"]}
        for nested in (True, False):
            lost = {
                f"{type(module).__name__}.{name}"
                for module, is_nested in self.called.values()
                for name, weight in module._parameters.items()
                if is_nested == nested and weight is not None and weight.requires_grad
                if id(weight) not in optimized
            }
            if lost:
                self.emit("lost", names=sorted(lost), nested=nested)

    def before_backward(self, *_, **__):
        """Count the batches of the forwards so far as training data."""
        self.backwards += 1
        self.used |= self.unsure
        self.unsure = set()
        self.after_evaluation = False
        if self.steps < FIRST:
            self.zeroed |= {id(each) for each in self.optimizers if not has_gradient(each)}

    # Forwards.

    def before_forward(self, module, args):
        # Not the transforms of a data set, which are modules, too.
        if self.is_fetching:
            return
        torch = self.torch
        with_gradient = torch.is_grad_enabled()
        is_outermost = not self.running
        self.running.append(module)
        if is_outermost:
            is_first_of_batch = not self.forward_since_fetch
            self.forward_since_fetch = True
            self.batches_used += is_first_of_batch and with_gradient
            if with_gradient:
                self.unsure |= self.pending
            else:
                self.evaluated |= self.pending
                self.look_at_weights(module)
        if self.steps < FIRST and with_gradient and module._parameters:
            # A layer in a Python list is a root that runs within another one.
            nested = id(module) in self.roots and not is_outermost
            self.called[id(module)] = module, nested
        if is_outermost and with_gradient and self.steps < 2 * FIRST:
            tensors = [value for _, value in leaves(list(args)) if is_tensor(value)]
            if tensors:
                self.emit_once("input", self.steps, crc=checksum(tensors[0]))
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if is_norm or isinstance(module, torch.nn.modules.dropout._DropoutNd):
            self.look_at_mode(module, is_norm, with_gradient)

    def look_at_weights(self, model):
        """Record the weights of a model that is evaluated, once per pass."""
        key = (*sorted(self.pending), id(model))
        if ("weights", *key) not in self.told:
            crc = [checksum(weight) for weight in model.parameters()]
            self.emit_once("weights", *key, model=id(model), passes=key[:-1], crc=crc)

    def look_at_mode(self, module, is_norm, with_gradient):
        current = sorted(self.pending)
        # Judge by the mode of the root: if a part has another mode, that is on purpose.
        root = self.running[0]
        # The mode of the model, not of its wrapper, which stays in training mode.
        root = getattr(root, "module", root)
        key = (*current, is_norm, module.training, with_gradient, root.training, id(root))
        self.emit_once(
            "mode",
            *key,
            norm=is_norm,
            training=module.training,
            gradient=with_gradient,
            root=root.training,
            model=id(root),
            passes=current,
        )
        if is_norm and not module.training and module.running_mean is not None:
            crc = checksum(module.running_mean)
            self.emit_once("statistics", *current, id(module), passes=current, crc=crc)

    def after_forward(self, module, _, output):
        if self.is_fetching:
            return
        half = self.torch.float16, self.torch.bfloat16
        self.short |= is_tensor(output) and output.dtype in half
        # A forward that raised an error has left inner modules on the stack.
        while self.running and self.running.pop() is not module:
            pass

    def drew(self, tensor):
        """Record the random state from which dropout draws a mask."""
        if self.steps < FIRST and self.torch.is_grad_enabled():
            on_gpu = tensor.device.type == "cuda"
            generator = self.torch.cuda if on_gpu else self.torch
            state = checksum(generator.get_rng_state())
            self.emit_once("draws", self.steps, at=self.steps, crc=state)

    # Passes over loaders.

    def cuts(self, indices):
        """Whether to end the pass here, to cut a long one short."""
        if not indices.is_finite:
            return False
        steps = self.steps - indices.steps_before
        trains = indices.place in self.trained | self.used
        if self.is_compared:
            return trains and self.steps >= COMPARED_STEPS
        if self.mode == "prove":
            return False
        enough = steps >= STEPS if trains else indices.place in self.evaluated
        return enough and indices.fetched >= BATCHES

    def fetch(self, original, iterator):
        """Replaces the __next__() of a loader's iterator."""
        indices = iterator._index_sampler
        if self.cuts(indices):
            indices.drain()
            self.end_pass(indices)
            raise StopIteration
        self.is_fetching = True
        try:
            batch = original(iterator)
        except StopIteration:
            self.end_pass(indices)
            raise
        finally:
            self.is_fetching = False
        indices.fetched += 1
        if not indices.is_mapped and indices.fetched <= BATCHES:
            indices.inputs.append([checksum_of_part(part) for _, part in leaves(batch)])
        # The next forward uses the batches fetched since the last one, but only the last pass over
        # each loader: the script may just have looked at a batch of an earlier pass.
        if self.forward_since_fetch:
            self.pending = set()
            self.forward_since_fetch = False
        self.pending = {place for place in self.pending if place[0] != indices.place[0]}
        self.pending.add(indices.place)
        return batch

    def end_pass(self, indices):
        # A forward without a backward is an evaluation, even if no_grad() was forgotten.
        self.evaluated |= self.unsure & {indices.place}
        self.unsure -= {indices.place}
        indices.tell()
        if indices.place in self.evaluated - self.trained:
            self.after_evaluation = True

    # Figures, and waits.

    def figure(self, value):
        """Record a number that the script has read from a tensor, or a text that it has printed."""
        if self.is_compared and self.after_evaluation:
            self.emit("figure", value=value)

    def waited(self, where):
        """Record that the script reads a tensor's value: on a GPU, Python waits for it."""
        if self.trained and self.pending <= self.trained:
            self.waits_of_step.add(where)


class Indices:
    """Wraps the index sampler of a loader's iterator, and records what it yields."""

    def __init__(self, watcher, loader, sampler):
        self.watcher = watcher
        # Keep the loader alive, so that its id stays unique.
        self.loader = loader
        self.sampler = sampler
        self.is_mapped = loader._dataset_kind == 0
        self.is_finite = has_length(sampler) if self.is_mapped else True
        self.is_told = True

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        watcher = self.watcher
        # Persistent workers start the next pass with the same iterator.
        self.tell()
        numbers = watcher.loaders.setdefault(id(self.loader), [len(watcher.loaders), 0])
        self.place = tuple(numbers)
        numbers[1] += 1
        watcher.passes.append(self)
        self.fetched = 0
        self.steps_before = watcher.steps
        self.before = watcher.reductions + watcher.gathers
        self.given = []
        # Checksums of batches, for a stream, which has no indices.
        self.inputs = []
        self.done = False
        self.is_told = False
        self.running = self.give()
        return self.running

    def give(self):
        passes = self.watcher.batches.get(f"{self.place[0]} {self.place[1]}")
        if passes:
            yield from passes[str(self.watcher.rank())]
            return
        for batch in self.sampler:
            if self.is_mapped:
                several = isinstance(batch, list | tuple | range)
                self.given.append(list(batch) if several else [batch])
            yield batch
        self.done = True

    def content(self):
        """Checksums of two samples, to see whether all ranks have the same data set."""
        torch, data = self.watcher.torch, self.loader.dataset
        try:
            items = [OfItsIndex(torch, data)[number] for number in (0, len(data) - 1)]
        # The data set is the script's: it may raise anything.
        except Exception:
            return None
        return [[checksum_of_part(part) for _, part in leaves(item)] for item in items]

    def drain(self):
        """Exhaust the sampler, to record the indices that are not fetched."""
        collections.deque(self.running, maxlen=0)

    def tell(self):
        """Write the event of this pass, when the pass or the run is over."""
        if self.is_told:
            return
        self.is_told = True
        data = self.loader.dataset
        samples = [index for batch in self.given for index in batch]
        while isinstance(data, self.watcher.torch.utils.data.Subset):
            samples = [data.indices[index] for index in samples]
            data = data.dataset
        self.watcher.emit(
            "pass",
            place=self.place,
            data=id(data),
            of=len(data) if self.is_mapped else None,
            samples=samples,
            inputs=self.inputs,
            length=len(self.loader.dataset) if self.is_mapped else None,
            content=self.content() if self.is_mapped else None,
            batches=self.given if self.is_mapped else None,
            done=self.done,
            fetched=self.fetched,
            shuffles=is_shuffled(self.watcher.torch, self.loader.sampler),
            evaluates=self.place in self.watcher.evaluated,
            trains=self.place in self.watcher.trained,
            finite=self.is_finite,
            before=self.before,
        )


class OfItsIndex:
    """A data set whose random numbers depend only on the index of the sample."""

    def __init__(self, torch, dataset):
        self.torch = torch
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        import numpy

        before = random.getstate(), numpy.random.get_state(), self.torch.get_rng_state()
        seed = zlib.crc32(repr(index).encode())
        random.seed(seed)
        numpy.random.seed(seed)
        self.torch.manual_seed(seed)
        item = self.dataset[index]
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        self.torch.set_rng_state(before[2])
        return item


def checksum_of_part(part):
    """A checksum of part of a sample: a tensor, an array, an image, a number or a string."""
    if is_tensor(part):
        return checksum(part)
    if hasattr(part, "tobytes"):
        return zlib.crc32(part.tobytes())
    return zlib.crc32(repr(part).encode()) if isinstance(part, int | float | str | bytes) else 0


def has_length(sampler):
    try:
        return len(sampler) >= 0
    except (TypeError, NotImplementedError):
        return False


def is_shuffled(torch, sampler):
    """Whether a sampler of torch shuffles; None for any other."""
    data = torch.utils.data
    if isinstance(sampler, data.DistributedSampler):
        return sampler.shuffle
    if isinstance(sampler, data.RandomSampler | data.SubsetRandomSampler):
        return True
    return None


def is_split_otherwise(weight):
    """Whether a weight is sharded, but not as FSDP shards it."""
    if not hasattr(weight, "to_local"):
        return False
    fsdp = weight.device_mesh.ndim == 1 and all(
        place.is_shard() and place.dim == 0 for place in weight.placements
    )
    return not fsdp


def copies(named):
    """{name: this rank's part of the tensor, in float32}."""
    found = {}
    for name, tensor in named:
        found[name] = local(tensor).detach().cpu().float().clone()
    return found


def has_gradient(optimizer):
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return any(checksum_of_gradient(weight) for weight in weights)


def checksum_of_gradient(weight):
    """A checksum of the gradient: None without one, 0 if it is all 0."""
    if weight.grad is None:
        return None
    return checksum(weight.grad) if local(weight.grad).count_nonzero() else 0


def states(torch):
    """Checksums of the states of the default random generators."""
    import numpy

    found = [zlib.crc32(repr(random.getstate()).encode())]
    found.append(zlib.crc32(numpy.random.get_state()[1].tobytes()))
    found[-1] += numpy.random.get_state()[2]
    found.append(checksum(torch.get_rng_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(checksum(torch.cuda.get_rng_state()))
    return found


def caller():
    """file:line of the script that called a patched function; None if torch or a hook did."""
    frame = sys._getframe()
    while frame.f_code.co_name != "patched":
        frame = frame.f_back
    frame = frame.f_back
    # Skip the frames of print(tensor), format(tensor) and the like.
    while os.path.basename(frame.f_code.co_filename) in ("_tensor.py", "_tensor_str.py"):
        frame = frame.f_back
    path = frame.f_code.co_filename
    if "site-packages" in path or path.startswith(os.path.dirname(__file__)):
        return None
    return f"{os.path.basename(path)}:{frame.f_lineno}"


# Hooks. Each has the name of the rows that need it.


def install(torch):
    """Hook torch as soon as the script has imported it."""
    watcher = Watcher(torch)
    parts = {
        "weights, gradients and modes": hook_steps_and_forwards,
        "samples": hook_loaders,
        "random numbers of a data set": hook_data_sets,
        "dropout": hook_dropout,
        "BatchNorm": hook_batch_norm,
        "sums over ranks": hook_collectives,
        "losses and waits": hook_numbers,
        "clipping": hook_clipping,
        "files": hook_files,
    }
    for rows, hook in parts.items():
        # Another version of torch may lack a private name.
        try:
            hook(watcher, torch)
        except (AttributeError, ImportError) as error:
            watcher.emit("not seen", rows=rows, error=str(error))
    if watcher.is_compared:
        import numpy

        # Let all runs start alike even if the script sets no seed.
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
    # At exit, even of processes that multiprocessing has started.
    multiprocessing.util.Finalize(None, watcher.close, exitpriority=100)
    install.watcher = watcher


def install_horovod(hvd):
    """Hook Horovod's collectives."""
    watcher = install.watcher
    for name in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"):
        around(hvd, name, after=lambda *_, **__: count(watcher, "reductions"))
    for name in ("grouped_allreduce", "grouped_allreduce_"):
        around(hvd, name, after=lambda *_, **__: count(watcher, "reductions"))
    for name in ("allgather", "allgather_async", "allgather_object"):
        around(hvd, name, after=lambda *_, **__: count(watcher, "gathers"))


def count(watcher, what):
    setattr(watcher, what, getattr(watcher, what) + 1)


def hook_steps_and_forwards(watcher, torch):
    from torch.nn.modules import module
    from torch.optim import optimizer

    optimizer.register_optimizer_step_pre_hook(watcher.before_step)
    optimizer.register_optimizer_step_post_hook(watcher.after_step)
    module.register_module_forward_pre_hook(watcher.before_forward)
    module.register_module_forward_hook(watcher.after_forward, always_call=True)


def hook_loaders(watcher, torch):
    from torch.utils.data import DataLoader, dataloader

    index_sampler = DataLoader._index_sampler.fget
    following = dataloader._BaseDataLoaderIter.__next__

    DataLoader._index_sampler = property(
        lambda loader: Indices(watcher, loader, index_sampler(loader))
    )
    dataloader._BaseDataLoaderIter.__next__ = lambda iterator: watcher.fetch(following, iterator)


def hook_data_sets(watcher, torch):
    from torch.utils.data import _utils, get_worker_info

    def before(fetcher, *_, **__):
        is_first = not hasattr(fetcher, "_checked")
        fetcher._checked = True
        is_mapped = isinstance(fetcher, _utils.fetch._MapDatasetFetcher)
        if is_first and is_mapped and watcher.is_compared:
            fetcher.dataset = OfItsIndex(torch, fetcher.dataset)
        return states(torch) if is_first else None

    def after(batch, found, *_, **__):
        now = states(torch) if found else found
        if found != now:
            worker = get_worker_info()
            drawn = [was for was, is_now in zip(found, now, strict=True) if was != is_now]
            watcher.emit("random", worker=worker and worker.id, states=drawn)

    around(_utils.fetch._MapDatasetFetcher, "fetch", before, after)
    around(_utils.fetch._IterableDatasetFetcher, "fetch", before, after)


def hook_dropout(watcher, torch):
    leave_out = watcher.is_compared
    leave_out_dropout(torch, watcher.drew, leave_out)


def hook_batch_norm(watcher, torch):
    if watcher.is_compared:
        split_batch_norm(torch)


def hook_collectives(watcher, torch):
    for names, what in ((COLLECTIVES, "reductions"), (GATHERS, "gathers")):
        for name in names:
            around(torch.distributed, name, after=lambda *_, what=what, **__: count(watcher, what))


def hook_numbers(watcher, torch):
    import builtins
    import logging

    def asked(result, *_, **__):
        where = caller()
        if where:
            watcher.waited(where)
        if where and isinstance(result, float):
            watcher.figure(result)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        around(torch.Tensor, name, after=asked)

    def zeroed(optimizer, *_, **__):
        watcher.zeroed.add(id(optimizer))

    def zeroed_all(*_, **__):
        watcher.zeroed |= set(map(id, watcher.optimizers))

    around(torch.optim.Optimizer, "zero_grad", zeroed)
    around(torch.nn.Module, "zero_grad", zeroed_all)
    around(torch.Tensor, "backward", watcher.before_backward)

    def printed(_, __, *args, **___):
        watcher.figure(" ".join(map(str, args)))

    def logged(_, __, logger, record):
        watcher.figure(record.getMessage())

    around(builtins, "print", after=printed)
    around(logging.Logger, "handle", after=logged)

    def lost(loss, *_, **__):
        is_mean = is_tensor(loss) and loss.dim() == 0 and loss.requires_grad
        if is_mean and watcher.steps < FIRST:
            loss.register_hook(lambda gradient: watcher.loss_gradients.append(gradient.detach()))

    for name in LOSSES:
        around(torch.nn.functional, name, after=lost)


def hook_clipping(watcher, torch):
    def scaled(result, _, scaler, *args):
        watcher.scaled = scaler.is_enabled()
        watcher.scaler = scaler

    def unscaled(*_, **__):
        watcher.scaled = False

    def clipped(norm, *_, **__):
        # Not the norm of shards, which is the same on all ranks anyway.
        if watcher.steps < FIRST and is_tensor(norm) and not hasattr(norm, "to_local"):
            watcher.emit("clip", norm=float(norm), scaled=watcher.scaled)

    around(torch.amp.GradScaler, "scale", after=scaled)
    around(torch.amp.GradScaler, "unscale_", after=unscaled)
    # scaler.step() unscales; a fused optimizer does so in its step.
    around(torch.amp.GradScaler, "step", unscaled)
    around(torch.nn.utils, "clip_grad_norm_", after=clipped)
    torch.nn.utils.clip_grad.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_


def hook_files(watcher, torch):
    def save(obj, f, *_, **__):
        content, path = obj, getattr(f, "name", f)
        if not isinstance(path, str | os.PathLike):
            return
        # Remember the file, which may be a temporary one that the script renames.
        watcher.told.add(os.path.realpath(path))
        if path is f:
            keep_a_copy(watcher, path)
        parts = [content] if isinstance(content, dict) else []
        parts += [part for part in parts[0].values() if isinstance(part, dict)] if parts else []
        watcher.emit_once(
            "save",
            os.path.realpath(path),
            watcher.steps,
            path=os.path.realpath(path),
            prefix=any(str(name).startswith("module.") for part in parts for name in part),
            resumes=any("param_groups" in part for part in parts),
            shards=any(watcher.is_shard(*item) for part in parts for item in part.items()),
            crc=[checksum(value) for part in parts for value in part.values() if is_tensor(value)],
        )

    def audited(event, args):
        # The event is raised before the call, even if the folder already exists.
        if event == "os.mkdir" and not os.path.exists(args[0]):
            watcher.made.append(os.path.realpath(args[0]))
        copies_a_file = event in ("os.rename", "os.link", "shutil.copyfile")
        is_ours = copies_a_file and str(args[1]).startswith(watcher.folder)
        if copies_a_file and not is_ours and os.path.realpath(args[0]) in watcher.told:
            keep_a_copy(watcher, args[1])

    def loaded(result, _, module, *__, **___):
        tensors = len(module.state_dict())
        if result and 2 * len(result.missing_keys) > tensors:
            watcher.emit("nothing loaded", missing=len(result.missing_keys), of=tensors)

    around(torch, "save", save)
    sys.addaudithook(audited)
    around(torch.nn.Module, "load_state_dict", after=loaded)


def keep_a_copy(watcher, path):
    """Copy a file before it is overwritten; check.py restores it, or removes a new one."""
    path = os.path.realpath(path)
    kept = f"{watcher.folder}/file-{zlib.crc32(path.encode())}"
    try:
        os.close(os.open(kept, os.O_CREAT | os.O_EXCL))
    # Another rank has copied it, or this one did so before.
    except FileExistsError:
        return
    exists = os.path.exists(path)
    if exists:
        shutil.copy2(path, f"{kept}.old")
    folders = [folder for folder in watcher.made if path.startswith(f"{folder}/")]
    with open(f"{kept}.json", "w") as note:
        json.dump({"path": path, "existed": exists, "new folders": folders}, note)


def install_fsdp(fsdp):
    """Record the weights of a module before fully_shard, which shards each rank's own copy."""
    watcher = install.watcher

    def before(module, *_, **__):
        whole = [
            weight
            for weight in module.parameters()
            if weight.device.type != "meta" and not hasattr(weight, "to_local")
        ]
        watcher.emit_once("shard", crc=[checksum(weight) for weight in whole])

    around(fsdp, "fully_shard", before)
