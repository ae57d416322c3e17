"""Time reading images from a folder and from the same images in a tar, which it makes beside it.

    python benchmarks/packed_images.py /tmp/many --make 200000
    python benchmarks/jpeg_tree.py /tmp/tree
    python benchmarks/packed_images.py /tmp/tree

The first is of small files in 1,000 classes, to measure the start, the second of photographs, to
measure the speed.

The start is the time to the first batch: of torchvision's ImageFolder, of the recipes with folders,
and with the tar, before and after it has an index. The speed is that of one loader worker, in
rounds that alternate, with files in the page cache. --cold empties it before each round (as root):
with it and benchmarks/slow_files.py it is the speed on a file system across a network. --shards
also reads DIR-shards/*.tar with WebDataset (pip install webdataset) through a buffer of 1,000
images, in which it shuffles, and counts how often two images of a batch are from one file of 100.
"""

import io
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import runs
import torch
import torchvision
from PIL import Image
from torchvision.datasets import ImageFolder

sys.path[1:1] = [str(runs.ROOT), str(runs.ROOT / "imagenet")]
import archives
import folders
import jpegs
from common import flags
from common.data import EpochSampler

BATCH, SIZE = 32, 224
MOST = 2000  # images of an epoch


def make_small_files(folder, images, classes=1000):
    """`images` JPEG files of 32 x 32 pixels in `classes` folders of train, a fifth in val."""
    random = np.random.default_rng(0)
    contents = []
    for _ in range(64):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(file, "JPEG")
        contents.append(file.getvalue())
    for split, count in (("train", images), ("val", images // 5)):
        for number in range(count):
            path = folder / split / f"n{number % classes:08}" / f"{number:08}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[number % len(contents)])


def first_batch(files):
    """Read a batch without workers."""
    dataset = jpegs.TrainImages(files, SIZE, "pillow")
    sampler = EpochSampler(len(dataset), BATCH)
    return next(iter(jpegs.loader(dataset, sampler, BATCH, 0, torch.device("cpu"))))


def first_batch_of_torchvision(folder):
    transform = torchvision.transforms.Compose(
        [torchvision.transforms.RandomResizedCrop(SIZE), torchvision.transforms.ToTensor()]
    )
    dataset = ImageFolder(folder / "train", transform)
    return next(iter(torch.utils.data.DataLoader(dataset, BATCH, shuffle=True)))


def seconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def starts(folder, packed):
    """[(what, seconds to the first batch)]"""

    def of_folders():
        first_batch(folders.Folder(folder / "train"))

    def of_tar():
        first_batch(archives.Archive(packed / "train.tar", "train"))

    found = [
        ("torchvision's ImageFolder", seconds(first_batch_of_torchvision, folder)),
        ("folders", seconds(of_folders)),
    ]
    beside, _ = archives.index_paths(packed / "train.tar", "train")
    beside.unlink()
    found.append(("tar, which makes its index", seconds(of_tar)))
    found.append(("tar with an index", seconds(of_tar)))
    return found


def proportional_memory(process):
    """The MiB of a process, where memory that n processes share counts 1/n for each."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024


def memory_of_index(files):
    """(bytes per million images, MiB that eight processes which read all of the index add)"""
    with multiprocessing.get_context("fork").Pool(8) as pool:
        processes = [worker.pid for worker in multiprocessing.active_children()]
        before = sum(map(proportional_memory, processes))
        pool.map(read_all, [files] * 64, chunksize=1)
        added = sum(map(proportional_memory, processes)) - before
    return files.records.nbytes / len(files) * 1e6, added


def read_all(files):
    # So that each of the eight gets one.
    time.sleep(0.1)
    return int(files.records["offset"].sum())


def recipe_loader(files):
    dataset = jpegs.TrainImages(files, SIZE, "pillow")
    sampler = EpochSampler(len(dataset), BATCH)
    return jpegs.loader(dataset, sampler, BATCH, 1, torch.device("cpu"))


def webdataset_loader(shards):
    import webdataset

    def decode(sample):
        image = jpegs.resize(jpegs.pillow(sample["jpg"], jpegs.random_box), SIZE, SIZE)
        return image, int(sample["cls"])

    paths = sorted(map(str, shards.glob("*.tar")))
    stream = webdataset.WebDataset(paths, shardshuffle=len(paths)).shuffle(1000).map(decode)
    return torch.utils.data.DataLoader(stream.batched(BATCH), batch_size=None, num_workers=1)


def share_of_one_shard(shards):
    """The chance that two images of a batch are from one shard, of WebDataset and at random."""
    import webdataset

    paths = sorted(map(str, shards.glob("*.tar")))
    stream = webdataset.WebDataset(paths, shardshuffle=len(paths)).shuffle(1000)
    numbers = {path: number for number, path in enumerate(paths)}
    shard_of = np.array([numbers[sample["__url__"]] for sample in stream])
    at_random = np.random.default_rng(0).permutation(shard_of)
    return [share_of_equal_pairs(order) for order in (shard_of, at_random)]


def share_of_equal_pairs(order):
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
    equal = batches[:, :, None] == batches[:, None, :]
    return (equal.sum() - batches.size) / (batches.size * (BATCH - 1))


def make_shards(folder, to):
    """The training images in tars of 100, in a random order, as WebDataset wants them."""
    to.mkdir()
    files = folders.Folder(folder / "train")
    order = np.random.default_rng(0).permutation(len(files))
    for number in range(0, len(order), 100):
        with tarfile.open(to / f"{number // 100:06}.tar", "w", format=tarfile.GNU_FORMAT) as shard:
            for index in order[number : number + 100].tolist():
                label = str(files.labels[index]).encode()
                for ending, content in (("jpg", files.read(index)), ("cls", label)):
                    member = tarfile.TarInfo(f"{index:08}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))


def epoch(loader):
    """The images per second of an epoch, or of its beginning, after the first batch."""
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    count = 0
    for _, labels in batches:
        count += len(labels)
        if count >= MOST:
            break
    return count / (time.perf_counter() - start)


def show_rates(rates, base):
    for name, values in rates.items():
        ratios = [mine / other for mine, other in zip(values, rates[base], strict=True)]
        each = ", ".join(f"{value:.0f}" for value in values)
        print(
            f"{name:28s} {statistics.median(values):7.0f} images/s, "
            f"{statistics.median(ratios):.2f} times {base} ({each})"
        )


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("folder", type=Path, help="has train/ and val/")
    parser.add_argument("--make", type=flags.positive_int, help="fill it with so many small files")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before a round")
    parser.add_argument("--shards", action="store_true", help="also WebDataset")
    parser.add_argument("--repeats", type=flags.positive_int, default=5, help="rounds")
    args = parser.parse_args()
    if args.make and not args.folder.exists():
        make_small_files(args.folder, args.make)
    packed = args.folder.with_name(f"{args.folder.name}-packed")
    if not packed.exists():
        pack = [sys.executable, runs.ROOT / "scripts" / "pack.py", args.folder, packed]
        subprocess.run(pack, check=True)
    print(
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, "
        f"{os.cpu_count()} cores, {shutil.disk_usage(args.folder).total >> 30} GiB disk"
    )
    tar = archives.Archive(packed / "train.tar", "train")
    if args.make:
        for name, taken in starts(args.folder, packed):
            print(f"{name:28s} {taken:7.2f} s to the first batch")
        per_million, added = memory_of_index(tar)
        print(
            f"index: {per_million / 1e6:.0f} MB per million images, "
            f"{added:.0f} MiB in 8 processes that read it"
        )
    torch.set_num_threads(1)
    in_folders = folders.Folder(args.folder / "train")
    sources = {"folders": (recipe_loader, in_folders), "tar": (recipe_loader, tar)}
    if args.shards:
        shards = args.folder.with_name(f"{args.folder.name}-shards")
        if not shards.exists():
            make_shards(args.folder, shards)
        sources["WebDataset"] = (webdataset_loader, shards)
        stream, at_random = share_of_one_shard(shards)
        print(f"two images of a batch are from one shard: {stream:.2%}; at random {at_random:.2%}")
    rates = {name: [] for name in sources}
    for _ in range(args.repeats):
        for name, (loader_of, files) in sources.items():
            if args.cold:
                Path("/proc/sys/vm/drop_caches").write_text("3")
            rates[name].append(epoch(loader_of(files)))
    show_rates(rates, "folders")


if __name__ == "__main__":
    with runs.plain_exits():
        main()
