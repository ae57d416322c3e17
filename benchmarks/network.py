"""Check the cost model of model.py on slow links: the steps that it predicts, and those that the
recipes take.

    python benchmarks/network.py
    python benchmarks/network.py --links "1 ms" --processes 2 --out /tmp/network

Two network namespaces are two machines, so it needs root, and Debian's iproute2. This script
carries the packets from one to the other, late by a delay and at the rate of a link. (The kernel's
netem does the same, where it is built in: tc qdisc add dev eth0 root netem delay 1ms rate 1gbit.)
On each link allreduce.py measures alpha and beta. The predicted step is that of as many independent
processes, plus the model's all-reduces (see `communication`). The model hides nothing behind
backward, as all cores compute and an all-reduce needs them, too. Waiting for packets needs none, so
on a slow link the predicted step can be longer than the measured one. Generated images.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import queue
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import model
import runs
from tqdm import tqdm

from common.errors import InputError

# Seconds, bytes/s.
LINKS = {
    "as fast as it goes": (0, 0),
    "0.1 ms": (1e-4, 0),
    "1 ms": (1e-3, 0),
    "10 ms": (1e-2, 0),
    "10 Gbit/s": (0, 1.25e9),
    "1 Gbit/s": (0, 1.25e8),
}
WORK = {
    "mnist": {"model": "convnet", "batch": 64, "steps": 60, "epochs": 3},
    "cifar10": {"model": "resnet18", "batch": 32, "steps": 4, "epochs": 3},
}
MACHINES = "10.99.0.1", "10.99.0.2"  # their addresses, and the names of the namespaces
SETTINGS = {"GLOO_SOCKET_IFNAME": "wire", "CUDA_VISIBLE_DEVICES": ""}
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000  # of linux/if_tun.h
MTU = 65_535  # as large as the kernel's own segments, so that there are few packets to carry


@contextlib.contextmanager
def machines():
    """Make the namespaces.

    Yield a file descriptor for each, from which its packets are read, and to which written.
    """
    ends = []
    try:
        for number, address in enumerate(MACHINES):
            ends.append(os.open("/dev/net/tun", os.O_RDWR))
            name = f"carried{number}"
            fcntl.ioctl(
                ends[-1], TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI)
            )
            for line in (
                f"ip netns add {address}",
                f"ip link set {name} netns {address} name wire mtu {MTU}",
                f"ip -n {address} addr add {address}/24 dev wire",
                f"ip -n {address} link set wire up",
                f"ip -n {address} link set lo up",
            ):
                subprocess.run(line.split(), check=True)
            # Else each step begins with TCP's slow start, and measures that
            subprocess.run(
                [
                    "ip",
                    "netns",
                    "exec",
                    address,
                    "sysctl",
                    "-qw",
                    "net.ipv4.tcp_slow_start_after_idle=0",
                ],
                check=True,
            )
        yield ends
    finally:
        for end, address in zip(ends, MACHINES, strict=False):
            os.close(end)
            subprocess.run(["ip", "netns", "del", address], check=True)


def carry(source, target, delay, rate):
    """Carry packets from one machine to the other, `delay` seconds late, at `rate` bytes per second
    (0: any).
    """
    waiting, free = queue.SimpleQueue(), 0.0

    def deliver():
        while True:
            due, packet = waiting.get()
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    while True:
        packet = os.read(source, MTU)
        # When the link can take the next.
        free = max(free, time.perf_counter()) + (len(packet) / rate if rate else 0)
        waiting.put((free + delay, packet))


@contextlib.contextmanager
def link(ends, delay, rate):
    """Carry packets both ways, each in a process that goes before those that train, as a network
    card does.
    """

    def work(source, target):
        os.nice(-10)
        carry(source, target, delay, rate)

    fork = multiprocessing.get_context("fork")
    ways = [fork.Process(target=work, args=way, daemon=True) for way in (ends, ends[::-1])]
    for way in ways:
        way.start()
    try:
        yield
    finally:
        for way in ways:
            way.kill()
            way.join()


def launch(strategy, processes, script):
    """Run a script on `processes` processes, half of them on each machine, with DDP or with
    Horovod, both over Gloo.
    """
    with tempfile.TemporaryDirectory() as folder:
        if strategy == "ddp_launch":
            lines = [
                f"ip netns exec {address} torchrun --nnodes=2 --node-rank={rank} "
                f"--master-addr={MACHINES[0]} --master-port=29500 "
                f"--nproc-per-node={processes // 2} {script}"
                for rank, address in enumerate(MACHINES)
            ]
        else:
            ssh = Path(folder, "ssh")  # what horovodrun starts: ssh OPTIONS HOST OPTIONS COMMAND
            ssh.write_text(
                "#!/bin/bash\nwhile [[ $1 = -* ]]; do shift 2; done; name=$1; shift\n"
                "while [[ $1 = -* ]]; do shift 2; done\n"
                'exec ip netns exec $name unshare --uts sh -c "hostname $name; $*"\n'
            )
            ssh.chmod(0o755)
            hosts = ",".join(f"{address}:{processes // 2}" for address in MACHINES)
            lines = [
                f"ip netns exec {MACHINES[0]} env PATH={folder}:{runs.environment(1)['PATH']} "
                f"horovodrun --gloo -np {processes} -H {hosts} --network-interfaces wire "
                f"python {script}"
            ]
        started = [runs.start(line, threads=1) for line in lines]
        for process in started:
            runs.finish(process)


def all_reduce(strategy, processes, repeats):
    """(alpha, beta) of this link, from messages of up to 16 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        launch(
            strategy,
            processes,
            f"{runs.ROOT}/benchmarks/allreduce.py --max-bytes {2**24} "
            f"--repeats {repeats} --json {folder}/out.json",
        )
        return model.fit(json.loads(Path(folder, "out.json").read_text()))


def seconds_per_step(strategy, processes, dataset):
    """The median over all epochs but the first, which warms up."""
    work = WORK[dataset]
    recipe = runs.ROOT / dataset / f"{'ddp_launch' if strategy == 'ddp_launch' else 'hvd'}.py"
    flags = (
        f"--model {work['model']} -b {work['batch']} --synthetic "
        f"{work['batch'] * work['steps'] * processes} "
        f"--epochs {work['epochs']} --lr 0.001"
    )
    with tempfile.TemporaryDirectory() as folder:
        launch(strategy, processes, f"{recipe} {flags} --log-dir {folder}/log")
        epochs = runs.epochs_of(Path(folder, "log"))
    return (
        work["batch"]
        * processes
        / statistics.median(epoch["train"]["images_per_sec"] for epoch in epochs[1:])
    )


def alone(processes, dataset):
    """Seconds of a step of as many processes that do not communicate."""
    work = WORK[dataset]
    figures = runs.measure(
        work | {"dataset": dataset, "strategy": "independent", "processes": processes},
        1,
        "--device cpu",
    )
    return work["batch"] * processes / figures["images_per_sec"]


def communication(strategy, processes, dataset, alpha, beta):
    """Predicted seconds of a step's all-reduces: of DDP's buckets, or of one of Horovod's fusion
    buffers.

    Horovod negotiates in rounds which gradients are ready. A round is half of what allreduce.py
    measures for a few bytes; the sum itself is the other half. Gradients first wait for the end of
    a round: half a round on average.
    """
    size = model.gradient_bytes(dataset, WORK[dataset]["model"])
    if strategy == "ddp_launch":
        return sum(model.ring(processes, bucket, alpha, beta) for bucket in model.buckets(size))
    return model.ring(processes, size, alpha, beta) + model.ring(processes, 0, alpha, beta) / 4


def measure(arguments):
    """[{link, strategy, processes, dataset, alpha, beta, alone, predicted, measured}].

    Times are in seconds.
    """
    found = []
    cases = [
        (name, strategy, p)
        for name in arguments.links
        for strategy in ("ddp_launch", "hvd_gloo")
        for p in arguments.processes
    ]
    with machines() as ends:
        for name, strategy, p in tqdm(cases, unit="case", desc="network"):
            with link(ends, *LINKS[name]):
                alpha, beta = all_reduce(strategy, p, arguments.repeats)
                for dataset in WORK:
                    step = alone(p, dataset)
                    predicted = step + communication(strategy, p, dataset, alpha, beta)
                    found.append(
                        {
                            "link": name,
                            "strategy": strategy,
                            "processes": p,
                            "dataset": dataset,
                            "alpha": alpha,
                            "beta": beta,
                            "alone": step,
                            "predicted": predicted,
                            "measured": seconds_per_step(strategy, p, dataset),
                        }
                    )
    return found


def markdown(result):
    rows = [
        [
            run["link"],
            runs.TITLES[run["strategy"]],
            run["dataset"],
            run["processes"],
            f"{run['alpha'] * 1e6:,.0f}",
            f"{1e-9 / run['beta']:.2f}" if run["beta"] else "-",
            *(f"{run[name] * 1e3:,.1f}" for name in ("alone", "predicted", "measured")),
            f"{run['predicted'] / run['measured']:.2f}",
        ]
        for run in result["runs"]
    ]
    return "\n".join(
        [
            "# The cost model on slow links",
            "",
            runs.heading(result),
            "",
            runs.table(
                [
                    "link",
                    "strategy",
                    "data set",
                    "processes",
                    "alpha (us)",
                    "1/beta (GB/s)",
                    "alone (ms)",
                    "predicted (ms)",
                    "measured (ms)",
                    "predicted / measured",
                ],
                rows,
                left=3,
            ),
            "",
            "mnist: ConvNet, 64 images per process. cifar10: ResNet-18, 32. Two network namespaces "
            "are the machines. alpha and 1/beta: latency and bandwidth, see "
            "[allreduce.md](../../docs/allreduce.md). alone: a step of as many "
            "processes that do not communicate. See `python benchmarks/network.py --help`.",
        ]
    )


def main():
    parser = runs.flags.Parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--repeats", type=runs.flags.positive_int, default=3, metavar="N", help="of allreduce.py"
    )
    parser.add_argument(
        "--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results"
    )
    parser.add_argument(
        "--links",
        nargs="+",
        choices=LINKS,
        default=list(LINKS),
        metavar="NAME",
        help=", ".join(LINKS),
    )
    parser.add_argument(
        "--processes", nargs="+", type=int, choices=(2, 4), default=[2, 4], help="(default: 2 4)"
    )
    arguments = parser.parse_args()
    if os.geteuid():
        raise InputError("namespaces need root: start it with sudo")
    os.environ |= SETTINGS
    result = runs.about(arguments) | {"runs": measure(arguments)}
    runs.save(arguments, "network", result, markdown(result))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
