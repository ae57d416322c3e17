#!/usr/bin/env bash
# Horovod on hosts that ssh reaches without a password, started by horovodrun; for machines without SLURM.
#
#     slurm/horovodrun.sh HOSTFILE
#     slurm/horovodrun.sh HOSTFILE cifar10/hvd.py --epochs 10
#
# Each line of HOSTFILE names a host and its number of processes, one per GPU: node1 slots=4 (see slurm/hosts.sh).
# Each host needs this folder and this virtual environment under the same path.
set -euo pipefail

repository=$(dirname "$0")/..
hosts=$("$repository/slurm/hosts.sh" "${1:-}")
processes=$(awk -v RS=, -F: '{ sum += $NF } END { print sum }' <<< "$hosts")
# horovodrun puts its whole environment into the command lines of its processes, where every user of a host can read it:
# so it gets only these variables. Add what your recipe needs.
variables=()
for name in $(compgen -e | grep -E '^(PATH|HOME|USER|LANG|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|TMPDIR|SSH_AUTH_SOCK|OMP_NUM_THREADS|(CUDA|NCCL|HOROVOD|OMPI|GLOO)_.*)$'); do
    variables+=("$name=${!name}")
done
# --network-interfaces eth0: if horovodrun uses the wrong interface. --gloo: without MPI
exec env -i "${variables[@]}" horovodrun -np "$processes" -H "$hosts" python "${2:-$repository/cifar10/hvd.py}" "${@:3}"
