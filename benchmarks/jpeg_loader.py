"""Time how fast one core reads a tree of JPEGs: with the usual ImageFolder pipeline, and with each
--loader.

    python benchmarks/jpeg_tree.py /tmp/tree
    python benchmarks/jpeg_loader.py --data-dir /tmp/tree --repeats 5

One loader worker decodes, crops and resizes training images, and passes the batches to another
core, as for a GPU. The pipelines alternate. Prints images per second, and the median of the ratios
to the usual pipeline in the same round. The limit is the speed of decoding the crop and nothing
else.
"""

import os
import statistics
import sys
import time

import PIL
import runs
import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

sys.path.insert(1, str(runs.ROOT / "imagenet"))
import jpegs
from common import flags
from common.data import EpochSampler

BATCH, SIZE = 16, 224


class DecodeOnly(jpegs.TrainImages):
    """The crops of TrainImages, decoded and thrown away."""

    def __getitem__(self, index):
        self.decode(index, self.crop, jpegs.random_box)
        return torch.empty(0), 0


def usual(tree):
    """The pipeline of a tutorial: torchvision's ImageFolder, its transforms image by image."""
    tree.transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(jpegs.normalise.mean, jpegs.normalise.std),
        ]
    )
    tree.loader = torchvision.datasets.folder.pil_loader
    return lambda: iter(DataLoader(tree, BATCH, num_workers=1))


def recipe_loader(dataset):
    """A function that begins to read the batches of the recipes, before they are on the device."""

    def begin():
        sampler = EpochSampler(len(dataset), BATCH)
        return iter(jpegs.loader(dataset, sampler, BATCH, 1, torch.device("cpu")))

    return begin


def images_per_second(make):
    """The images per second of one worker, after its first batch."""
    batches = make()
    next(batches)
    start = time.perf_counter()
    count = sum(len(labels) for _, labels in batches)
    return count / (time.perf_counter() - start)


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="a tree of JPEGs")
    parser.add_argument(
        "--repeats", type=flags.positive_int, default=5, metavar="N", help="runs of each pipeline"
    )
    args = parser.parse_args()
    files, _ = jpegs.find_files(args.data_dir)
    pipelines = {"usual pipeline": usual(ImageFolder(files.path))}
    for name in jpegs.LOADERS:
        pipelines[f"--loader {name}"] = recipe_loader(jpegs.TrainImages(files, SIZE, name))
        pipelines[f"limit of {name}: decode the crop"] = recipe_loader(
            DecodeOnly(files, SIZE, name)
        )
    print(
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow "
        f"{PIL.__version__}, "
        f"{os.cpu_count()} cores, {len(files)} images"
    )
    torch.set_num_threads(1)
    rates = {name: [] for name in pipelines}
    for _ in range(args.repeats):
        for name, make in pipelines.items():
            rates[name].append(images_per_second(make))
    for name, values in rates.items():
        ratio = statistics.median(
            mine / usual for mine, usual in zip(values, rates["usual pipeline"], strict=True)
        )
        print(
            f"{name:40s} {statistics.median(values):6.0f} images/s per core, {ratio:.2f} times "
            "the usual "
            f"({', '.join(f'{value:.0f}' for value in values)})"
        )


if __name__ == "__main__":
    with runs.plain_exits():
        main()
