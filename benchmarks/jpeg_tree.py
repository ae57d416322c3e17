"""Make a tree of JPEG files as costly to decode as ImageNet's photographs: about 500x375 pixels and
110 KB each.

    python benchmarks/jpeg_tree.py DIR --images 400

Photographs have a spectrum that falls with the frequency (Field 1987), and colours that are close
to grey; so do these. The quality of each is the highest that keeps it below 115 KB. DIR/train and
DIR/val have the same classes, 4 or --classes.
"""

import argparse
import io
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, BYTES = 500, 375, 115_000


def photo(generator):
    """A random image as a Pillow image, WIDTH x HEIGHT."""
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None])
    frequency[0, 0] = 1
    parts = generator.standard_normal((2, 3, HEIGHT, WIDTH // 2 + 1))
    channels = np.fft.irfft2((parts[0] + 1j * parts[1]) / frequency**1.3, s=(HEIGHT, WIDTH))
    pixels = 0.8 * channels.mean(axis=0) + 0.4 * channels
    pixels = 120 + 50 * (pixels - pixels.mean()) / pixels.std()
    return Image.fromarray(pixels.transpose(1, 2, 0).clip(0, 255).astype(np.uint8))


def encoded(image):
    """The bytes of a JPEG file with as high a quality as BYTES allow."""
    for quality in range(97, 0, -1):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if buffer.tell() <= BYTES:
            return buffer.getvalue()
    raise ValueError(f"no quality makes it smaller than {BYTES} bytes")


def make(folder, images, classes=4):
    """Fill `folder`/train with `images` images, `folder`/val with a fifth as many.

    Returns the mean size in bytes.
    """
    generator, sizes = np.random.default_rng(0), []
    for split, count in (("train", images), ("val", images // 5)):
        for number in range(count):
            path = Path(folder, split, f"class{number % classes}", f"{number:05d}.JPEG")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(photo(generator)))
            sizes.append(path.stat().st_size)
    return sum(sizes) / len(sizes)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--images", type=int, default=400, help="for training (default: 400)")
    parser.add_argument("--classes", type=int, default=4, help="(default: 4)")
    args = parser.parse_args()
    if not args.folder:
        parser.error("DIR is empty: give a path, or set the variable that should hold it")
    mean = make(args.folder, args.images, args.classes)
    print(
        f"{args.images} images for training and {args.images // 5} for validation in "
        f"{args.folder}, "
        f"{WIDTH}x{HEIGHT} pixels, {mean / 1000:.0f} KB on average"
    )


if __name__ == "__main__":
    main()
