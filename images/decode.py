"""Image files: what is read, and as which pixels."""

import io

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from common.errors import InputError, in_one_line

# Pillow looks at the content and not at the name, and would start Ghostscript on PostScript. It
# decodes these by itself. AVIF is the last one, as old versions of Pillow lack it.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
BLACK = (0, 0, 0)
GREY = (128, 128, 128)
WHITE = (255, 255, 255)


class BadImage(ValueError):
    """A file that cannot be used as an image: what is wrong with it, and what to do."""


def decoded(files, index: int, decode):
    """decode(bytes) of the image `index` of a Folder or an Archive.

    Raises InputError, and names the file.
    """
    try:
        return decode(files.read(index))
    except BadImage as error:
        raise InputError(f"{files.where(index)} {error}") from error


def open_image(content: bytes) -> Image.Image:
    """The image in the bytes of a file as a PIL image, in RGB; raises BadImage.

    Behind transparent pixels it is grey. Grey of 16 bits is scaled to 8.
    """
    # Pillow refuses a picture with a long text or colour profile beside it: the default is 1 MiB.
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
    # A damaged file can raise anything.
    except Exception as error:
        reason = in_one_line(error)
        raise BadImage(f"cannot be decoded ({reason}): fetch it again, or leave it out") from error


def in_rgb(image):
    """A PIL image in RGB; raises BadImage."""
    if image.mode.startswith("I;16"):
        # convert() would cut off all but the darkest 256 of 65,536 grey levels.
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
    """A PIL image in RGBA without its transparency, which convert() would ignore.

    On grey, neither a black picture vanishes nor a white one. If all pixels have one colour, the
    picture is in the alpha channel alone: then it is on black or white, whichever differs more.
    """
    behind = GREY
    if one := image.convert("RGB").getcolors(maxcolors=1):
        _, colour = one[0]
        behind = BLACK if sum(colour) >= sum(GREY) else WHITE
    return Image.alpha_composite(Image.new("RGBA", image.size, behind), image)
