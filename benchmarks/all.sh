#!/usr/bin/env bash
# Measure the tables of benchmarks/results on this machine, which should be idle otherwise: make benchmarks. Takes less
# than 50 minutes on two cores. With the data sets in data/ it trains for accuracy (hours, but what
# is in runs/accuracy is not repeated). With peers/, filled as benchmarks/peers.py --help says, it compares with what is
# there (two hours). The first argument is the folder for the results; the others go to scaling.py.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
shift || true
mkdir -p "$results"
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1  # as root, in a container

allreduce() {  # a name for the raw figures, and what starts the processes
    local name=$1
    shift
    echo "$* benchmarks/allreduce.py" >&2
    echo "\`$* benchmarks/allreduce.py\`:"
    echo
    "$@" benchmarks/allreduce.py --json "$results/allreduce-$name.json" | sed 's/^\[[0-9,]*\]<stdout>://'
    echo
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
python benchmarks/memory.py --out "$results" > /dev/null
python benchmarks/scaling.py --out "$results" "$@" > /dev/null
python benchmarks/model.py --out "$results" > /dev/null
if [ -d data/MNIST ] && [ -d data/cifar-10-batches-py ] && command -v horovodrun > /dev/null; then
    python benchmarks/accuracy.py --out "$results" > /dev/null
fi
if [ -d data/MNIST ] && [ -d data/cifar-10-batches-py ] && [ -d peers ]; then
    [ -d runs/jpegs ] || python benchmarks/jpeg_tree.py runs/jpegs --images 192 --classes 10
    python benchmarks/peers.py --peers peers --tree runs/jpegs --out "$results" > /dev/null
fi
