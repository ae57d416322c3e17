"""Copy a recipe or an example into a project, with the modules of this repository that it imports.

    python scripts/take.py cifar10/ddp_launch.py ../my_project
    python scripts/take.py examples/segmentation.py ../my_project --name train.py

common/, images/ and the modules beside the script go beside the copy. A file that is there and
differs stays as it is, and nothing is copied, unless --overwrite is given.
"""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from common.errors import InputError
from common.flags import Parser

# Folders that keep their place beside the script; the other modules go beside it.
PACKAGES = ("common", "images")
RECIPES = sorted(
    path
    for folder in ("mnist", "cifar10", "imagenet", "examples")
    for path in (ROOT / folder).glob("*.py")
    if "def main()" in path.read_text()
)


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports at its top."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_of(name: str, recipe: Path) -> list[Path]:
    """The files of a dotted name that `recipe`, or what it needs, imports; also __init__.py."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        paths = [recipe.parent / f"{parts[0]}.py"]
    else:
        paths = []
        for length in range(1, len(parts) + 1):
            path = ROOT.joinpath(*parts[:length])
            paths += [path / "__init__.py", path.with_suffix(".py")]
    return [path for path in paths if path.exists()]


def needed(recipe: Path) -> set[Path]:
    """`recipe` and the files of this repository that it imports, directly or not."""
    found = set()
    new = {recipe}
    while new:
        found |= new
        names = {name for path in new for name in imports(path)}
        new = {path for name in names for path in files_of(name, recipe)} - found
    return found


def copies(recipe: Path, project: Path, name: str) -> dict[Path, Path]:
    """From which file to which, for all that `recipe` needs in the folder `project`."""
    targets = {ROOT / "LICENSE": project / "common" / "LICENSE"}
    for path in needed(recipe):
        inside = path.relative_to(ROOT)
        targets[path] = project / (inside if inside.parts[0] in PACKAGES else inside.name)
    targets[recipe] = project / name
    return targets


def take(recipe: Path, project: Path, name: str, overwrite: bool = False) -> None:
    """Copy them; raises InputError if one is there that differs."""
    targets = copies(recipe, project, name)
    differing = [
        str(to)
        for path, to in targets.items()
        if to.exists() and to.read_bytes() != path.read_bytes()
    ]
    if differing and not overwrite:
        raise InputError(
            f"these files are there and differ: {', '.join(sorted(differing))}. "
            "Nothing was copied; --overwrite replaces them"
        )
    for path, to in targets.items():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)


def commit() -> str:
    """The commit of this repository, for the next time somebody compares."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def say(recipe: Path, copy: Path) -> None:
    """Print what was copied, what to install, and what to type."""
    parts = {path.relative_to(ROOT).parts for path in needed(recipe) - {recipe}}
    # A folder of modules, or a module beside the recipe.
    beside = sorted({part[0] + "/" if part[0] in PACKAGES else part[-1] for part in parts})
    print(f"copied {copy}, {', '.join(beside)} (of commit {commit()})")
    packages = ["pip install -r " + shlex.quote(os.path.relpath(ROOT / "requirements.txt"))]
    if recipe.name == "hvd.py":
        packages.append("Horovod: scripts/install_horovod.sh")
    if recipe.name == "apex_amp.py":
        packages.append("NVIDIA Apex: docs/install.md")
    print(f"install: {', '.join(packages)}")
    docstring = ast.get_docstring(ast.parse(recipe.read_text()), clean=False)
    command = next(line for line in docstring.splitlines() if line.startswith("    ")).strip()
    of_recipe = f"{recipe.parent.name}/{recipe.name}"
    command = command.replace(of_recipe, shlex.quote(str(copy)))
    print(f"run:     {command}")
    print(f"change:  {os.path.relpath(ROOT / 'docs' / 'your-own.md')} goes through the script")
    prove = shlex.quote(os.path.relpath(ROOT / "scripts" / "prove.py"))
    print(f"prove:   python {prove} {command}")


def main():
    parser = Parser(__doc__)
    parser.add_argument("recipe", type=Path, help="such as mnist/single.py")
    parser.add_argument("project", type=Path, help="a folder, which is made if it is not there")
    parser.add_argument("--name", help="of the copied script; default: the recipe's own")
    parser.add_argument("--overwrite", action="store_true", help="replace files that differ")
    args = parser.parse_args()
    recipe = args.recipe.resolve()
    if recipe not in RECIPES:
        raise InputError(f"{args.recipe} is no recipe: give one such as mnist/single.py")
    copy = args.project / (args.name or recipe.name)
    try:
        take(recipe, args.project, copy.name, args.overwrite)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error
    say(recipe, copy)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"take.py: {error}", file=sys.stderr)
        sys.exit(error.status)
