"""A wrong input: one line that says what is wrong and what to do, status 2, and nothing written or lost."""

import gzip
import http.server
import os
import pickle
import shutil
import threading

import pytest
import torch
from launch import ROOT, Job, checkpoint, commands, need_horovod, run

from common import data, flags

SINGLE = f"python {ROOT}/mnist/single.py"
SPAWN = f"python {ROOT}/mnist/ddp_spawn.py"


def refused(command, cwd, **environment):
    """The one line that a command prints before it ends with status 2."""
    before = sorted(cwd.rglob("*"))
    lines = run(command, cwd, status=2, **environment).splitlines()
    assert len(lines) == 1, lines
    assert sorted(cwd.rglob("*")) == before, "a refused run leaves nothing behind"
    return lines[0]


def test_no_data_and_no_network(tmp_path):
    line = refused(f"{SINGLE} --data-dir {tmp_path}/nonexistent", tmp_path)
    for part in ("nonexistent/MNIST/raw/train-images-idx3-ubyte", "download failed", "bring the files", "--synthetic"):
        assert part in line


@pytest.mark.parametrize(("command", "says"), [
    (f"{SINGLE} --batch-size 0", "-b/--batch-size: 0 is not at least 1"),
    (f"{SINGLE} --epochs -1", "--epochs: -1 is not at least 1"),
    (f"{SINGLE} --lr nan", "--lr: nan is not above 0"),
    (f"{SINGLE} --lr 0", "--lr: 0 is not above 0"),
    (f"{SINGLE} --epoch 3", "unrecognized arguments: --epoch 3"),
    (f"{SINGLE} --workers two", "invalid whole number value: 'two'"),
    (f"{SINGLE} --model resnet5", "choose from"),
    (f"{SINGLE} --batch-size 10000", "do not fill one batch of 10000"),
    (f"{SINGLE} --resume nowhere.pt", "--resume nowhere.pt: No such file"),
    (f"{SINGLE} --log-dir /dev/null/log", "cannot write to /dev/null/log"),
    (f"{SINGLE} --checkpoint-dir /proc/here", "cannot write to /proc/here"),
    (f"{SPAWN} -g {4 * os.cpu_count() + 1}", "processes"),
    (f"{SINGLE} --seed 20000000000000", "is more than 4294967295"),
    (f"{SPAWN} -n 2 -nr 2", "numbered from 0 to 1"),
    (f"{SPAWN} -n 2 -nr 1", "MASTER_ADDR"),
    (f"{SPAWN} -g 2 --resume nowhere.pt", "No such file"),
], ids=lambda value: value.partition(".py ")[2] or None)
def test_wrong_flag(command, says, tmp_path):
    assert says in refused(f"{command} --synthetic 320", tmp_path)


def test_no_gpu(tmp_path):
    assert "--device cpu" in refused(f"{SINGLE} --synthetic 320 --device cuda", tmp_path, CUDA_VISIBLE_DEVICES="")


def test_without_a_launcher(tmp_path):
    line = refused(f"python {ROOT}/mnist/ddp_launch.py --synthetic 320", tmp_path)
    assert "torchrun --nproc-per-node=2" in line


def test_apex_of_another_kind(tmp_path):
    """PyPI's apex is another package: it can be imported, but has no amp."""
    (tmp_path / "site" / "apex").mkdir(parents=True)
    (tmp_path / "site" / "apex" / "__init__.py").touch()
    line = refused(f"python {ROOT}/mnist/apex_amp.py", tmp_path, PYTHONPATH=str(tmp_path / "site"),
                   PYTHONDONTWRITEBYTECODE="1")
    for part in ("25.05", "pip install", "PyPI's apex", "ddp_amp.py"):
        assert part in line


def test_without_horovod(tmp_path):
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("raise ImportError('not here')")
    line = refused(f"python {ROOT}/mnist/hvd.py", tmp_path, PYTHONPATH=str(tmp_path / "site"),
                   PYTHONDONTWRITEBYTECODE="1")
    assert "scripts/install_horovod.sh" in line


def test_horovod_without_its_torch_extension(tmp_path):
    """Such a Horovod can be imported all the same."""
    (tmp_path / "site" / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").touch()
    (tmp_path / "site" / "horovod" / "torch" / "__init__.py").write_text("print('Extension has not been built')")
    line = refused(f"python {ROOT}/mnist/hvd.py", tmp_path, PYTHONPATH=str(tmp_path / "site"),
                   PYTHONDONTWRITEBYTECODE="1")
    assert "scripts/install_horovod.sh" in line


def test_wrong_checkpoint(tmp_path):
    run(f"{SINGLE} --synthetic 320 --epochs 1 --log-dir log", cwd=tmp_path)
    other = refused(f"python {ROOT}/cifar10/single.py --synthetic 320 --model convnet --resume log/last.pt", tmp_path)
    assert "dataset mnist" in other
    assert "world size 1" in refused(f"{SPAWN} -g 2 --synthetic 320 --resume log/last.pt", tmp_path)
    assert "batch size 64" in refused(f"{SINGLE} --synthetic 320 -b 32 --resume log/last.pt", tmp_path)
    assert "model convnet" in refused(f"{SINGLE} --synthetic 320 --model lenet --resume log/last.pt", tmp_path)
    (tmp_path / "text.pt").write_text("This is not a checkpoint.")
    assert "not a checkpoint" in refused(f"{SINGLE} --synthetic 320 --resume text.pt", tmp_path)
    (tmp_path / "torn.pt").write_bytes((tmp_path / "log" / "last.pt").read_bytes()[:10_000])
    assert "broken" in refused(f"{SINGLE} --synthetic 320 --resume torn.pt", tmp_path)
    torch.save({"format": 1, "arguments": {}}, tmp_path / "empty.pt")
    assert "not a checkpoint" in refused(f"{SINGLE} --synthetic 320 --resume empty.pt", tmp_path)
    whole = checkpoint(tmp_path / "log")
    torch.save({**whole, "model": None}, tmp_path / "none.pt")
    assert "its model does not fit" in refused(f"{SINGLE} --synthetic 320 --resume none.pt", tmp_path)
    assert "another run" in refused(f"{SINGLE} --synthetic 320 --log-dir log", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.json").write_text("not by a recipe")
    assert "another run" in refused(f"{SINGLE} --synthetic 320 --log-dir mine", tmp_path)
    run(f"{SINGLE} --synthetic 320 --epochs 1 --log-dir other", cwd=tmp_path)
    assert "other/results.json is of another run" in refused(
        f"{SINGLE} --synthetic 320 --epochs 2 --log-dir other --checkpoint-dir log --resume log/last.pt", tmp_path)


def test_adasum_on_gloo(tmp_path):
    need_horovod("gloo")
    job = Job(f"horovodrun --gloo -np 2 python {ROOT}/mnist/hvd.py --synthetic 320 --use-adasum", cwd=tmp_path)
    assert job.finish() != 0
    assert job.output().count("--use-adasum needs MPI") == 1


def test_one_line_from_several_processes(tmp_path):
    """Under a launcher that adds lines of its own, the recipe still says it once."""
    job = Job(f"torchrun --standalone --nproc-per-node=2 {ROOT}/mnist/ddp_launch.py -b 0", cwd=tmp_path)
    assert job.finish() != 0
    assert job.output().count("-b/--batch-size: 0 is not at least 1") == 1


def test_truncated_mnist(real_data, tmp_path):
    shutil.copytree(real_data("mnist") / "MNIST", tmp_path / "MNIST")
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1_000_000])
    for command in (SINGLE, f"{SPAWN} -g 2"):
        line = refused(f"{command} --data-dir {tmp_path}", tmp_path)
        assert f"{images} is broken" in line


def test_a_batch_of_another_kind(tmp_path):
    for name in data.CIFAR10_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(pickle.dumps({"images": []}))
    assert "is broken (KeyError" in refused(f"python {ROOT}/cifar10/single.py --data-dir {tmp_path}", tmp_path)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    canary = tmp_path / "canary"
    batch = b"cos\nsystem\n(S'touch %s'\ntR." % str(canary).encode()
    for name in data.CIFAR10_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(batch)
    assert "os.system" in refused(f"python {ROOT}/cifar10/single.py --data-dir {tmp_path}", tmp_path)
    assert not canary.exists()


class Server:
    """Serves a folder on a free port of this machine while a `with` block runs."""

    def __init__(self, folder):
        def handler(*args):
            return Quiet(*args, directory=folder)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever).start()
        return f"http://127.0.0.1:{self.server.server_port}/"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_download(real_data, tmp_path, monkeypatch, capsys):
    """From a server on this machine: whole files appear, wrong bytes do not."""
    from torchvision.datasets import MNIST
    from torchvision.datasets.utils import calculate_md5

    raw, served = real_data("mnist") / "MNIST" / "raw", tmp_path / "served"
    served.mkdir()
    for path in raw.iterdir():
        (served / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), compresslevel=1))
    args = flags.parser("", "mnist", ("convnet",), 1, 1, 1, 0).parse_args(["--data-dir", str(tmp_path / "data")])
    with Server(served) as url:
        monkeypatch.setattr(MNIST, "mirrors", [url])
        monkeypatch.setattr(MNIST, "resources",
                            [(path.name, calculate_md5(path)) for path in sorted(served.iterdir())])
        images = served / "t10k-images-idx3-ubyte.gz"
        good = images.read_bytes()
        images.write_bytes(good[:-1] + b"?")
        with pytest.raises(SystemExit, match="2"):
            data.download(args)
        assert "bring the files" in capsys.readouterr().err
        assert not (tmp_path / "data").exists(), "a download that failed leaves nothing"
        images.write_bytes(good)
        data.download(args)
    for path in raw.iterdir():
        assert (tmp_path / "data" / "MNIST" / "raw" / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["MNIST"], "no temporary folder is left"


def test_help_shows_commands_groups_and_defaults(tmp_path):
    shown = run(f"{SINGLE} --help", cwd=tmp_path)
    for part in (*commands(ROOT / "mnist" / "single.py"), "data:", "training:", "device:", "output:", "(default: 64)"):
        assert part in shown
    assert "default: None" not in shown
