"""The documents are right: what is copied from the code agrees with it. test_site.py has links."""

import re
import textwrap
from xml.etree import ElementTree

import pytest
from forked import compute
from launch import checkpoint, largest_difference
from recipes import MINIMAL, ROOT, changed_copy

README = ROOT / "README.md"


@pytest.mark.check
def test_the_figures_in_the_readme_are_those_of_the_pages():
    """Each figure with two decimals is in a page that its sentence links."""
    section = re.search(r"^## Measured\n(.*?)^## ", README.read_text(), re.MULTILINE | re.DOTALL)[1]
    items = section.partition("\n\n(torch")[0].split("\n- ")[1:]
    assert items
    for item in items:
        pages = " ".join((ROOT / page).read_text() for page in re.findall(r"\]\(([^)]+)\)", item))
        for figure in re.findall(r"\b\d+\.\d\d\b%?", item):
            assert f" {figure} " in pages, figure


@pytest.mark.check
def test_the_diff_in_the_readme_is_that_of_minimal():
    (block,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    single, ddp = ((MINIMAL / name).read_text() for name in ("single.py", "ddp_launch.py"))
    for line in block.splitlines():
        if line.startswith("-"):
            assert line[1:] in single and line[1:] not in ddp
        elif line.startswith("+"):
            assert line[1:] in ddp and line[1:] not in single


@pytest.mark.check
def test_each_drawing_is_well_formed_and_in_a_page():
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    drawings = [path for path in ROOT.glob("docs/drawings/*") if path.suffix in (".svg", ".png")]
    assert drawings
    for drawing in drawings:
        assert f"](drawings/{drawing.name})" in pages, drawing
        if drawing.suffix == ".svg":
            ElementTree.parse(drawing)


@pytest.mark.check
def test_what_the_page_on_tutorials_says_to_search_for_is_there():
    page = ROOT / "docs" / "from-a-tutorial.md"
    rows = re.findall(r"^\| [^|]+ \| \[.+?\]\((.+?)\) \| (.*?) \| ", page.read_text(), re.M)
    assert rows
    for path, to_search in rows:
        text = (page.parent / path).read_text()
        missing = [code for code in re.findall(r"`([^`]+)`", to_search) if code not in text]
        assert missing == [], path


def test_gradients_in_16_bits(tmp_path):
    """As the page on strategies sends them: nearly the same weights, but not the same."""
    page = (ROOT / "docs" / "strategies.md").read_text()
    (hook,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    line = "    ddp_model.broadcast_buffers = False\n"
    weights = {}
    for name, lines in (("fp32", line), ("bf16", line + textwrap.indent(hook, "    "))):
        folder = tmp_path / name
        changed_copy(folder, "mnist/ddp_launch.py", line, lines)
        flags = "--device cpu --model lenet --synthetic 320 -b 16 --epochs 1 --log-dir log"
        start = "torchrun --standalone --nproc-per-node=2"
        compute(f"{start} mnist/ddp_launch.py {flags}", cwd=folder)
        weights[name] = checkpoint(folder / "log")["model"]
    assert 0 < largest_difference(weights["bf16"], weights["fp32"]) < 0.1
