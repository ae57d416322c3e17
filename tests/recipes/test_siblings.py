"""The recipes are read in pairs: two of them differ in what distribution adds, and nothing else.

That is why most tests run one recipe of a kind, and not those of all data sets.
"""

import ast
import re
from collections import Counter

import pytest
from diffs import MARK, PAIRS, body, changes, comment_above, is_comment
from recipes import DATASETS, NAMES, RECIPES, ROOT, beside, commands, imports, name_of

from scripts import take

pytestmark = pytest.mark.check

# Calls of the libraries of the strategies.
OF_A_STRATEGY = re.compile(
    r"\b((dist|hvd|amp|mp)\.\w+|GradScaler|DataParallel|DistributedDataParallel|fully_shard)\("
)


def changed_lines(folder, name):
    """The changed lines of code in a recipe, without indentation and the data set's module."""
    different = changes(folder / name, folder / PAIRS[name])
    marked = [("-", line) for old, _ in different for line in old]
    marked += [("+", line) for _, new in different for _, line in new]
    return {neutral(f"{mark}{line.strip()}") for mark, line in marked if not is_comment(line)}


def neutral(line):
    return re.sub(r"digits|cifar|jpegs", "MODULE", line)


def words(lines):
    """How often each name is used."""
    return Counter(re.findall(r"\w+", " ".join(lines)))


@pytest.mark.parametrize("name", sorted(NAMES - {"single.py"}))
def test_the_diff_is_the_same_for_all_datasets(name):
    """ImageNet's recipes may word a line otherwise, for their own flags, but use what it uses."""
    cifar, imagenet, mnist = (changed_lines(folder, name) for folder in DATASETS)
    assert cifar == mnist != set()
    there = {f"+{neutral(line.strip())}" for _, line in body(ROOT / "imagenet" / name)}
    removed = {line for line in mnist if line.startswith("-")}
    lacking = mnist - removed - there
    assert words(lacking) - words(removed) <= words(imagenet - mnist)


def functions(recipe):
    tree = ast.parse(recipe.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_anatomy(recipe):
    """The functions of MNIST's single.py, in its order."""
    expected = functions(ROOT / "mnist" / "single.py")
    assert [name for name in functions(recipe) if name in expected] == expected


@pytest.mark.parametrize("name", sorted(NAMES - {"single.py"}))
def test_what_a_strategy_adds_has_its_reason(name):
    recipe = ROOT / "mnist" / name
    lines = recipe.read_text().splitlines()
    for _, new in changes(recipe, recipe.parent / PAIRS[name]):
        text = "\n".join(line for _, line in new)
        if OF_A_STRATEGY.search(text):
            # That of a statement of which only a part has changed stands above it.
            reasons = text + comment_above(lines, new[0][0])
            assert MARK.search(reasons), f"{name}:{new[0][0]} gives no reason:\n{text}"


def test_dependencies_point_one_way():
    """recipe -> its folder's modules -> images -> common -> torch."""
    recipes = {path.stem for path in RECIPES}
    of_one_dataset = {path for recipe in RECIPES for path in beside(recipe)}
    modules = {path.stem for path in of_one_dataset}
    common = {*(ROOT / "common").rglob("*.py")}
    images = {*(ROOT / "images").glob("*.py")}
    for path in {*RECIPES, *of_one_dataset, *images, *common}:
        names = {name.split(".")[0] for name in imports(path)}
        assert not names & recipes, f"{path} imports a recipe"
        if path in images | common:
            assert not names & modules, f"{path} imports what only one data set has"
        if path in common:
            assert "images" not in names, f"{path} knows images"


def test_common_knows_no_strategy_and_few_flags():
    """Its files take values and raise; only what is about the life of a process ends one."""
    for path in (ROOT / "common").rglob("*.py"):
        text = path.read_text()
        parts = {part for name in imports(path) for part in name.split(".")}
        # The second one reads what a rank has communicated.
        if path.stem not in ("fsdp", "watchdog"):
            assert not parts & {"distributed", "horovod", "apex"}, path
        # These read the flags of flags.py.
        if path.stem not in ("run", "weights", "devices", "schedule", "graph"):
            assert not re.search(r"\bargs\.", text), path
        if path.parent.name != "process" and path.stem != "lease":
            assert not re.search(r"\bsys\.exit|os\._exit|SystemExit", text), path


def test_a_recipe_carries_only_what_it_needs():
    for name in NAMES:
        recipe = ROOT / "mnist" / name
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
