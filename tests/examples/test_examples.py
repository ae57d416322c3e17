"""The examples: the same run on any number of processes and after a kill; what each shows."""

import argparse

import numpy as np
import pytest
import torch
from forked import compute, refused
from launch import assert_same, checkpoint, evaluations, largest_difference
from PIL import Image
from recipes import ROOT, STEP, changed_copy, in_float64
from trees import make_tree

from common.errors import InputError
from examples import contrastive, finetune, gan, language_model, regression, segmentation

NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
# Small runs of several steps per epoch and two epochs, with a global batch of 16
SIZES = {
    "contrastive": "--synthetic 120 --width 4 --workers 0",
    "finetune": "--synthetic 48 --image-size 32 --workers 0",
    "gan": "--synthetic 100 --width 16",
    "language_model": "--synthetic 600 --context 32 --width 16 --layers 1 --dropout 0",
    "regression": "--synthetic 120",
    "segmentation": "--synthetic 80 --image-size 32 --width 4 --workers 0",
}
FLAGS = "--device cpu -G 16 --epochs 2 --warmup-epochs 0.5"
# What is best, and whether it is the lowest
BEST = {
    "contrastive": ("val/accuracy", max),
    "finetune": ("val/accuracy", max),
    "gan": ("val/distance", min),
    "language_model": ("val/loss", min),
    "regression": ("val/rmse", min),
    "segmentation": ("val/iou", max),
}
# The figure that shows it, and what the last value is to be, times the first: below 1 it falls
LEARNS = {
    "contrastive": ("train/loss", 0.95),
    # Of random weights only the last layers learn.
    "finetune": ("val/loss", 1),
    "gan": ("val/distance", 0.5),
}

# In float64. AdamW divides by gradients near 0, and so magnifies the differences of rounding.
TOLERANCE = 1e-9


def command(processes, script):
    return f"torchrun --standalone --nproc-per-node={processes} {script}"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A function: (the folder of an example in float64, its weights after one process)."""
    runs = {}

    def run(name):
        if name not in runs:
            to = tmp_path_factory.mktemp(name)
            folder = in_float64(to, "examples")
            flags = f"{SIZES[name]} {FLAGS}"
            compute(f"{command(1, folder / name)}.py {flags} --log-dir log", cwd=to)
            runs[name] = folder, checkpoint(to / "log")["model"]
        return runs[name]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_compute_what_one_does(name, single, tmp_path):
    folder, expected = single(name)
    flags = f"{SIZES[name]} {FLAGS} --log-dir {tmp_path / 'log'}"
    compute(f"{command(2, folder / name)}.py {flags}", cwd=tmp_path)
    assert largest_difference(checkpoint(tmp_path / "log")["model"], expected) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_to_the_same_bits(name, tmp_path):
    """SIGKILL within the second epoch, and --resume auto, with loader workers."""
    flags = f"{SIZES[name]} {FLAGS} --checkpoint-every 2".replace("--workers 0", "--workers 2")
    example = ROOT / "examples" / f"{name}.py"
    compute(f"{command(2, example)} {flags} --log-dir whole", cwd=tmp_path)
    saved = checkpoint(tmp_path / "whole")
    step = saved["position"]["steps"] - 1
    kill = f"        if position.steps == {step}:\n            import os, signal\n\n"
    kill += "            os.kill(os.getpid(), signal.SIGKILL)\n"
    folder = changed_copy(tmp_path / "copy", f"examples/{name}.py", STEP, kill + STEP)
    compute(f"{command(2, folder / name)}.py {flags} --log-dir part", cwd=tmp_path, status=9)
    assert checkpoint(tmp_path / "part")["position"]["samples"] > 0, "within an epoch"
    compute(f"{command(2, example)} {flags} --log-dir part --resume auto", cwd=tmp_path)
    for part in saved.keys() - {"config"}:
        assert_same(checkpoint(tmp_path / "part")[part], saved[part])
    metric, _ = BEST[name]
    ends = [[line[metric] for line in evaluations(tmp_path / run)] for run in ("whole", "part")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", NAMES)
def test_best_is_what_the_example_says(name, tmp_path):
    """best.pt is that of the best evaluation, the highest or the lowest."""
    metric, best = BEST[name]
    flags = f"{SIZES[name]} -G 16 --device cpu --max-steps 8 --eval-every 1 --lr 1e-9"
    compute(f"{command(1, ROOT / 'examples' / name)}.py {flags} --log-dir log", cwd=tmp_path)
    values = [line[metric] for line in evaluations(tmp_path / "log")]
    saved = torch.load(tmp_path / "log" / "best.pt", weights_only=True)
    assert len(values) == 8
    assert saved["best"]["value"] == best(values)
    assert saved["position"]["evaluated_at"] == values.index(best(values)) + 1


@pytest.mark.parametrize("name", NAMES)
def test_defaults_learn(name, tmp_path):
    """The command of the docstring: the loss falls, or what the example has in its place."""
    script = ROOT / "examples" / f"{name}.py"
    compute(f"{command(2, script)} --device cpu --eval-every 20 --log-dir log", cwd=tmp_path)
    metric, bound = LEARNS.get(name, ("val/loss", 0.9))
    first, *_, last = [line[metric] for line in evaluations(tmp_path / "log")]
    assert last < bound * first


def test_a_table_with_constant_and_large_columns(tmp_path):
    """The error is that of the noise, and a checkpoint alone gives predictions in the unit.

    scikit-learn 3722: a constant column has a deviation of 1e-15 by rounding; scholar 363: its
    first other value, in validation, came through as it was.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=2000)
    rare = np.zeros(2000)
    # A row of the validation part.
    rare[torch.randperm(2000, generator=torch.Generator().manual_seed(0))[5]] = 1
    target = 1e12 + 3 * x + 0.1 * random.normal(size=2000)
    table = np.column_stack([1.7e9 + x, np.full(2000, np.log(1e-5)), rare, target])
    np.save(tmp_path / "table.npy", table)
    script = ROOT / "examples" / "regression.py"
    flags = "--table table.npy --device cpu --epochs 4 --log-dir log"
    output = compute(f"{command(1, script)} {flags}", cwd=tmp_path)
    assert "constant in the training rows, so of no effect: column 2, column 3\n" in output
    assert evaluations(tmp_path / "log")[-1]["val/rmse"] < 0.3

    metadata = checkpoint(tmp_path / "log")["metadata"]
    model = regression.Network(columns=3, width=64)
    model.load_state_dict(checkpoint(tmp_path / "log")["model"])
    features = torch.from_numpy(regression.standardised(table[:, :3], metadata)).float()
    with torch.inference_mode():
        output = model(features).double().numpy()
    error = output * metadata["std"][-1] + metadata["mean"][-1] - table[:, 3]
    assert np.sqrt(np.square(error).mean()) < 0.3


def test_a_run_on_another_table(tmp_path):
    """Its weights are for the scale of the first one."""
    table = np.random.default_rng(0).normal(size=(200, 3))
    script = ROOT / "examples" / "regression.py"
    flags = "--table table.npy --device cpu --log-dir log --resume auto --epochs"
    np.save(tmp_path / "table.npy", table)
    compute(f"{command(1, script)} {flags} 1", cwd=tmp_path)
    np.save(tmp_path / "table.npy", 10 * table + 5)
    line = refused(f"{command(1, script)} {flags} 2", tmp_path)
    assert "of its mean number 0 is " in line


def test_a_constant_target(tmp_path):
    np.save(tmp_path / "table.npy", np.column_stack([np.arange(100), np.full(100, 14.62)]))
    line = refused(f"{command(1, ROOT / 'examples/regression.py')} --table table.npy", tmp_path)
    assert "the target, is 14.62 in all training rows" in line


ROWS = "".join(f"{number},{number % 7},{2 * number}\n" for number in range(20))


@pytest.mark.check
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_a_csv_of_any_program(encoding, tmp_path):
    (tmp_path / "table.csv").write_text(f"größe,b,y\n{ROWS}", encoding=encoding)
    names, table = regression.read_table(str(tmp_path / "table.csv"))
    assert names[1:] == ["b", "y"]
    assert encoding == "latin-1" or names[0] == "größe"
    assert table.dtype == np.float64
    assert table[3].tolist() == [3, 3, 6]


@pytest.mark.check
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "(0, 1)"),
        ("a,b,y\n", "(0, 1)"),
        (f"a,b,y\n{ROWS}1,,3\n", "'' to float64 at row 20, column 2"),
        (f"a,b,y\n{ROWS}1,red,3\n", "'red' to float64 at row 20, column 2"),
        (f"a,b,y\n{ROWS}1,nan,3\n", "nan at row 20, column 2"),
        (f"a,b,y\n{ROWS}".replace(",", ";"), "'0;0;0' to float64"),
        (f"a,b,y\n{ROWS}".encode("utf-16"), "at row 0, column 1"),
        (np.array([[1, "red"]] * 20, dtype=object), "Python objects"),
        (np.array([["1", "2"]] * 20), "Cannot cast"),
        (np.ones((20, 2)) * 1j, "Cannot cast"),
        (np.ones(20), "(20,)"),
    ],
    ids=str,
)
def test_what_is_no_table(content, says, tmp_path):
    path = tmp_path / "table.csv"
    if isinstance(content, np.ndarray):
        path = tmp_path / "table.npy"
        np.save(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    with pytest.raises(InputError) as raised:
        regression.read_table(str(path))
    line = str(raised.value)
    assert "\n" not in line
    assert says in line
    assert "give finite numbers, in a .csv" in line


@pytest.mark.check
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (np.array([[1.0, 2.0], [np.nan, 1.0]]), "1 numbers are not finite"),
        (np.ones(20), "(20,)"),
        (np.array([["1", "2"]]), "Cannot cast"),
        (np.array([[1, "red"]], dtype=object), "Python objects"),
        ("1,2\n3,4\n", "magic string"),
    ],
    ids=str,
)
def test_what_is_no_set_of_points(content, says, tmp_path):
    path = tmp_path / "points.npy"
    if isinstance(content, str):
        path.write_text(content)
    else:
        np.save(path, content)
    with pytest.raises(InputError) as raised:
        gan.read_points(str(path))
    line = str(raised.value)
    assert "\n" not in line
    assert says in line
    assert "give finite numbers, in a .npy" in line


@pytest.mark.check
def test_generated_points_are_those_of_the_file(tmp_path):
    """Times the deviation plus the mean of the metadata; a constant column, too."""
    points = np.column_stack([np.arange(50), np.full(50, 7)])
    np.save(tmp_path / "points.npy", points)
    args = argparse.Namespace(points=str(tmp_path / "points.npy"), seed=0)
    train_set, val_set = gan.load(args)
    standardised = torch.cat((val_set.tensors[0], train_set.tensors[0])).double().numpy()
    metadata = train_set.metadata
    again = standardised * metadata["std"] + metadata["mean"]
    assert np.allclose(again[again[:, 0].argsort()], points, atol=1e-4)


@pytest.mark.check
def test_a_sample_is_no_neighbour_of_its_own():
    """Of 21 samples 11 have a label, but of the 20 others of each of them only 10."""
    labels = torch.tensor(11 * [1] + 10 * [0])
    features = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
    assert contrastive.knn_accuracy(features, labels) == 0
    assert contrastive.knn_accuracy(features, torch.zeros_like(labels)) == 1


@pytest.mark.check
def test_integers_keep_their_digits(tmp_path):
    table = np.array([[1_700_000_000_000 + number, number] for number in range(20)])
    np.save(tmp_path / "table.npy", table)
    _, read = regression.read_table(str(tmp_path / "table.npy"))
    assert (read == table).all()


def test_images_without_a_known_pixel(tmp_path):
    """As an image that nobody has labelled: its loss is 0, and the weights stay finite."""
    line = "        mask = torch.from_numpy(mask)\n"
    unknown = f"{line}        mask.fill_(IGNORED)\n"
    folder = changed_copy(tmp_path, "examples/segmentation.py", line, unknown)
    flags = f"{SIZES['segmentation']} {FLAGS} --max-steps 3 --log-dir log"
    compute(f"{command(2, folder / 'segmentation.py')} {flags}", cwd=tmp_path)
    assert all(value.isfinite().all() for value in checkpoint(tmp_path / "log")["model"].values())
    (line,) = evaluations(tmp_path / "log")
    assert (line["val/loss"], line["val/iou"]) == (0, 0)


@pytest.mark.check
def test_pixels_are_counted_in_integers():
    """float32 stays at 2**24, which 64 images of 512x512 pixels have."""
    logits = torch.rand(2, 3, 4, 4)
    counts = segmentation.confusion_of(logits, torch.zeros(2, 4, 4).long())
    assert not counts.is_floating_point()
    assert counts.sum() == 32


@pytest.mark.parametrize(("name", "width"), [("language_model", 8), ("segmentation", 6)])
def test_a_width_that_has_no_whole_heads_or_groups(name, width, tmp_path):
    script = ROOT / "examples" / f"{name}.py"
    line = refused(f"{command(1, script)} --device cpu --width {width}", tmp_path)
    assert f"--width {width}: give a multiple of" in line


@pytest.mark.check
def test_which_texts_are_read(tmp_path):
    """One byte again and again, and one that ends within a character; but no UTF-16."""
    load = language_model.load
    path = tmp_path / "text"
    args = argparse.Namespace(text=str(path), context=8)
    for content in (b"a" * 500, "ä".encode() * 500 + b"\xc3", "\ufeffa\r\n".encode() * 100):
        path.write_bytes(content)
        train_set, _ = load(args)
        assert train_set.tensors[0].shape[1] == 9
    for content, says in (("a" * 500).encode("utf-16"), "byte 0 is no UTF-8"), (b"", "0 bytes"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=says):
            load(args)


def test_tokens_stay_integers(tmp_path):
    """The embedding would refuse others. Bits per character count characters, not bytes."""
    (tmp_path / "text").write_text("äöü€" * 3000)
    flags = "--text text --context 32 --width 16 --layers 1 --device cpu --max-steps 1"
    compute(
        f"{command(1, ROOT / 'examples' / 'language_model.py')} {flags} --log-dir log", cwd=tmp_path
    )
    (line,) = evaluations(tmp_path / "log")
    # Three characters of two bytes and one of three
    ratio = line["val/bits_per_char"] / (line["val/loss"] / torch.tensor(2.0).log().item())
    assert ratio == pytest.approx(9 / 4, rel=0.01)


def test_frozen_layers_stay_frozen_and_rates_stay_apart(tmp_path):
    """Weights and BatchNorm's statistics. --init-partial leaves out a head with other classes."""
    from torchvision.models import resnet18

    before = resnet18(num_classes=7).state_dict()
    torch.save(before, tmp_path / "pretrained.pth")
    flags = f"{SIZES['finetune']} {FLAGS} --init-from pretrained.pth --init-partial --log-dir log"
    script = ROOT / "examples" / "finetune.py"
    output = compute(f"{command(2, script)} {flags} --max-steps 3", cwd=tmp_path)
    assert "left out: fc.bias ([7] in the file), fc.weight ([7, 512] in the file)" in output
    saved = checkpoint(tmp_path / "log")
    for name, value in saved["model"].items():
        frozen = name.startswith(("conv1", "bn1", "layer1", "layer2")) or "running_" in name
        if "num_batches" not in name and not name.startswith("fc."):
            assert torch.equal(value, before[name]) == frozen, name
    body, head = saved["optimizer"]["param_groups"]
    assert head["lr"] == pytest.approx(10 * body["lr"])


@pytest.fixture
def photos(tmp_path):
    """A tree of images, and the command that fine-tunes on it."""
    tree = make_tree(tmp_path / "tree")
    flags = "--data-dir tree --image-size 32 -b 2 --device cpu --dry-run"
    return tree, f"{command(2, ROOT / 'examples' / 'finetune.py')} {flags}"


@pytest.mark.parametrize("workers", [0, 1])
def test_finetune_names_a_broken_image(workers, photos, tmp_path):
    tree, line = photos
    path = tree / "val" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:500])
    output = compute(f"{line} --workers {workers}", tmp_path, status=2)
    assert "tree/val/cat/0.png cannot be decoded" in output
    assert "Traceback" not in output


def test_finetune_says_where_its_images_are(photos, tmp_path):
    tree, line = photos
    (tree / "train" / "cat" / "more.avif").touch()
    (tree / "train" / "cat" / "._0.png").touch()
    output = compute(f"{line} --workers 0", tmp_path)
    assert "8 images in tree/train and 8 images in tree/val\n" in output
    assert output.count("left out of tree/train: 1 .avif (such as 'cat/more.avif')") == 1


def test_finetune_sees_16_bits(photos):
    """Cut off to 8 bits, it would be white."""
    tree, _ = photos
    Image.fromarray(np.full((40, 40), 12_000, np.uint16)).save(tree / "val" / "cat" / "0.png")
    _, val_set = finetune.load(argparse.Namespace(data_dir=tree, image_size=32))
    image, _ = val_set[0]
    assert image.shape == (3, 32, 32)
    assert (image == 12_000 >> 8).all()


def test_finetune_refuses_other_classes(photos, tmp_path):
    tree, line = photos
    (tree / "val" / "dog").rename(tree / "val" / "wolf")
    output = compute(line, tmp_path, status=2)
    assert "tree/val/dog is missing, but tree/train/dog exists" in output
