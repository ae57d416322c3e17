"""What changes between two recipes that are read side by side, for the tests of their reasons."""

import ast
import difflib
import re

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


def comment_above(lines, number):
    """The comment right above the line `number` (from 1) of a file, or an empty text."""
    first = number - 1
    while first > 0 and is_comment(lines[first - 1]):
        first -= 1
    return " ".join(line.strip().removeprefix("# ") for line in lines[first : number - 1])
