#!/usr/bin/env bash
# Horovod on hosts that ssh reaches without a password, started by Open MPI's mpirun; for machines without SLURM.
#
#     slurm/mpirun.sh HOSTFILE
#     slurm/mpirun.sh HOSTFILE cifar10/hvd.py --epochs 10
#
# A line of HOSTFILE names a host and how many processes it takes, one per GPU: node1 slots=4
# Each host has this folder and this virtual environment under the same path.
set -euo pipefail
[ -r "${1:-}" ] || { echo "mpirun.sh: give a file with a line for each host: node1 slots=4" >&2; exit 2; }

# -x hands a variable on, which ssh does not; --bind-to none, else a process is bound, with all its threads, to one core
# -mca btl_tcp_if_include eth0: where it takes the wrong interface, and hangs at the start
exec mpirun --hostfile "$1" --bind-to none -x PATH "$(command -v python)" "${2:-cifar10/hvd.py}" "${@:3}"
