"""Make docs/compare.html, which shows any two of the scripts side by side.

    python docs/compare.py
    python docs/compare.py --picture  # makes docs/compare.png of it, with Chromium

Needs tests/requirements.txt. docs/compare.in.html is the page; this adds the scripts to it, with
their colours by Pygments, and which of their lines are equal by difflib.
"""

import itertools
import json
import re
import shutil
import sys
from difflib import SequenceMatcher
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parents[1]
STRATEGIES = (
    "single",
    "dp",
    "ddp_spawn",
    "ddp_launch",
    "ddp_amp",
    "apex_amp",
    "fsdp",
    "hvd",
)
FOLDERS = ("mnist", "cifar10", "imagenet", "minimal")
# The comments that say why a line is there: each belongs to the line below it.
REASON = re.compile(r" *# (dist|amp|fsdp): ")


def scripts() -> list[str]:
    """The scripts that have a pair, in the order of the lists."""
    paired = [f"{folder}/{name}.py" for folder in FOLDERS for name in STRATEGIES]
    examples = sorted((ROOT / "examples").glob("*.py"))
    return paired + [f"examples/{path.name}" for path in examples]


def rows_of(script: str) -> list[tuple[str, list[str]]]:
    """(line, the lines of its reason) for each line of a script."""
    rows = []
    reason = []
    for line in (ROOT / script).read_text().splitlines():
        goes_on = reason and line.lstrip().startswith("# ")
        if REASON.match(line) or goes_on:
            reason.append(line)
        else:
            rows.append((line, reason))
            reason = []
    return rows


def coloured(lines: list[str]) -> list[str]:
    """The lines of one script as HTML."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    html = highlight("\n".join(lines), lexer, HtmlFormatter(nowrap=True))
    return html.removesuffix("\n").split("\n")


def equal_parts(left: list[str], right: list[str]) -> list[tuple[int, int, int]]:
    """(place in `left`, place in `right`, length) of each run of equal lines."""
    matcher = SequenceMatcher(lambda line: not line.strip(), left, right, autojunk=False)
    return [tuple(block) for block in matcher.get_matching_blocks() if block.size]


def content() -> dict:
    """What the page needs: each line once, the rows of the scripts, and the equal parts of pairs.

    "scripts" has for each script its rows: the number of a line, and those of its reason.
    """
    rows = {script: rows_of(script) for script in scripts()}
    numbers = {}
    numbered = {}
    for script, parts in rows.items():
        # In the order of the file, as colours depend on the lines before.
        in_order = [line for code, reason in parts for line in (*reason, code)]
        html = iter([numbers.setdefault(text, len(numbers)) for text in coloured(in_order)])
        numbered[script] = []
        for _, reason in parts:
            of_reason = [next(html) for _ in reason]
            numbered[script].append([next(html), *of_reason])
    code = {script: [line for line, _ in parts] for script, parts in rows.items()}
    pairs = {
        f"{left} {right}": equal_parts(code[left], code[right])
        for left, right in itertools.combinations(code, 2)
    }
    return {"lines": list(numbers), "scripts": numbered, "pairs": pairs}


def page() -> str:
    """The whole page."""
    # "<" in a text would end the script it is in.
    data = json.dumps(content(), separators=(",", ":")).replace("<", "\\u003c")
    template = (ROOT / "docs" / "compare.in.html").read_text()
    return template.replace("/* content */", data)


def take_picture() -> None:
    """Make docs/compare.png: two recipes, from the wrapper to the step."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        # Chromium refuses its sandbox to root.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1200, "height": 700})
        shown.goto((ROOT / "docs" / "compare.html").as_uri())
        shown.get_by_label("reasons").check()
        wrapper = shown.locator("tr", has_text="ddp_model = Distributed")
        wrapper.evaluate("row => scrollTo(0, row.offsetTop - 20)")
        shown.screenshot(path=ROOT / "docs" / "compare.png")


if __name__ == "__main__":
    (ROOT / "docs" / "compare.html").write_text(page())
    if "--picture" in sys.argv:
        take_picture()
