"""What people have reported of other programs, tried on these: each test names the report."""

import json
import os

import pytest
import torch
from launch import checkpoint, need, refused_here, run
from recipes import ROOT

from common.errors import InputError
from imagenet import jpegs

SINGLE = f"python {ROOT}/mnist/single.py --synthetic 640 --epochs 1 --model lenet --device cpu"


def test_a_home_that_the_shell_does_not_expand(tmp_path):
    """tensorflow 44264: --log-dir=~/log makes no folder of the name ~."""
    run(f"{SINGLE} --log-dir='~/log'", tmp_path, HOME=str(tmp_path / "home"))
    assert (tmp_path / "home" / "log" / "last.pt").exists()
    assert not (tmp_path / "~").exists()


def test_results_survive_a_full_disk_at_a_resume(tmp_path):
    """tensorflow 8745: lines are not lost when they cannot be written again."""
    run(f"{SINGLE} --log-dir log --checkpoint-dir saved", tmp_path)
    path = tmp_path / "log" / "results.jsonl"
    line = json.dumps({"step": 1, "event": "step", "note": "x" * 90}) + "\n"
    path.write_text(path.read_text() + 9000 * line)
    before = path.read_bytes()
    again = SINGLE.replace("--epochs 1", "--epochs 2")
    # 600 KB at most, in place of a quota.
    command = f"ulimit -f 600; {again} --log-dir log --checkpoint-dir saved --resume auto"
    said = run(command, tmp_path, status=2)
    assert said.endswith("cannot write to log (File too large): choose another --log-dir\n")
    assert path.read_bytes() == before


def test_a_checkpoint_that_may_not_be_read(tmp_path):
    """TencentDB-Agent-Memory 772: it may be good, and is not set aside."""
    need(os.geteuid() == 0, "root, to become another user")
    run(f"{SINGLE} --log-dir log", tmp_path)
    path = tmp_path / "log" / "last.pt"
    path.chmod(0)
    # Root of a namespace of its own, to which the file is another's.
    again = f"{SINGLE} --log-dir log --resume auto"
    namespace = "unshare --user --map-user=12345 --map-group=12345"
    said = run(f"{namespace} {again}", tmp_path, status=2)
    assert "last.pt: Permission denied" in said
    assert path.exists()


@pytest.mark.parametrize("content", [[1], torch.ones(2), None, {1: torch.ones(2)}])
def test_a_file_that_is_no_state_dict(content, tmp_path):
    torch.save(content, tmp_path / "weights.pt")
    line = refused_here("mnist/single.py --synthetic 64 --init-from weights.pt", tmp_path)
    assert "it is not a state_dict, a dict of tensors" in line


def test_weights_of_a_compiled_model(tmp_path):
    """pytorch 101107, nanoGPT 325."""
    run(f"{SINGLE} --log-dir log", tmp_path)
    weights = checkpoint(tmp_path / "log")["model"]
    renamed = {f"module._orig_mod.{name}": value for name, value in weights.items()}
    torch.save(renamed, tmp_path / "weights.pt")
    said = run(f"{SINGLE} --init-from weights.pt --log-dir tuned", tmp_path)
    assert f"weights from weights.pt: {len(weights)} of {len(weights)} loaded" in said


def test_a_link_that_leads_back(tmp_path):
    """timm 334, fastai 2270: the images of a class would count forty times."""
    for split in ("train", "val"):
        folder = tmp_path / "tree" / split / "cat"
        folder.mkdir(parents=True)
        (folder / "1.png").touch()
    (tmp_path / "tree" / "train" / "cat" / "again").symlink_to(".")
    with pytest.raises(InputError, match="train/cat/again: Too many levels of symbolic links"):
        jpegs.image_tree(tmp_path / "tree")
