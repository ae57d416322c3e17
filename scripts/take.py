"""Copy a recipe or an example into a project, with the modules of this repository that it imports.

    python scripts/take.py cifar10/ddp_launch.py ../my_project
    python scripts/take.py examples/segmentation.py ../my_project --name train.py

common/, images/ and the modules beside the script go beside the copy. Run the same command later to
update the project: it keeps and lists the files that you have changed, unless you give --overwrite.
common/taken.json records which files were copied, and from which commit.
"""

import ast
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))
from common.errors import InputError
from common.flags import Parser

# Modules for docs/your-own.md, which not every recipe imports.
FOR_ANY_TASK = {ROOT / "common" / "process" / "workers.py"}
# Folders that keep their place beside the script; the other modules go beside it.
PACKAGES = ("common", "images")
# The record of what was copied, in the project.
TAKEN = Path("common", "taken.json")
RECIPES = sorted(
    path
    for folder in ("mnist", "cifar10", "imagenet", "examples")
    for path in (ROOT / folder).glob("*.py")
    if "def main()" in path.read_text()
)


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports at the top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_of(name: str, recipe: Path) -> list[Path]:
    """The files that importing a dotted name loads, for `recipe`, including __init__.py."""
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
    new = {recipe, *FOR_ANY_TASK}
    while new:
        found |= new
        names = {name for path in new for name in imports(path)}
        new = {path for name in names for path in files_of(name, recipe)} - found
    return found


def copies(recipe: Path, project: Path, name: str) -> dict[Path, Path]:
    """{source: target} of all files that `recipe` needs in the folder `project`."""
    targets = {ROOT / "LICENSE": project / "common" / "LICENSE"}
    for path in needed(recipe):
        inside = path.relative_to(ROOT)
        targets[path] = project / (inside if inside.parts[0] in PACKAGES else inside.name)
    targets[recipe] = project / name
    return targets


def read_taken(project: Path) -> dict:
    """What an earlier call copied into `project`: {"commit": ..., "files": {path: checksum}}."""
    try:
        return json.loads((project / TAKEN).read_text())
    except (OSError, ValueError):
        return {"commit": None, "files": {}}


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def take(recipe: Path, project: Path, name: str, overwrite: bool = False) -> list[str]:
    """Copy what `recipe` needs; keep files that the user has changed, and return their names.

    Raises InputError if a different file is there that was not copied from here.
    """
    targets = copies(recipe, project, name)
    for package in PACKAGES:
        module = project / f"{package}.py"
        if module.exists() and project / package / "__init__.py" in targets.values():
            raise InputError(
                f"{module} is there, and {package}/ beside it would hide it: "
                "rename it, or choose another folder"
            )
    taken = read_taken(project)
    changed = []
    strange = []
    for path, to in targets.items():
        inside = to.relative_to(project).as_posix()
        if not to.exists() or overwrite or checksum(to) == checksum(path):
            continue
        if inside not in taken["files"]:
            strange.append(inside)
        elif checksum(to) != taken["files"][inside]:
            changed.append(inside)
    if strange:
        raise InputError(
            f"these files already exist and differ: {', '.join(sorted(strange))}. "
            "Nothing was copied; --overwrite replaces them"
        )
    for path, to in targets.items():
        inside = to.relative_to(project).as_posix()
        if inside not in changed:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
            taken["files"][inside] = checksum(to)
    taken["commit"] = commit()
    (project / TAKEN).write_text(json.dumps(taken, indent=1))
    return sorted(changed)


@functools.cache
def commit() -> str:
    """The commit of this repository, to tell later what has changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def say(recipe: Path, copy: Path, changed: list[str]) -> None:
    """Print what was copied, what to install, and what to run."""
    parts = {path.relative_to(ROOT).parts for path in needed(recipe) - {recipe}}
    # The names of folders, and of modules beside the recipe.
    beside = sorted({part[0] + "/" if part[0] in PACKAGES else part[-1] for part in parts})
    copied = beside if copy.name in changed else [str(copy), *beside]
    print(f"copied {', '.join(copied)} (of commit {commit()})")
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
    parser.add_argument("project", type=Path, help="a folder, created if missing")
    parser.add_argument("--name", help="name of the copied script (default: the recipe's)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that differ")
    args = parser.parse_args()
    recipe = args.recipe.resolve()
    if not recipe.exists():
        # A path relative to this repository, given in another folder.
        recipe = ROOT / args.recipe
    if recipe not in RECIPES:
        raise InputError(f"{args.recipe} is not a recipe: give one such as mnist/single.py")
    copy = args.project / (args.name or recipe.name)
    before = read_taken(args.project)["commit"]
    try:
        changed = take(recipe, args.project, copy.name, args.overwrite)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error
    say(recipe, copy, changed)
    if before and before != commit():
        print(f"update:  from commit {before} to {commit()}")
    if changed:
        print(f"yours:   not replaced, because you have changed them: {', '.join(changed)}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"take.py: {error}", file=sys.stderr)
        sys.exit(error.status)
