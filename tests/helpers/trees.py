"""Small trees of images, to train on and to validate."""

import numpy as np
from PIL import Image


def make_tree(folder):
    """Two classes of four small images, for training and validation; return the folder."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / split / label).mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (40, 40, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")
    return folder
