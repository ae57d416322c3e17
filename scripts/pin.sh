#!/usr/bin/env bash
# Give each process its own share of a machine's cores, and a thread for each of them; for training on CPUs.
#
#     torchrun --nproc-per-node=2 --no-python scripts/pin.sh mnist/ddp_launch.py
#     horovodrun -np 2 scripts/pin.sh mnist/hvd.py
#     mpirun -np 2 --bind-to none scripts/pin.sh mnist/hvd.py
set -euo pipefail

rank=${LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-${HOROVOD_LOCAL_RANK:-}}}
size=${LOCAL_WORLD_SIZE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-${HOROVOD_LOCAL_SIZE:-}}}
[ -n "$rank" ] || { echo "pin.sh: start it with a launcher: torchrun --no-python, horovodrun or mpirun" >&2; exit 2; }
mapfile -t cores < <(python -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
share=$((${#cores[@]} / size))
[ "$share" -gt 0 ] || { echo "pin.sh: ${#cores[@]} cores for $size processes: start fewer" >&2; exit 2; }
own=$(IFS=,; echo "${cores[*]:rank * share:share}")
OMP_NUM_THREADS=$share exec taskset -c "$own" python "$@"
