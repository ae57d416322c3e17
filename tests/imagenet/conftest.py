import pytest
from launch import need

from imagenet import jpegs


@pytest.fixture
def nvimgcodec():
    """Skip where NVIDIA's decoder is missing."""
    try:
        from nvidia import nvimgcodec  # noqa: F401 - whether it is there
    except ImportError:
        need(False, "pip install nvidia-nvimgcodec-cu13[all]")


@pytest.fixture(params=jpegs.LOADERS)
def loader(request):
    """Each name for --loader."""
    if request.param == "nvimgcodec":
        request.getfixturevalue("nvimgcodec")
    return request.param
