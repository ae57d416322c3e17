"""The same seed and global batch give the same training, whatever the strategy and the number of processes."""

import json

import pytest
from launch import DATASETS, ROOT, changed_copy, checkpoint, largest_difference, need_horovod, run, small, strategies

GLOBAL_BATCH, LR = 32, 0.04
TOLERANCE = 1e-5  # relative; float32 sums in another order
# Two epochs of ten steps, so that set_epoch counts; weight decay and momentum, as a recipe may lose either; LeNet has
# neither BatchNorm, whose statistics are each process's own, nor dropout.
TRAINING = "--synthetic 320 --epochs 2 --model lenet --momentum 0.9 --wd 5e-4 --warmup-epochs 0 --device cpu"


def train(command, processes, folder, log_dir, dataset="mnist"):
    """The weights after 20 steps."""
    run(f"{command} {TRAINING} {small(dataset)} --batch-size {GLOBAL_BATCH // processes} --lr {LR / processes} "
        f"--log-dir {log_dir}", cwd=folder)
    return checkpoint(log_dir)["model"]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A function that gives the weights of single.py of a data set."""
    weights = {}

    def of(dataset):
        if dataset not in weights:
            folder = tmp_path_factory.mktemp("single")
            weights[dataset] = train(f"python {ROOT}/{dataset}/single.py", 1, folder, folder / "log", dataset)
        return weights[dataset]

    return of


@pytest.mark.parametrize("dataset", [folder.name for folder in DATASETS])
# dp is here for its code: on the CPU it is the bare module, on one process
@pytest.mark.parametrize("strategy", ["dp 1", *(f"{name} {n}" for name in strategies(1, "") for n in (2, 4))])
def test_parity(dataset, strategy, single, tmp_path):
    name, processes = strategy.split()
    if name.startswith("hvd"):
        need_horovod(name)
    command = {"dp": f"python {ROOT}/{dataset}/dp.py", **strategies(processes, ROOT / dataset)}[name]
    weights = train(command, int(processes), tmp_path, tmp_path / "log", dataset)
    assert largest_difference(weights, single(dataset)) < TOLERANCE


MUTATIONS = {
    "ddp_spawn without the wrapper": ("ddp_spawn", "    model = DistributedDataParallel(model)",
                                      "    object.__setattr__(model, 'module', model)"),
    "hvd_gloo without set_epoch": ("hvd_gloo", "        train.sampler.set_epoch(epoch)", "        pass"),
    "ddp_launch without all-reduce": ("ddp_launch", "    model = DistributedDataParallel(model)",
                                      "    model = DistributedDataParallel(model)\n"
                                      "    model.require_backward_grad_sync = False"),
    "ddp_launch without the wrapper": ("ddp_launch", "    model = DistributedDataParallel(model)",
                                       "    object.__setattr__(model, 'module', model)"),
    "ddp_launch without set_epoch": ("ddp_launch", "        train.sampler.set_epoch(epoch)", "        pass"),
    "ddp_launch without scaled rate": ("ddp_launch", " * schedule.lr_factor(args, world_size)", ""),
    "hvd_gloo without all-reduce": (
        "hvd_gloo", "    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **how)", "    pass"),
    "hvd_gloo without scaled rate": (
        "hvd_gloo", " * schedule.lr_factor(args, local_mean if args.use_adasum else hvd.size())", ""),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_parity_notices(mutation, single, tmp_path):
    """The comparison above fails for a recipe that lacks a line that it needs."""
    name, line, without = MUTATIONS[mutation]
    if name.startswith("hvd"):
        need_horovod(name)
    folder = changed_copy(tmp_path, f"mnist/{name.removesuffix('_gloo')}.py", line, without)
    weights = train(strategies(2, folder)[name], 2, tmp_path, tmp_path / "log")
    assert largest_difference(weights, single("mnist")) > 100 * TOLERANCE


@pytest.mark.parametrize("strategy", list(strategies(1, "")))
def test_exact_evaluation(strategy, tmp_path):
    """1,001 images on 3 processes: the loss and the accuracy of one process, though 3 does not divide 1,001."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    # A rate too small to change any weight: both evaluate the same model. One image at a time, as the last bits of a
    # float32 product depend on the size of the batch.
    evaluation = "--synthetic 5005 --epochs 1 --model lenet --lr 1e-30 -b 512 --test-batch-size 1 --device cpu"
    run(f"python {ROOT}/mnist/single.py {evaluation} --log-dir one", cwd=tmp_path)
    run(f"{strategies(3, ROOT / 'mnist')[strategy]} {evaluation} --log-dir three", cwd=tmp_path)
    one, three = (json.loads((tmp_path / log / "results.json").read_text())["epochs"][0]["val"]
                  for log in ("one", "three"))
    assert one["images"] == three["images"] == 1001
    assert three["loss"] == pytest.approx(one["loss"], rel=0, abs=1e-9)
    assert three["accuracy"] == pytest.approx(one["accuracy"], rel=0, abs=1e-9)
