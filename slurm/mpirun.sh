#!/usr/bin/env bash
# Horovod on hosts that ssh reaches without a password, started by Open MPI's mpirun; for machines without SLURM.
#
#     slurm/mpirun.sh HOSTFILE
#     slurm/mpirun.sh HOSTFILE cifar10/hvd.py --epochs 10
#
# Each line of HOSTFILE names a host and its number of processes, one per GPU: node1 slots=4
# Each host needs this folder and this virtual environment under the same path.
set -euo pipefail
[ -r "${1:-}" ] || { echo "mpirun.sh: give a file with a line for each host: node1 slots=4" >&2; exit 2; }

handed_on=()  # -x passes a variable to the other hosts; mpirun warns if it is not set
for name in $(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|OMP_NUM_THREADS|(NCCL|HOROVOD)_.*)$'); do
    handed_on+=(-x "$name")
done
# --bind-to none: else all threads of a process share one core. The other flags are from Horovod's docs.
# Without GPUs: export OMPI_MCA_mpi_yield_when_idle=1, so that a waiting process frees its core.
# If it uses the wrong interface, it hangs at the start: export OMPI_MCA_btl_tcp_if_include=eth0
exec mpirun --hostfile "$1" --bind-to none -map-by slot -mca pml ob1 -mca btl ^openib "${handed_on[@]}" \
    "$(command -v python)" "${2:-cifar10/hvd.py}" "${@:3}"
