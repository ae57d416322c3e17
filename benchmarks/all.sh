#!/usr/bin/env bash
# Measure the tables and plots of benchmarks/results on this machine, but for the two that its README.md names: make
# benchmarks. Takes three quarters of an hour on two cores (of an AMD EPYC, 2026-11-27), which should be idle otherwise.
# As root it also checks the cost model on slow links (35 minutes). With the data sets in data/ it trains for accuracy
# (hours, but what is in runs/accuracy is not repeated). With peers/, filled as benchmarks/peers.py --help says, it
# compares with what is there (two hours). The first argument is the folder for the results; the others go to the
# scripts that repeat runs.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
shift || true
mkdir -p "$results"
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1  # as root, in a container

launched() {  # a benchmark, its flags in one word, and what starts the processes
    local script=$1 flags=$2
    shift 2
    echo "$* benchmarks/$script" >&2
    echo "\`$* benchmarks/$script\`:"
    echo
    # shellcheck disable=SC2086  # several flags, or none
    "$@" "benchmarks/$script" $flags | sed 's/^\[[0-9,]*\]<stdout>://'
    echo
}
allreduce() {  # a name for the raw figures, and what starts the processes
    local name=$1
    shift
    launched allreduce.py "--json $results/allreduce-$name.json" "$@"
}
horovod=false
mpi=false
if python -c "import horovod.torch" 2> /dev/null; then
    horovod=true
    if command -v mpirun > /dev/null; then mpi=true; fi
fi
{
    echo "# All-reduce"
    echo
    echo "time: the median of nine repetitions of up to 20 calls in a row, on the slowest rank. spread: (longest -"
    echo "shortest) / median. algorithm bandwidth: bytes / time. bus bandwidth: what a ring sends over each link, which is"
    echo "2 (p - 1)/p times that with p processes."
    echo
    allreduce gloo-2 torchrun --standalone --nproc-per-node=2
    allreduce gloo-4 torchrun --standalone --nproc-per-node=4
    if $horovod; then allreduce horovod-gloo-2 horovodrun --gloo -np 2 python; fi
    if $mpi; then allreduce horovod-mpi-2 mpirun --oversubscribe --bind-to none -np 2 python; fi
} > "$results/allreduce.md"
{
    echo "# What a second process adds to a step"
    echo
    echo "\`python benchmarks/waiting.py --help\` explains the rows."
    echo
    launched waiting.py "" torchrun --standalone --nproc-per-node=2
    if $horovod; then launched waiting.py "" horovodrun --gloo -np 2 python; fi
    if $mpi; then
        launched waiting.py "" mpirun --bind-to none -np 2 python
        launched waiting.py "" env HOROVOD_CYCLE_TIME=0.1 mpirun --bind-to none -np 2 python
    fi
} > "$results/waiting.md"
for script in scaling startup cpu sharding; do
    python "benchmarks/$script.py" --out "$results" "$@" > /dev/null
done
python benchmarks/model.py --out "$results" > /dev/null
if [ -d data/MNIST ] && [ -d data/cifar-10-batches-py ] && command -v horovodrun > /dev/null; then
    python benchmarks/accuracy.py --out "$results" > /dev/null
fi
if [ -d data/MNIST ] && [ -d data/cifar-10-batches-py ] && [ -d peers ]; then
    [ -d runs/jpegs ] || python benchmarks/jpeg_tree.py runs/jpegs --images 192 --classes 10
    python benchmarks/peers.py --peers peers --tree runs/jpegs --out "$results" > /dev/null
fi
if [ -d data/MNIST ] && [ -d peers/venv ]; then
    python benchmarks/interrupted.py --peers peers --out "$results" > /dev/null
fi
if [ "$(id -u)" = 0 ] && command -v ip > /dev/null && command -v horovodrun > /dev/null; then
    python benchmarks/network.py --out "$results" > /dev/null
fi
if $horovod; then
    timeline=$(mktemp)
    HOROVOD_TIMELINE=$timeline horovodrun --gloo -np 2 python mnist/hvd.py --synthetic 2560 --epochs 1 \
        --log-dir "$timeline.run" > /dev/null
    python benchmarks/timeline.py "$timeline" "$results/timeline.svg"
    rm -r "$timeline" "$timeline.run"
fi
[ "$results" != benchmarks/results ] || python benchmarks/readme.py
