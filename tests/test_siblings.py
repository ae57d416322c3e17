"""The recipes are read in pairs: two of them differ in what distribution adds, and nothing else."""

import ast
import re

import pytest
from recipes import DATASETS, NAMES, RECIPES, ROOT, beside, carried, commands, imports, name_of

from docs.changes import MARK, PAIRS, changed_lines, changes

pytestmark = pytest.mark.check

SECTIONS = ["parse_args", "train_one_epoch", "evaluate", "main"]
LINES = {"mnist": 125, "cifar10": 125, "imagenet": 140}
LONGEST_FUNCTION = {"mnist": 43, "cifar10": 43, "imagenet": 49}  # main: it shows all that the strategy sets up
# the most lines in which a recipe may differ from the one it is read beside
BUDGETS = {"dp.py": 12, "ddp_spawn.py": 45, "ddp_launch.py": 35, "hvd.py": 40, "fsdp.py": 25,
           "ddp_amp.py": 15, "apex_amp.py": 15}
# What is specific to a data set (as a regular expression, and what that stands for); all else is the same.
DATASET_SPECIFIC = {r"\(len\(train_set\), args\.batch_size,": "(len(train_set), batch_size,",
                r"\bshards\.save": "sharded.save", ", shards.load": "",
                r"^([-+])\(loss / run\.accumulate\)\.": r"\1loss.", r"loss / run\.accumulate": "loss",
                r", delay_unscale=not ends_step": "", r", label_smoothing=run\.args\.label_smoothing": ""}
# What only imagenet has, for --sync-bn, --evaluate, --channels-last, --accumulate and --sharded-checkpoint: lines with
# these words.
IMAGENET_ONLY = (r"sync.bn|Sync.?Batch.?Norm|networks\.report|networks\.build|require_backward_grad_sync|"
                 "set_requires_gradient_sync|enable_allreduce|backward_passes_per_step|sharded.checkpoint|run.resume|"
                 r"zero_grad\(\)  # amp")


def pairs():
    return [pytest.param(recipe, recipe.parent / PAIRS[recipe.name][0], id=name_of(recipe))
            for recipe in RECIPES if recipe.name != "single.py"]


def statements(text):
    """(first line, last line) of what a comment can stand for.

    That is a simple statement, a header with the statement after it, or a whole `with` or `if` without an `else`.
    """
    spans = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and not node.orelse:
            spans.append((node.lineno, node.end_lineno))
        elif isinstance(node, ast.If | ast.For | ast.Try | ast.ExceptHandler):
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


@pytest.mark.parametrize(("recipe", "other"), pairs())
def test_diff_budget(recipe, other):
    assert 0 < changed_lines(changes(recipe, other)) <= BUDGETS[recipe.name]


@pytest.mark.parametrize(("recipe", "other"), pairs())
def test_added_statements_give_their_reason(recipe, other):
    text = recipe.read_text()
    lines = text.splitlines()
    for _, new in changes(recipe, other):
        for number, line in new:
            if line.lstrip().startswith("# "):
                continue  # it is a reason, or goes on with one
            around = [span for span in statements(text) if span[0] <= number <= span[1]]
            shown = [lines[n - 1] for span in around for n in range(span[0], span[1] + 1)]
            assert MARK.search(line + "".join(shown)), f"{name_of(recipe)}:{number} gives no reason"


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
        for pattern, stands_for in DATASET_SPECIFIC.items():
            lines = [re.sub(pattern, stands_for, line) for line in lines]
        return [line for line in lines if not re.search(IMAGENET_ONLY, line, re.IGNORECASE)]

    first, *others = (normalised(folder) for folder in DATASETS)
    for other in others:
        assert first == other


def test_dependencies_point_one_way():
    recipes, modules = {path.stem for path in RECIPES}, {path.stem for recipe in RECIPES for path in beside(recipe)}
    for path in {*RECIPES, *(ROOT / "common").glob("*.py"), *(path for recipe in RECIPES for path in beside(recipe))}:
        parts = {part for name in imports(path) for part in name.split(".")}
        own = {part for name in imports(path) if not name.startswith("torch.") for part in name.split(".")}
        assert not own & recipes, f"{path} imports a recipe"
        if path.parent.name == "common":
            assert not parts & modules, f"{path} imports what only one data set has"
            # for fsdp.py, and for --comm-hook
            allowed = {"distributed"} if path.name in ("sharded.py", "hooks.py") else set()
            assert not parts & {"distributed", "horovod", "apex"} - allowed, f"{path} imports what only a recipe may"
    for folder in DATASETS:
        extra = {path.stem for path in folder.glob("*.py")} - recipes
        assert extra == {"mnist": set(), "cifar10": {"cifar"}, "imagenet": {"jpegs", "networks", "shards"}}[folder.name]


def test_no_file_shadows_a_package():
    for path in RECIPES:
        assert path.stem not in {"torch", "torchvision", "horovod", "apex", "tensorboard", "common"}


def length(paths):
    return {path.name: len(path.read_text().splitlines()) for path in paths}


def test_sizes():
    """What a copied recipe needs can be read in an hour, and each file in one sitting."""
    lines = length((ROOT / "common").glob("*.py"))
    assert max(lines.values()) <= 200
    assert sum(lines.values()) <= 1000
    for recipe in RECIPES:
        taken = length(path for path in carried(recipe) if path.parent.name == "common")
        assert (taken.pop("sharded.py", None) is not None) == (recipe.name == "fsdp.py")
        assert (taken.pop("hooks.py", None) is not None) == (recipe.name in ("ddp_launch.py", "ddp_amp.py"))
        assert {"run.py", "data.py", "checkpoint.py"} < taken.keys()
        if recipe.parent.name == "mnist":
            assert sum(taken.values()) <= 840, taken


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_commands_are_the_same_for_all_datasets(name):
    """test_launch.py runs those of mnist/."""
    first, *others = ([line.replace(folder.name, "DATASET") for line in commands(folder / name)] for folder in DATASETS)
    assert first
    assert others == [first, first]


def test_no_word_of_another_dataset():
    """A recipe that was copied from another data set's and not finished."""
    for recipe in RECIPES:
        for other in DATASETS:
            if other != recipe.parent:
                assert not re.search(rf"\b{other.name}\b", recipe.read_text(), re.IGNORECASE), name_of(recipe)
