"""Mount a folder, to read, where each operation takes longer, as on a file system across a network.

    apt-get install libfuse2; pip install mfusepy
    python benchmarks/slow_files.py /tmp/tree /tmp/slow --ms 1    # as root, until Ctrl-C

A look at a name, an open, a list and a read of up to 128 KiB take `--ms` longer, as each is a
round trip. Closing a file takes no longer.
"""

import argparse
import errno
import os
import time

from mfusepy import FUSE, FuseOSError, Operations


class SlowFiles(Operations):
    """The files of `folder`, where an operation takes `seconds` longer. Several run at a time."""

    use_ns = True

    def __init__(self, folder, seconds):
        self.folder = os.path.realpath(folder)
        self.seconds = seconds

    def slowly(self, function, *arguments):
        time.sleep(self.seconds)
        try:
            return function(*arguments)
        except OSError as error:
            raise FuseOSError(error.errno) from error

    def getattr(self, path, fh=None):
        found = self.slowly(os.lstat, self.folder + path)
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
        times = {f"st_{one}time": getattr(found, f"st_{one}time_ns") for one in "amc"}
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path, fh):
        return [".", "..", *self.slowly(os.listdir, self.folder + path)]

    def open(self, path, flags):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise FuseOSError(errno.EROFS)
        return self.slowly(os.open, self.folder + path, os.O_RDONLY)

    def read(self, path, size, offset, fh):
        return self.slowly(os.pread, fh, size, offset)

    def release(self, path, fh):
        os.close(fh)
        return 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the folder to show")
    parser.add_argument("at", help="an empty folder to mount it on")
    parser.add_argument("--ms", type=float, default=1, help="milliseconds for each operation")
    args = parser.parse_args()
    FUSE(SlowFiles(args.folder, args.ms / 1000), args.at, foreground=True, ro=True)


if __name__ == "__main__":
    main()
