"""The documents are right: links resolve, and tables and drawings agree with the code."""

import re

import pytest
from recipes import ROOT

from cifar10 import cifar
from common import schedule
from common.data import EpochSampler
from docs import changes, draw
from images import models

README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def path_of(page):
    return str(page.relative_to(ROOT))


def prose(page):
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page):
    """(file, anchor) of each link and image of a page that stays in the repository."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))  # brackets in code are no links
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    targets = [
        target for pair in found for target in pair if target and not re.match(r"[a-z]+:", target)
    ]
    for file, _, anchor in (target.partition("#") for target in targets):
        yield ((page.parent / file).resolve() if file else page), anchor


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    slugs = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return slugs


def table(page, first):
    """The rows, as lists of cells, of the table of a page whose head begins with `first`."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    end = next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : end]
    ]


@pytest.mark.check
@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_links_lead_somewhere(page):
    for file, anchor in links(page):
        assert file.exists(), f"{file} is not there"
        if file.suffix == ".md":
            assert not anchor or anchor in anchors(file), (
                f"{path_of(file)} has no heading #{anchor}"
            )
        elif anchor:
            assert int(anchor.removeprefix("L")) <= len(file.read_text().splitlines())


@pytest.mark.check
def test_each_page_is_reached_from_the_readme():
    reached, ahead = set(), [README]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead += {
            file for file, _ in links(page) if file.suffix == ".md" and file.exists()
        } - reached
    assert [path_of(page) for page in sorted({*ROOT.glob("docs/*.md")} - reached)] == []


@pytest.mark.check
def test_the_figures_in_the_readme_are_those_of_the_pages():
    """Each figure with two decimals is in a page that its sentence links."""
    section = re.search(r"^## Measured\n(.*?)^## ", README.read_text(), re.MULTILINE | re.DOTALL)[1]
    found = 0
    for item in section.partition("\n\n(torch")[0].split("\n- ")[1:]:
        pages = " ".join((ROOT / page).read_text() for page in re.findall(r"\]\(([^)]+)\)", item))
        for figure in re.findall(r"\b\d+\.\d\d\b%?", item):
            assert re.search(rf" {re.escape(figure)} ", pages), figure
            found += 1
    assert found > 5


@pytest.mark.check
def test_changes_are_those_of_the_recipes():
    assert changes.PAGE.read_text() == changes.page(), "python docs/changes.py"


@pytest.mark.check
def test_the_diff_in_the_readme_is_that_of_minimal():
    """It shows each changed line, and above it the beginning of its reason."""
    page = README.read_text()
    (block,) = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    single, ddp = (
        [line.strip() for line in (ROOT / "minimal" / name).read_text().splitlines()]
        for name in ("single.py", "ddp_launch.py")
    )
    reason = ""
    for line in filter(None, block.splitlines()):
        if line.startswith(" # "):
            reason = line.removeprefix(" # ")
        elif line[0] == "-":
            assert line[1:].strip() in single
        else:
            numbers = [n for n, other in enumerate(ddp, 1) if other == line[1:].strip()]
            assert numbers, line
            reasons = " ".join(changes.comment_above(ddp, n) for n in numbers)
            assert all(part in reasons for part in re.split("; |, then ", reason)), reason


@pytest.mark.check
def test_drawings_are_those_of_the_script():
    assert {path.stem: path.read_text() for path in draw.FOLDER.iterdir()} == {
        name: drawing() for name, drawing in draw.DRAWINGS.items()
    }, "python docs/draw.py"


def test_example_of_batch_sizes():
    """Each row is what the sampler and the schedule of the recipes give for that many processes."""
    rows = table("batch-size.md", "processes")
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    for row in rows:
        world_size, batch, global_batch, steps = map(int, row[:4])
        assert (batch, global_batch) == (32, 32 * world_size)
        for rank in range(world_size):
            assert len(EpochSampler(1024, batch, rank, world_size)) == steps * batch
        for scaling, rate in zip(("linear", "sqrt", "none"), row[4:], strict=True):
            assert f"{0.02 * schedule.lr_factor(scaling, world_size):.3g}" == rate


def test_sizes_of_the_gradients():
    from torchvision.models import resnet50

    sizes = {
        "MNIST's convnet": models.ConvNet(1, 28),
        "ImageNet's resnet50": resnet50(),
        "CIFAR-10's resnet18": cifar.build("resnet18"),
    }
    for name, parameters, size, sent in table("allreduce.md", "model"):
        count = sum(weights.numel() for weights in sizes[name].parameters())
        assert parameters == f"{count:,}"
        assert size == f"{4 * count / 1e6:.2f} MB"
        assert sent == f"{4 * count * 2 * 7 / 8 / 1e6:.2f} MB"


def test_speed_ups_of_the_published_table():
    rows = [list(map(float, row[:3] + row[4:6])) for row in table("allreduce.md", "GPUs")]
    first = rows[0]
    for row in rows:
        for seconds, speed_up in ((1, 2), (3, 4)):
            assert row[speed_up] == round(first[seconds] / row[seconds], 2)


@pytest.mark.check
def test_the_steps_of_tutorials_are_in_the_files():
    """What a row says to search for is in the file that it links."""
    page = ROOT / "docs" / "from-a-tutorial.md"
    found = 0
    for row in re.findall(r"^\| [^|]+ \| \[.+?\]\((.+?)\) \| (.*?) \| ", page.read_text(), re.M):
        path, to_search = row
        text = (page.parent / path).read_text()
        for code in re.findall(r"`([^`]+)`", to_search):
            assert code in text, f"{path} has no {code}"
            found += 1
    assert found > 30
