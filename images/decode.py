"""Decode image files: which formats are read, and how they become RGB pixels."""

import io

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from common.errors import InputError, in_one_line

# Formats that Pillow decodes itself. It goes by the content, not the name, and would start
# Ghostscript on PostScript. AVIF is last, as old versions of Pillow lack it.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
BLACK = (0, 0, 0)
GREY = (128, 128, 128)
WHITE = (255, 255, 255)


class BadImage(ValueError):
    """A file that cannot be used as an image. The message says what is wrong, and what to do."""


def decoded(files, index: int, decode):
    """decode(bytes) of image `index` of a Folder or an Archive.

    Raises InputError, which names the file.
    """
    try:
        return decode(files.read(index))
    except BadImage as error:
        raise InputError(f"{files.where(index)} {error}") from error


def open_image(content: bytes) -> Image.Image:
    """The image in the bytes of a file as a PIL image, in RGB; raises BadImage.

    Transparent pixels get a grey background. 16-bit greyscale is scaled to 8 bits.
    """
    # By default Pillow rejects a PNG with a text or colour profile of more than 1 MiB.
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            image.load()
            return in_rgb(image)
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(f"has too many pixels: {error}") from error
    except UnidentifiedImageError as error:
        raise BadImage(
            f"cannot be decoded (it is not of the formats {', '.join(FORMATS)}): "
            "fetch it again, or leave it out"
        ) from error
    # A damaged file can raise any exception.
    except Exception as error:
        reason = in_one_line(error)
        raise BadImage(f"cannot be decoded ({reason}): fetch it again, or leave it out") from error


def in_rgb(image):
    """A PIL image in RGB; raises BadImage."""
    if image.mode.startswith("I;16"):
        # convert() would clip all but the darkest 256 of 65,536 grey levels.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise BadImage(
            f"has pixels of 32 bits (mode {image.mode}), whose range is not known: "
            "convert it to 8 bits"
        )
    if image.has_transparency_data:
        image = on_background(image.convert("RGBA"))
    # convert() always copies.
    return image if image.mode == "RGB" else image.convert("RGB")


def on_background(image):
    """Blend a PIL image in RGBA with a background; convert() would ignore its transparency.

    On grey, neither a black nor a white drawing vanishes. If all pixels have one colour, the
    drawing is in the alpha channel only: then the background is black or white, whichever differs
    more.
    """
    behind = GREY
    if one := image.convert("RGB").getcolors(maxcolors=1):
        _, colour = one[0]
        behind = BLACK if sum(colour) >= sum(GREY) else WHITE
    return Image.alpha_composite(Image.new("RGBA", image.size, behind), image)
