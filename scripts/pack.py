"""Pack a folder of images into train.tar and val.tar, which the recipes of imagenet/ read in place.

    python scripts/pack.py /data/photos /data/packed
    torchrun --nproc-per-node=2 imagenet/ddp_launch.py --data-dir /data/packed

For file systems on which many small files are slow, or count against a quota. The runs are the
same as from the folder.
"""

import os
import random
import shutil
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# archives.py, and common/ and images/.
sys.path[1:1] = [str(ROOT / "imagenet"), str(ROOT)]
import archives
from common import flags
from common.errors import InputError, RunError, show
from common.log import Progress
from common.process import launch
from images import folders

# Bytes in a tar beside each image: its header, and on average half a block.
OVERHEAD = 3 * tarfile.BLOCKSIZE // 2


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("folder", type=Path, help="has train/<class>/*.JPEG and val/<class>/*.JPEG")
    parser.add_argument("to", type=Path, help="folder for train.tar and val.tar")
    parser.add_argument(
        "--order", choices=("name", "random"), default="name", help="of the images in a tar"
    )
    args = parser.parse_args()
    train, val = folders.find(args.folder)
    splits = {"train": train, "val": val}
    try:
        args.to.mkdir(parents=True, exist_ok=True)
        for split in splits:
            if (args.to / f"{split}.tar").exists():
                raise InputError(f"{args.to / f'{split}.tar'} already exists")
        require_space(args.to, splits.values())
        for line in folders.origin(train, val):
            show(line)
        for split, files in splits.items():
            pack(files, args.to / f"{split}.tar", args.order)
            archives.Archive(args.to / f"{split}.tar", split)
    except OSError as error:
        # A full disk has no name.
        raise RunError(f"{error.filename or args.to}: {error.strerror}") from error


def require_space(to, all_files):
    """Raise InputError if the images do not fit into the file system of the folder `to`."""
    sizes = [os.path.getsize(files.where(i)) for files in all_files for i in range(len(files))]
    needed = sum(sizes) + OVERHEAD * len(sizes)
    free = shutil.disk_usage(to).free
    if needed > free:
        raise InputError(f"{to} has {free >> 20:,} MiB left, and {needed >> 20:,} MiB are needed")


def pack(files, to, order):
    """Write the images of a Folder to the tar `to`, which is there as a whole or not at all."""
    indices = list(range(len(files)))
    if order == "random":
        random.Random(0).shuffle(indices)
    partial = to.with_name(f".{to.name}.partial")
    # Of a run that was killed, or a link that somebody else made there.
    partial.unlink(missing_ok=True)
    try:
        # Python's default form has a second header for each image, for the fraction of a time.
        with tarfile.open(partial, "x", format=tarfile.GNU_FORMAT, dereference=True) as archive:
            for index in Progress(indices, desc=to.name, unit="images"):
                path = files.where(index)
                archive.add(path, os.path.relpath(path, files.path))
                # It would keep a kilobyte for each image.
                archive.members.clear()
        os.replace(partial, to)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    with launch.plain_exits():
        main()
