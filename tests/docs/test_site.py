"""The site of the documents, as `make site` builds it: its links hold, and its search finds."""

import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from launch import need, run
from recipes import ROOT

# What a search finds first, on two pages
FIRST = {"killed resume": "docs/checkpoints/", "address already in use": "docs/errors/"}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    """That of the site, which this process serves. It is not built if a link does not hold."""
    need(shutil.which("mkdocs", path=f"{sys.prefix}/bin"), "make .venv/.tools")
    need((ROOT / ".git").exists(), "a clone of the repository")
    # The environment is there: it is not made again.
    run(f"make --assume-old {sys.prefix}/.tools VENV={sys.prefix} site", ROOT)
    folder = ROOT / ".site" / "html"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# One test, as two at a time would build in the same folder.
@pytest.mark.check
def test_links_search_and_pages(address, browser):
    page = browser.new_page()
    page.goto(address)
    assert "torchrun --nproc-per-node" in page.locator("article").inner_text()
    for words, found in FIRST.items():
        page.locator("input.md-search__input").fill(words)
        # The page searches when a key is released.
        page.keyboard.press("End")
        first = page.locator(".md-search-result__item:first-child")
        first.locator(f"a[href*='{found}']").first.wait_for(state="attached")
    page.goto(f"{address}/docs/compare.html#mnist/single.py...mnist/hvd.py")
    assert page.get_by_label("right").input_value() == "mnist/hvd.py"
    page.close()
