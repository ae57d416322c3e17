#!/usr/bin/env bash
# Measure the tables of benchmarks/results on this machine, which should be otherwise idle: make benchmarks. With the
# data sets in data/ it also trains for accuracy (hours; finished runs in runs/accuracy are not repeated). With peers/,
# filled as benchmarks/peers.py --help says, it also compares with the scripts there (two hours). The first argument is
# the folder for the results.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
for name in allreduce memory scaling model; do
    python benchmarks/$name.py --out "$results"
done
if [ -d data/MNIST ] && [ -d data/cifar-10-batches-py ]; then
    if command -v horovodrun > /dev/null; then python benchmarks/accuracy.py --out "$results"; fi
    if [ -d peers ]; then
        [ -d runs/jpegs ] || python benchmarks/jpeg_tree.py runs/jpegs --images 192 --classes 10
        python benchmarks/peers.py --peers peers --tree runs/jpegs --out "$results"
    fi
fi
