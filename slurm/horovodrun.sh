#!/usr/bin/env bash
# Horovod on hosts that ssh reaches without a password, started by horovodrun; for machines without SLURM.
#
#     slurm/horovodrun.sh HOSTFILE
#     slurm/horovodrun.sh HOSTFILE cifar10/hvd.py --epochs 10
#
# Each line of HOSTFILE names a host and its number of processes, one per GPU: node1 slots=4
# Each host needs this folder and this virtual environment under the same path.
set -euo pipefail
[ -r "${1:-}" ] || { echo "horovodrun.sh: give a file with a line for each host: node1 slots=4" >&2; exit 2; }

processes=$(awk -F slots= '{ sum += $2 } END { print sum }' "$1")
# --network-interfaces eth0: if it uses the wrong one. --gloo: without MPI
exec horovodrun -np "$processes" --hostfile "$1" python "${2:-cifar10/hvd.py}" "${@:3}"
