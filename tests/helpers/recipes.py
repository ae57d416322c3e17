"""The recipes as files: which there are, what each imports, and copies with a line changed."""

import ast
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A file per strategy, for MNIST, that imports nothing of ours.
MINIMAL = ROOT / "minimal"
DATASETS = sorted({path.parent for path in ROOT.glob("*/single.py")} - {MINIMAL})
# A recipe has its name in every folder; the other modules of a folder are what its recipes import.
NAMES = set.intersection(*({path.name for path in folder.glob("*.py")} for folder in DATASETS))
RECIPES = sorted(folder / name for folder in DATASETS for name in NAMES)
# Real data sets, where CI has them.
SHARED_DATA = ROOT.parent / "shared" / "data"
# The line of a step in each recipe. What a test puts behind it is indented by 12 spaces, and finds
# `run`, whose position is still where the step began, `world`, `sums` and the batch there.
STEP = "            step(images, labels)\n"


def small(dataset):
    """The flags for small images, if their size is a flag of this data set's recipes."""
    return "--image-size 32" if dataset == "imagenet" else ""


def name_of(path):
    return f"{path.parent.name}/{path.name}"


def commands(recipe):
    """The commands in the docstring of a recipe, each an indented line of its own."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text()), clean=False)
    return re.findall(r"^    (\S.*)$", docstring, flags=re.MULTILINE)


def imports(path):
    """The dotted names that a file imports, also within its functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    } | {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def beside(recipe):
    """The modules of a recipe's folder that its recipes import."""
    return [path for path in recipe.parent.glob("*.py") if path not in RECIPES]


def changed_copy(to, recipe, line, replacement):
    """Copy a data set's recipes and common/ to the folder `to`; replace one line of `recipe`."""
    dataset, name = recipe.split("/")
    for folder in ("common", "images", dataset):
        shutil.copytree(ROOT / folder, to / folder)
    path = to / dataset / name
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, replacement))
    return to / dataset


def waiting_copy(to, recipe, steps):
    """Copy as changed_copy does, and let the ranks wait after `steps` steps.

    Each prints "waits". They go on when one is told to stop.
    """
    lines = (
        f"            if run.position.steps == {steps}:\n"
        "                import os, time\n"
        "                os.write(1, b'waits\\n')\n"
        "                while not run.stop.requested and not os.path.exists('told'):\n"
        "                    time.sleep(0.01)\n"
        "                open('told', 'w').close()\n"
    )
    return changed_copy(to, recipe, STEP, STEP + lines)


def in_float64(to, dataset, recipe=None, line=None, replacement=None):
    """Copy the recipes of a data set, in float64, and common/ to the folder `to`.

    `recipe` with a line replaced.
    """
    for folder in ("common", "images", dataset):
        shutil.copytree(ROOT / folder, to / folder)
    for path in (to / dataset).glob("*.py"):
        text = path.read_text()
        if path.name == recipe:
            assert text.count(line) == 1
            text = text.replace(line, replacement)
        first = "\nimport torch\n"
        path.write_text(text.replace(first, f"{first}torch.set_default_dtype(torch.float64)\n", 1))
    return to / dataset


def keep_checkpoints(script):
    """Let a copied script keep its checkpoints: 6.pt for the first one after step 6.

    (previous.pt is from right before the last evaluation: from there no step is left.)
    """
    keep = (
        "    save = run.save\n"
        "    def save_and_keep(*args, **options):\n"
        "        save(*args, **options)\n"
        "        kept = run.folder / f'{run.position.steps}.pt'\n"
        "        if run.writes and not kept.exists():\n"
        "            kept.hardlink_to(run.folder / 'last.pt')\n"
        "    run.save = save_and_keep\n"
    )
    loop = "    while not run.over:\n"
    text = script.read_text()
    assert text.count(loop) == 1
    script.write_text(text.replace(loop, keep + loop))
