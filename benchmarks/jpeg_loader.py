"""Time what one core reads of a tree of JPEGs: the usual ImageFolder pipeline, and each --loader of the recipes.

    python benchmarks/jpeg_tree.py /tmp/tree
    python benchmarks/jpeg_loader.py --data-dir /tmp/tree --repeats 5

One loader worker decodes, cuts out, resizes and hands over batches of training images, as for a GPU; another core takes
them. In turn and repeated: images per second, and the median of the ratios to the usual pipeline of the same turn. The
limit is what is left when nothing is done but to decode the crop.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import PIL
import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))
from common import data, files, jpegs

BATCH, SIZE = 16, 224


class DecodeOnly(jpegs.TrainTree):
    """The crops of a TrainTree, decoded and thrown away."""

    def __getitems__(self, places):
        for place in places:
            self.drawn(place)
        return torch.empty(len(places), 0), torch.empty(0)


def usual(tree, _):
    """The pipeline of a tutorial: torchvision's ImageFolder, its transforms image by image."""
    tree.transform = transforms.Compose([
        transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize(*data.IMAGENET_MEAN_STD)])
    tree.loader = torchvision.datasets.folder.pil_loader
    return tree, None


def images_per_second(dataset, collate):
    """What one worker brings, from its first batch on."""
    loader = DataLoader(dataset, BATCH, num_workers=1, collate_fn=collate)
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    count = sum(len(batch[0]) for batch in batches)
    return count / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="a tree of JPEGs")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each pipeline (default: 5)")
    args = parser.parse_args()

    def tree():
        return files.image_tree(args.data_dir)[0]

    pipelines = {"usual pipeline": usual(tree(), None)}
    for name in jpegs.LOADERS:
        pipelines[f"--loader {name}"] = jpegs.TrainTree(tree(), SIZE, 0, name), data.as_it_is
        pipelines[f"limit of {name}: decode the crop"] = DecodeOnly(tree(), SIZE, 0, name), data.as_it_is
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {PIL.__version__}, "
          f"{os.cpu_count()} cores, {len(pipelines['usual pipeline'][0])} images")
    torch.set_num_threads(1)
    rates = {name: [] for name in pipelines}
    for _ in range(args.repeats):
        for name, (dataset, collate) in pipelines.items():
            rates[name].append(images_per_second(dataset, collate))
    for name, values in rates.items():
        ratio = statistics.median(mine / usual for mine, usual in zip(values, rates["usual pipeline"], strict=True))
        print(f"{name:40s} {statistics.median(values):6.0f} images/s and core, {ratio:.2f} times the usual "
              f"({', '.join(f'{value:.0f}' for value in values)})")


if __name__ == "__main__":
    main()
