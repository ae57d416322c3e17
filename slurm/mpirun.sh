#!/usr/bin/env bash
# Horovod, or DDP, on hosts that ssh reaches without a password, started by Open MPI's mpirun; not for SLURM.
#
#     slurm/mpirun.sh HOSTFILE
#     slurm/mpirun.sh HOSTFILE cifar10/hvd.py --epochs 10
#     slurm/mpirun.sh HOSTFILE cifar10/ddp_launch.py --epochs 10
#
# Each line of HOSTFILE names a host and its number of processes, one per GPU: node1 slots=4 (see slurm/hosts.sh). The
# first has rank 0: start this script there, or on a host that is not in HOSTFILE.
# Each host needs this folder and this virtual environment under the same path.
set -euo pipefail

repository=$(dirname "$0")/..
hosts=$("$repository/slurm/hosts.sh" "${1:-}")
recipe=${2:-$repository/cifar10/hvd.py}
start=("$(command -v python)")
if [ "${recipe##*/}" != hvd.py ]; then  # DDP: what torchrun would set for each process, from Open MPI's variables
    # A random port, so that nobody can listen there first.
    export MASTER_ADDR=${hosts%%:*} MASTER_PORT=${MASTER_PORT:-$(shuf -i 20000-29999 -n 1)}
    # shellcheck disable=SC2016  # the bash of each process expands them
    who='RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
        LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE'
    start=(bash -c "export ${who//$'\n'/ }; exec \"\$@\"" bash "${start[@]}")
fi
handed_on=()  # -x passes a variable to the other hosts; mpirun warns if it is not set
for name in $(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|OMP_NUM_THREADS|(MASTER|NCCL|HOROVOD|GLOO|TORCH|UCX|RDMAV)_.*)$'); do
    handed_on+=(-x "$name")
done
# --bind-to none: else all threads of a process share one core. The other flags are from Horovod's docs.
# odls_base_sigkill_timeout: after SIGTERM the processes have 5 s to save, not 1. They get SIGTERM 5 s after mpirun.
# Open MPI 5 has no such option, and leaves 0.25 s: send mpirun USR1 instead, which it passes on.
# mpirun by its full path: then the other hosts find orted, even if a module provides mpirun.
# If MPI uses the wrong interface, it hangs at the start: export OMPI_MCA_btl_tcp_if_include=eth0
exec "$(command -v mpirun)" --host "$hosts" --bind-to none --map-by slot --mca pml ob1 --mca btl ^openib \
    --mca odls_base_sigkill_timeout 5 "${handed_on[@]}" "${start[@]}" "$recipe" "${@:3}"
