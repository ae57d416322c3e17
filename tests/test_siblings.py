"""The recipes are read in pairs: what tells two of them apart is what distribution adds, and no more."""

import ast
import re

import pytest
from launch import DATASETS, RECIPES, ROOT, name_of

from docs.changes import PAIRS, changed_lines, changes

SECTIONS = ["parse_args", "train_one_epoch", "evaluate", "main"]
LINES = {"mnist": 120, "cifar10": 140, "imagenet": 180}
LONGEST_FUNCTION = {"mnist": 30, "cifar10": 30, "imagenet": 34}  # main with --evaluate and --sync-bn, two lines each
# the changed lines that a recipe may have against the one it is read against
BUDGETS = {"dp.py": 12, "ddp_spawn.py": 45, "ddp_launch.py": 35, "hvd.py": 40, "ddp_amp.py": 15, "apex_amp.py": 15}
# What a data set says in its own way (as a regular expression, and what that stands for); all else is the same.
OF_A_DATASET = {r"data\.(mnist|cifar10|imagenet)\(": "data.NAME(",
                r"^([-+])\(loss / run\.batches_in_step\)\.": r"\1loss.",
                r"loss / run\.batches_in_step": "loss", r", delay_unscale=not run\.ends_step": "",
                r", label_smoothing=run\.args\.label_smoothing": ""}
# What only imagenet has, for --sync-bn, --compile and --accumulate: lines with these words.
ONLY = r"sync.bn|compile|Sync.?Batch.?Norm|require_backward_grad_sync|enable_allreduce|backward_passes_per_step"


def pairs():
    return [pytest.param(recipe, recipe.parent / PAIRS[recipe.name][0], PAIRS[recipe.name][1], id=name_of(recipe))
            for recipe in RECIPES if recipe.name != "single.py"]


def statements(text):
    """(first line, last line) of what a comment can stand for.

    That is a simple statement, a header with the statement after it, or a whole `with`, which indents what is in it.
    """
    spans = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.For | ast.Try | ast.ExceptHandler):
            spans.append((node.lineno, node.body[0].end_lineno))
            if getattr(node, "orelse", []):
                spans.append((node.body[-1].end_lineno + 1, node.orelse[0].end_lineno))
        elif isinstance(node, ast.FunctionDef):
            spans.append((node.lineno, node.body[0].lineno - 1))
        elif isinstance(node, ast.stmt):
            spans.append((node.lineno, node.end_lineno))
    return spans


def test_the_pairs_are_found():
    names = {recipe.name for recipe in RECIPES}
    assert names == {*PAIRS, "single.py"}
    assert len(pairs()) == len(PAIRS) * len(DATASETS) >= 18
    for folder in DATASETS:
        assert {path.name for path in folder.glob("*.py")} == names


@pytest.mark.parametrize(("recipe", "other", "mark"), pairs())
def test_diff_budget(recipe, other, mark):
    assert 0 < changed_lines(changes(recipe, other)) <= BUDGETS[recipe.name]


@pytest.mark.parametrize(("recipe", "other", "mark"), pairs())
def test_added_statements_give_their_reason(recipe, other, mark):
    text = recipe.read_text()
    lines = text.splitlines()
    for _, new in changes(recipe, other):
        for number, line in new:
            around = [span for span in statements(text) if span[0] <= number <= span[1]]
            shown = [lines[n - 1] for span in around for n in range(span[0], span[1] + 1)]
            above = [lines[span[0] - 2] for span in around if lines[span[0] - 2].strip().startswith(mark)]
            assert mark in line + "".join(shown + above), f"{name_of(recipe)}:{number} gives no reason"


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_anatomy(recipe):
    text = recipe.read_text()
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions] == SECTIONS
    assert isinstance(tree.body[-1], ast.If), "the launch line comes last"
    assert len(text.splitlines()) <= LINES[recipe.parent.name]
    for node in functions:
        assert node.end_lineno - node.lineno < LONGEST_FUNCTION[recipe.parent.name], node.name
    if recipe.name == "single.py":
        assert "dist:" not in text


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_the_diff_is_the_same_for_all_datasets(name):
    def normalised(folder):
        different = changes(folder / name, folder / PAIRS[name][0])
        lines = [f"-{line.strip()}" for old, _ in different for line in old]
        lines += [f"+{line.strip()}" for _, new in different for _, line in new]
        for pattern, stands_for in OF_A_DATASET.items():
            lines = [re.sub(pattern, stands_for, line) for line in lines]
        return [line for line in lines if not re.search(ONLY, line, re.IGNORECASE)]

    first, *others = (normalised(folder) for folder in DATASETS)
    for other in others:
        assert first == other


def test_dependencies_point_one_way():
    recipes = {path.stem for path in RECIPES}
    for path in [*RECIPES, *(ROOT / "common").glob("*.py")]:
        names = {alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)
                 for alias in node.names}
        names |= {f"{node.module}.{alias.name}" for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.ImportFrom) for alias in node.names}
        parts = {part for name in names for part in name.split(".")}
        assert not parts & recipes, f"{path} imports a recipe"
        if path.parent.name == "common":
            assert not parts & {"distributed", "horovod", "apex"}, f"{path} imports what only a recipe may"


def test_no_file_shadows_a_package():
    for path in RECIPES:
        assert path.stem not in {"torch", "torchvision", "horovod", "apex", "tensorboard", "common"}


def test_sizes():
    """A copied recipe takes all of common/ along: a person reads it in an hour, and each file in one go."""
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / "common").glob("*.py")}
    assert sum(lines.values()) < 1970
    assert max(lines.values()) <= 350


def test_no_word_of_another_dataset():
    """A recipe that was copied from another data set's and not finished."""
    for recipe in RECIPES:
        for other in DATASETS:
            if other != recipe.parent:
                assert not re.search(rf"\b{other.name}\b", recipe.read_text(), re.IGNORECASE), name_of(recipe)
