"""Image files as pixels: which are read, what is transparent, and what is said of the others."""

import io

import numpy as np
import pytest
from launch import random_seed
from PIL import EpsImagePlugin, Image, PngImagePlugin

from images.decode import FORMATS, BadImage, open_image

pytestmark = pytest.mark.check
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nshowpage\n%%EOF\n"


def in_bytes(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels_of(content):
    return np.asarray(open_image(content)).astype(int)


@pytest.fixture
def photo():
    """A picture that each format keeps nearly as it is."""
    y, x = np.mgrid[:64, :64]
    return Image.fromarray(np.stack([2 * x, 2 * y, x + y], axis=2).astype(np.uint8))


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind, photo):
    found = pixels_of(in_bytes(photo, kind))
    assert found.shape == (64, 64, 3)
    assert abs(found - np.asarray(photo)).mean() < 8


def test_no_program_is_started_on_an_image(monkeypatch):
    """Pillow starts Ghostscript on PostScript, whatever the name of the file is."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("it is started"))
    with pytest.raises(BadImage, match=r"cannot be decoded \(it is not of the formats JPEG, PNG"):
        open_image(POSTSCRIPT)


def test_grey_images_of_16_bits():
    """vision 2218, pytorch 20524: they are scaled, not cut off."""
    grey = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    found = pixels_of(in_bytes(Image.fromarray(grey), "PNG"))
    assert (found == (grey >> 8)[:, :, None]).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_32_bits_are_refused(mode):
    content = in_bytes(Image.new(mode, (8, 8)), "TIFF")
    with pytest.raises(BadImage, match=rf"has pixels of 32 bits \(mode {mode}\)"):
        open_image(content)


def with_alpha(colour, alpha):
    """One colour everywhere: the picture is in the alpha channel."""
    image = Image.new("RGB", alpha.shape, colour)
    image.putalpha(Image.fromarray(alpha))
    return image


def as_palette(colour, alpha):
    """The same with a palette, whose colours are more or less transparent."""
    image = Image.fromarray(alpha, "P")
    image.putpalette(256 * list(colour))
    return in_bytes(image, "PNG", transparency=bytes(range(256)))


FORMS = {
    "RGBA": lambda colour, alpha: in_bytes(with_alpha(colour, alpha), "PNG"),
    "LA": lambda colour, alpha: in_bytes(with_alpha(colour, alpha).convert("LA"), "PNG"),
    "WebP": lambda *what: in_bytes(with_alpha(*what), "WEBP", lossless=True, exact=True),
    "TIFF": lambda colour, alpha: in_bytes(with_alpha(colour, alpha), "TIFF"),
    "palette": as_palette,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("level", "behind"), [(0, 255), (128, 0), (255, 0)])
def test_a_picture_in_the_alpha_channel_is_seen(form, level, behind):
    """Without it each pixel would be of one colour, often black."""
    alpha = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    found = pixels_of(FORMS[form](3 * (level,), alpha))
    share = alpha[:, :, None] / 255
    expected = share * level + (1 - share) * behind
    assert abs(found - expected).max() <= 1


def test_grey_is_behind_a_photo(photo):
    """Whatever colours its transparent pixels have."""
    cut_out = photo.copy()
    alpha = np.zeros((64, 64), np.uint8)
    alpha[:, 32:] = 255
    cut_out.putalpha(Image.fromarray(alpha))
    found = pixels_of(in_bytes(cut_out, "PNG"))
    assert (found[:, :32] == 128).all()
    assert (found[:, 32:] == np.asarray(photo)[:, 32:]).all()


def test_a_long_text_beside_the_picture(photo):
    """Pillow 8363: by default it refuses more than 1 MiB, such as the history of an editor."""
    text = PngImagePlugin.PngInfo()
    text.add_text("history", "x" * 2**21, zip=True)
    assert np.array_equal(pixels_of(in_bytes(photo, "PNG", pnginfo=text)), np.asarray(photo))


def test_too_many_pixels(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadImage, match=r"has too many pixels: Image size \(1600 pixels\)"):
        open_image(in_bytes(Image.new("RGB", (40, 40)), "PNG"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_image_is_an_image_or_a_bad_one(kind, photo):
    """No other exception comes out of Pillow, whatever is wrong."""
    draw = np.random.default_rng(random_seed())
    whole = in_bytes(photo, kind)
    with pytest.raises(BadImage, match=r"fetch it again, or leave it out"):
        open_image(whole[: len(whole) // 3])
    for _ in range(60):
        content = bytearray(whole)
        for place in draw.integers(0, min(len(whole), 400), 3):
            content[place] = draw.integers(256)
        try:
            open_image(bytes(content))
        except BadImage as error:
            assert str(error)
