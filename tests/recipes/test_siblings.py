"""The recipes are read in pairs: two of them differ in what distribution adds, and nothing else."""

import ast
import re

import pytest
from recipes import DATASETS, NAMES, RECIPES, ROOT, beside, commands, imports, name_of

from docs.changes import MARK, PAIRS, body, changed_lines, changes, comment_above, is_comment
from scripts import take

pytestmark = pytest.mark.check

SECTIONS = [
    "parse_args",
    "load_data",
    "averages",
    "text",
    "make_step",
    "evaluate",
    "train_to_evaluation",
    "build",
    "main",
]
# What only one strategy or data set has.
MORE_SECTIONS = {
    "add_to",
    "all_reduce",
    "autocast",
    "averaged",
    "check_horovod",
    "connect",
    "start",
    "take_step",
}
# The most lines of code in which a recipe may differ from the one it is read beside. Five of dp.py,
# hvd.py, fsdp.py and apex_amp.py are --cuda-graph, which they lack; 32 of hvd.py are --amp-dtype.
BUDGETS = {
    "dp.py": 23,
    "ddp_spawn.py": 75,
    "ddp_launch.py": 60,
    "hvd.py": 112,
    "fsdp.py": 45,
    "ddp_amp.py": 25,
    "apex_amp.py": 25,
}
# Lines that only name the strategy, or hand on what was explained where it was made.
NEEDS_NO_REASON = (
    r"^def (load_data|make_step|train_to_evaluation|build)|train_to_evaluation\(.*, rank\)$"
    r"|make_step\(|load_data\("
    r"|^timeout = |^strategy = |^strategy=|^(args|state|device),$|^(lr|unit)=|^optional="
    r"|^run = Run\(|^lines=lines,$|^world_size=world_size,$|^\)$|^if run.stop.agreed"
    r"|evaluate\(args, model, |= (connect|build)\("
)


def pairs():
    return [
        pytest.param(recipe, recipe.parent / PAIRS[recipe.name], id=name_of(recipe))
        for recipe in RECIPES
        if recipe.name != "single.py"
    ]


def statements(text):
    """(first line, last line) of what a comment can stand for.

    That is a simple statement, or a header with the block below it; of a function only the header.
    """
    spans = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in SECTIONS:
            spans.append((node.lineno, node.body[0].lineno - 1))
        elif isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            spans.append((first, node.end_lineno))
        elif isinstance(node, ast.For | ast.While) and node.end_lineno - node.lineno > 5:
            spans.append((node.lineno, node.lineno))
        elif isinstance(node, ast.stmt):
            spans.append((node.lineno, node.end_lineno))
    return spans


def test_the_pairs_are_found():
    names = {recipe.name for recipe in RECIPES}
    assert names == {*PAIRS, "single.py"}
    assert len(pairs()) == len(PAIRS) * len(DATASETS) >= 18


@pytest.mark.parametrize(("recipe", "other"), pairs())
def test_diff_budget(recipe, other):
    # ImageNet's recipes also have --sync-bn, --accumulate and --sharded-checkpoint.
    more = 10 if recipe.parent.name == "imagenet" else 0
    assert 0 < changed_lines(changes(recipe, other)) <= BUDGETS[recipe.name] + more


@pytest.mark.parametrize(("recipe", "other"), pairs())
def test_added_statements_give_their_reason(recipe, other):
    """Above the statement, above one that it is in, or within it."""
    text = recipe.read_text()
    lines = text.splitlines()
    spans = statements(text)
    for _, new in changes(recipe, other):
        reason_given = False
        for number, line in new:
            if is_comment(line):
                reason_given = reason_given or MARK.search(line)
                continue
            around = [span for span in spans if span[0] <= number <= span[1]]
            reasons = [comment_above(lines, first) for first, _ in around]
            within = [lines[n - 1] for first, last in around for n in range(first, last + 1)]
            given = reason_given or MARK.search(" ".join([*reasons, *within]))
            assert given or re.search(NEEDS_NO_REASON, line.strip()), (
                f"{name_of(recipe)}:{number} gives no reason: {line}"
            )


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_anatomy(recipe):
    text = recipe.read_text()
    tree = ast.parse(text)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name not in MORE_SECTIONS] == SECTIONS
    assert isinstance(tree.body[-1], ast.If), "the launch line comes last"
    if recipe.name == "single.py":
        assert "dist:" not in text


def changed_in(folder, name):
    """The changed lines of code in a recipe of `folder`, without indentation: a set."""
    different = changes(folder / name, folder / PAIRS[name])
    old = [line for lines, _ in different for line in lines]
    new = [line for _, lines in different for _, line in lines]
    marked = [("-", line) for line in old] + [("+", line) for line in new]
    return {f"{mark}{line.strip()}" for mark, line in marked if not is_comment(line)}


def neutral(line):
    """Without the name of the data set's module."""
    return re.sub(r"digits|cifar|jpegs", "MODULE", line)


# How many changed lines ImageNet's recipe words otherwise, and how many it has alone: for
# --sync-bn, --accumulate, --evaluate, --sharded-checkpoint and its groups of weights.
IN_IMAGENET = {
    "apex_amp.py": (1, 9),
    "ddp_amp.py": (1, 6),
    "ddp_launch.py": (4, 17),
    "ddp_spawn.py": (4, 18),
    "dp.py": (2, 4),
    "fsdp.py": (3, 13),
    "hvd.py": (5, 20),
}


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_the_diff_is_the_same_for_all_datasets(name):
    cifar, imagenet, mnist = (set(map(neutral, changed_in(folder, name))) for folder in DATASETS)
    assert cifar == mnist
    there = {neutral(line.strip()) for _, line in body(ROOT / "imagenet" / name)}
    lacking = {line for line in mnist - imagenet if line[0] == "+" and line[1:] not in there}
    assert (len(lacking), len(imagenet - mnist)) == IN_IMAGENET[name], lacking


def test_dependencies_point_one_way():
    """recipe -> its folder's modules -> images -> common -> torch."""
    recipes = {path.stem for path in RECIPES}
    modules = {path.stem for recipe in RECIPES for path in beside(recipe)}
    shared = [*(ROOT / "common").rglob("*.py"), *(ROOT / "images").glob("*.py")]
    # The second one reads what a rank has communicated.
    may_communicate = {"fsdp.py", "watchdog.py"}
    for path in {*RECIPES, *shared, *(path for recipe in RECIPES for path in beside(recipe))}:
        names = imports(path)
        own = {part for name in names if not name.startswith("torch.") for part in name.split(".")}
        first = {name.split(".")[0] for name in names}
        assert not first & recipes, f"{path} imports a recipe"
        if path in shared:
            assert not own & modules, f"{path} imports what only one data set has"
        if "common" in path.parts[-3:-1]:
            assert "images" not in own, f"{path} knows images"
            parts = {part for name in names for part in name.split(".")}
            if path.name not in may_communicate:
                assert not parts & {"distributed", "horovod", "apex"}, path


def test_common_knows_no_flags_and_ends_no_process():
    """Its files take values and raise; only what is about the life of a process ends one."""
    for path in (ROOT / "common").rglob("*.py"):
        text = path.read_text()
        # These two read the flags of flags.py.
        if path.stem not in ("run", "weights"):
            assert not re.search(r"\bargs\.|getattr\(args", text), path
        if path.parent.name != "process" and path.stem != "lease":
            assert not re.search(r"\bsys\.exit|os\._exit|SystemExit", text), path


def test_no_file_shadows_a_package():
    for path in RECIPES:
        taken = {"torch", "torchvision", "horovod", "apex", "tensorboard", "common", "images"}
        assert path.stem not in taken


def test_a_recipe_carries_only_what_it_needs():
    for recipe in RECIPES:
        paths = take.needed(recipe)
        assert (ROOT / "common" / "fsdp.py" in paths) == (recipe.name == "fsdp.py")
        assert (ROOT / "common/process/spawn.py" in paths) == (recipe.name == "ddp_spawn.py")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_commands_are_the_same_for_all_datasets(name):
    """test_launch.py runs those of mnist/."""
    first, *others = (
        [line.replace(folder.name, "DATASET") for line in commands(folder / name)]
        for folder in DATASETS
    )
    assert first
    assert others == [first, first]


def test_no_word_of_another_dataset():
    """A recipe that was copied from another data set's and not finished."""
    for recipe in RECIPES:
        for other in DATASETS:
            if other != recipe.parent:
                word = rf"\b{other.name}\b"
                assert not re.search(word, recipe.read_text(), re.IGNORECASE), name_of(recipe)
