"""What changes between two recipes that are read side by side; writes docs/changes.md.

python docs/changes.py
"""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "changes.md"
MARK = re.compile(r"\b(?:dist|amp|fsdp): ")
# recipe: the one it is read beside
PAIRS = {
    "dp.py": "single.py",
    "ddp_spawn.py": "single.py",
    "ddp_launch.py": "single.py",
    "hvd.py": "single.py",
    "fsdp.py": "ddp_launch.py",
    "ddp_amp.py": "ddp_launch.py",
    "apex_amp.py": "ddp_launch.py",
}
HEAD = """<!-- python docs/changes.py writes this page from the recipes in mnist/ -->
# What changes, line by line

The changed lines of each recipe, compared with `single.py` or `ddp_launch.py`, with their reasons.
The number is that of the new line; removed lines are ~~struck out~~. Docstrings and imports are
left out. A line without a reason goes with the one above or below, or only hands on what is
explained elsewhere. Only [single.py and DDP's recipes](gpu.md#a-whole-step-as-one-cuda-graph) have
`--cuda-graph`. In CIFAR-10's and ImageNet's recipes the same lines change; in ImageNet's a few more
do, for their own flags. [strategies.md](strategies.md) says what each strategy does.
"""


def body(path):
    """The lines of a recipe without docstring, imports and blank lines: [(number from 1, line)]."""
    text = path.read_text()
    tree = ast.parse(text)
    is_import = (ast.Import, ast.ImportFrom)
    left_out = [tree.body[0], *(node for node in tree.body if isinstance(node, is_import))]
    numbers = {n for node in left_out for n in range(node.lineno, node.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    return [(n, line) for n, line in lines if n not in numbers and line.strip()]


def changes(path, other):
    """What `path` has that `other` has not: [(old lines, new lines with their numbers)]."""
    old, new = body(other), body(path)
    texts = [[line for _, line in lines] for lines in (old, new)]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    return [
        ([line for _, line in old[i1:i2]], new[j1:j2])
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    ]


def is_comment(line):
    return line.lstrip().startswith("# ")


def changed_lines(different):
    """The number of changed lines of code in `different`, a result of `changes`."""
    count = 0
    for old, new in different:
        codes = [line for _, line in new if not is_comment(line)]
        count += max(len([line for line in old if not is_comment(line)]), len(codes))
    return count


def comment_above(lines, number):
    """The comment right above the line `number` (from 1) of a file, or an empty text."""
    first = number - 1
    while first > 0 and is_comment(lines[first - 1]):
        first -= 1
    return " ".join(line.strip().removeprefix("# ") for line in lines[first : number - 1])


def ends_of_statements(text):
    """{line: the last line of the innermost statement that it is in}, from 1."""
    ends = {}
    # ast.walk begins with the outer ones.
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            ends.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.end_lineno))
    return ends


def groups_of(new, text):
    """Group new lines by the reason above them: [[number of the first, lines of code, reason]].

    A reason covers a statement with its block, up to the next comment. The header of a block that
    has none takes that of the block. `text` is that of the whole file.
    """
    lines = text.splitlines()
    ends = ends_of_statements(text)
    groups = []
    begins = True
    last = 0
    for number, line in new:
        if is_comment(line):
            begins = True
            continue
        if begins or number > last:
            reason = comment_above(lines, number)
            # A decorator is a line of its own.
            last = ends.get(number, number)
            before = groups[-1] if groups else None
            if begins and before and is_bare_header(before) and indent(line) > indent(before[1][0]):
                before[2] = reason
            else:
                groups.append([number, [], reason])
            begins = False
        groups[-1][1].append(line)
    return groups


def is_bare_header(group):
    """Whether a group is the header of a block, without a reason."""
    _, codes, reason = group
    return codes[-1].endswith(":") and not reason


def indent(line):
    return len(line) - len(line.lstrip())


def likeness(old, new):
    """How many characters of the line `old` are also in the line `new`, in runs of three."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size > 2)


def first_name(line):
    """The dotted name at the beginning of a line; of a decorator its @."""
    return re.match(r"@|\W*[\w.]*", line.strip()).group()


def table(path, different):
    """The rows of a Markdown table of what `changes` gives for `path`: where, the code, why."""
    rows = ["| line | code | why |", "| --- | --- | --- |"]
    text = path.read_text()
    # What has only moved is not struck out.
    kept = {line.strip() for _, new in different for _, line in new}
    for old, new in different:
        groups = groups_of(new, text)
        gone = [[] for _ in groups]
        starts = {first_name(code) for _, codes, _ in groups for code in codes}
        for line in [line.strip() for line in old if not is_comment(line)]:
            if line in kept:
                continue
            scores = [max(likeness(line, code) for code in codes) for _, codes, _ in groups]
            is_like_one = max(scores, default=0) >= len(line) / 2
            if not is_like_one and first_name(line) not in starts:
                # Nothing stands in its place.
                rows.append(f"| | ~~`{cell(line)}`~~ | |")
                continue
            gone[scores.index(max(scores))].append(f"~~`{cell(line)}`~~")
        for struck, (number, codes, reason) in zip(gone, groups, strict=True):
            least = min(map(indent, codes))
            shown = [f"`{cell(line[least:])}`" for line in codes]
            link = f"[{number}](../{path.relative_to(ROOT)}#L{number})"
            # Above the reason may stand a comment that both recipes have.
            why = cell(MARK.split(reason)[-1])
            rows.append(f"| {link} | {'<br>'.join(struck + shown)} | {why} |")
    return "\n".join(rows)


def cell(text):
    return text.replace("|", r"\|")


def page():
    parts = [HEAD]
    for name, other in PAIRS.items():
        path = ROOT / "mnist" / name
        different = changes(path, path.parent / other)
        links = f"[mnist/{name}](../mnist/{name}) differs from [{other}](../mnist/{other})"
        count = f"{changed_lines(different)} lines of code"
        rows = table(path, different)
        parts.append(f"## From {other} to {name}\n\n{links} in {count}.\n\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
