"""docs/compare.html, in a browser."""

import pytest
from recipes import ROOT

from docs import compare

ADDRESS = (ROOT / "docs" / "compare.html").as_uri()


@pytest.mark.check
def test_it_has_the_scripts_as_they_are():
    page = (ROOT / "docs" / "compare.html").read_text()
    assert page == compare.page(), "run: python docs/compare.py"


@pytest.fixture
def page(browser):
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    yield page
    page.close()
    assert errors == []


def address(page):
    return page.evaluate("location.hash")


def texts(page, side):
    """The lines of the left or the right script, as the page shows them with nothing folded."""
    cells = page.locator(f"td.code.{side}:not(.empty)")
    return [text.rstrip() for text in cells.all_text_contents()]


def test_a_pair_is_shown_whole(page):
    page.goto(f"{ADDRESS}#mnist/single.py...imagenet/fsdp.py")
    for side, script in (("left", "mnist/single.py"), ("right", "imagenet/fsdp.py")):
        assert texts(page, side) == (ROOT / script).read_text().splitlines()


def test_the_address_names_the_pair(page):
    page.goto(f"{ADDRESS}#minimal/single.py...minimal/hvd.py")
    page.get_by_label("left").select_option("minimal/ddp_launch.py")
    assert address(page) == "#minimal/ddp_launch.py...minimal/hvd.py"
    page.go_back()
    assert page.get_by_label("left").input_value() == "minimal/single.py"


def test_keys(page):
    page.goto(f"{ADDRESS}#mnist/single.py...mnist/ddp_launch.py")
    equal = page.locator("tr.equal:visible")
    folded = equal.count()
    page.locator("tr.fold button").first.click()
    assert equal.count() > folded
    page.keyboard.press("f")
    assert page.locator("tr.fold").count() == 0
    page.keyboard.press("r")
    reason = page.locator("tr", has_text="ddp_model = Distributed").locator("td.reason")
    assert reason.inner_text().startswith("dist: averages gradients")
    assert "# dist:" not in page.locator("table").inner_text()
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert "torchrun" in page.locator("tr.current").inner_text()
    page.get_by_title("previous change").click()
    assert "one device" in page.locator("tr.current").inner_text()
    # A list that has the focus leaves the letters to the page.
    page.get_by_label("right").focus()
    page.keyboard.press("x")
    assert address(page) == "#mnist/ddp_launch.py...mnist/single.py"
    page.get_by_label("right").blur()
    page.keyboard.press("ArrowRight")
    assert address(page) == "#mnist/ddp_launch.py...mnist/dp.py"


def test_the_place_stays_when_equal_lines_unfold(page):
    page.goto(f"{ADDRESS}#mnist/single.py...mnist/ddp_launch.py")
    line = page.locator("tr", has_text="ddp_model = Distributed")
    line.evaluate("row => scrollTo(0, row.offsetTop - 100)")
    before = line.bounding_box()["y"]
    page.keyboard.press("f")
    assert abs(line.bounding_box()["y"] - before) < 2


def test_the_part_of_a_line_that_differs_is_marked(page):
    page.goto(f"{ADDRESS}#mnist/single.py...mnist/ddp_launch.py")
    parts = "side => [...CSS.highlights.get(side)].map(String)"
    assert ", world.size" in page.evaluate(parts, "right")
    assert "len(val_set)" in page.evaluate(parts, "left")


def test_a_narrow_window_and_a_dark_screen(page):
    page.goto(ADDRESS)
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    # A line that is equal is there once.
    line = page.locator("tr.equal", has_text="import torch.nn.functional").locator("td.code")
    assert [line.nth(n).is_visible() for n in range(2)] == [False, True]
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
