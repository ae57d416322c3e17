"""What changes between two recipes that are read side by side; writes docs/changes.md from the files of mnist/.

    python docs/changes.py
"""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "changes.md"
MARK = re.compile("# (?:dist|amp|fsdp): ")  # a changed line can also keep the reason that it has in the other recipe
# recipe: (the one it is read beside, the mark before the reason on a line that it adds)
PAIRS = {
    "dp.py": ("single.py", "# dist: "),
    "ddp_spawn.py": ("single.py", "# dist: "),
    "ddp_launch.py": ("single.py", "# dist: "),
    "hvd.py": ("single.py", "# dist: "),
    "fsdp.py": ("ddp_launch.py", "# fsdp: "),
    "ddp_amp.py": ("ddp_launch.py", "# amp: "),
    "apex_amp.py": ("ddp_launch.py", "# amp: "),
}
HEAD = """<!-- python docs/changes.py writes this page from the recipes in mnist/ -->
# What changes, line by line

The changed lines of each recipe, compared with `single.py` or `ddp_launch.py`, with their reasons. The number is that
of the new line; removed lines are ~~struck out~~. Docstrings and imports are left out. In CIFAR-10's and ImageNet's
recipes the same lines change; in ImageNet's a few more do, for their own flags. [strategies.md](strategies.md) says
what each strategy does.
"""


def body(path):
    """The lines of a recipe without its docstring, its imports and blank lines, each with its number (from 1)."""
    text = path.read_text()
    tree = ast.parse(text)
    left_out = [tree.body[0], *(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))]
    numbers = {n for node in left_out for n in range(node.lineno, node.end_lineno + 1)}
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if n not in numbers and line.strip()]


def changes(path, other):
    """What `path` has that `other` has not: a list of (old lines, new lines with their numbers)."""
    old, new = body(other), body(path)
    matcher = difflib.SequenceMatcher(None, [line for _, line in old], [line for _, line in new], autojunk=False)
    return [([line for _, line in old[i1:i2]], new[j1:j2])
            for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]


def changed_lines(different):
    """The number of changed lines in `different`, a result of `changes`."""
    return sum(max(len(old), len(new)) for old, new in different)


def split(line):
    """(code, reason) of a line; either can be empty."""
    code, _, reason = MARK.sub("\0", line, count=1).partition("\0")
    return code.rstrip(), reason


def statements(lines):
    """Group new lines [(number, line)] with their reason: a list of (number, lines of code, reasons).

    A reason ends a group, but also covers the lines after it that are indented deeper and have none. It can continue in
    lines that hold only a comment.
    """
    groups = []
    for number, line in lines:
        if groups and groups[-1][2] and line.lstrip().startswith("# "):
            groups[-1][2][-1] += line.strip()[1:]
            continue
        code, reason = split(line)
        if groups and (not groups[-1][2] or (not reason and indent(code) > indent(groups[-1][1][0]))):
            groups[-1][1].append(code)
        else:
            groups.append((number, [code], []))
        if reason:
            groups[-1][2].append(reason)
    return groups


def indent(line):
    return len(line) - len(line.lstrip())


def likeness(old, new):
    """How many characters of the line `old` are also in the line `new`, in runs of three or more."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size > 2)


def table(path, different):
    """The rows of a Markdown table of what `changes` gives for `path`: where, the code, why."""
    rows = ["| line | code | why |", "| --- | --- | --- |"]
    kept = {split(line)[0].strip() for _, new in different for _, line in new}  # it only moved
    for old, new in different:
        groups = statements(new)
        gone = [[] for _ in groups]
        for line in [line.partition("  # ")[0].strip() for line in old]:
            if line not in kept and not groups:  # nothing stands in its place
                rows.append(f"| | ~~`{cell(line)}`~~ | |")
            elif line not in kept:
                likest = max(range(len(groups)), key=lambda k: max(likeness(line, code) for code in groups[k][1]))
                gone[likest].append(f"~~`{cell(line)}`~~")
        for struck, (number, lines, reasons) in zip(gone, groups, strict=True):
            code = "<br>".join(struck + [f"`{cell(line[indent(lines[0]):])}`" for line in lines])
            rows.append(f"| [{number}](../{path.relative_to(ROOT)}#L{number}) | {code} | {cell('; '.join(reasons))} |")
    return "\n".join(rows)


def cell(text):
    return text.replace("|", r"\|")


def page():
    parts = [HEAD]
    for name, (other, _) in PAIRS.items():
        path = ROOT / "mnist" / name
        different = changes(path, path.parent / other)
        parts.append(f"""## From {other} to {name}

[mnist/{name}](../mnist/{name}) differs from [{other}](../mnist/{other}) in {changed_lines(different)} lines.

{table(path, different)}
""")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
