#!/usr/bin/env bash
# Horovod on several nodes: mpirun, or srun with PMIx, starts one process per GPU. A task of the job is a process.
#
#     sbatch slurm/hvd_2nodes.sh
#     sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 slurm/hvd_2nodes.sh cifar10/hvd.py --epochs 10
#     LAUNCHER=srun sbatch slurm/hvd_2nodes.sh
#     sbatch --ntasks-per-node=2 --gpus-per-node=0 slurm/hvd_2nodes.sh cifar10/hvd.py --synthetic   # on the CPUs
#
# Submit from the folder of the repository, with the virtual environment active: the job inherits both.
#SBATCH --job-name=hvd
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
set -euo pipefail

recipe=${1:-cifar10/hvd.py}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# export NCCL_DEBUG=INFO                    # when NCCL does not connect: prints the interfaces it uses
# export NCCL_SOCKET_IFNAME=ib0             # when NCCL uses the wrong one
# export OMPI_MCA_btl_tcp_if_include=eth0   # when MPI uses the wrong one, it hangs at the start
# --bind-to none: else all threads of a process share one core. odls_base_sigkill_timeout: after TERM the processes have
# 5 s to save, not 1. They get TERM 5 s after mpirun. With Open MPI 5 they have 0.25 s (docs/clusters.md). The other
# flags are from Horovod's docs
launch=(mpirun --bind-to none --map-by slot --mca pml ob1 --mca btl ^openib --mca odls_base_sigkill_timeout 5)
for name in $(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|OMP_NUM_THREADS|(NCCL|HOROVOD)_.*)$'); do
    launch+=(-x "$name")  # passes it to all nodes; mpirun warns if it is not set
done
if [ "${LAUNCHER:-mpirun}" = srun ]; then  # if SLURM and Open MPI have the same PMIx: see srun --mpi=list
    launch=(srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1)
fi

# Python ignores USR1 (the warning) and USR2 (print the stacks) until it sets handlers: by default they would kill it.
# shellcheck disable=SC2016  # the inner bash expands "$@"
exec slurm/requeue.sh "${launch[@]}" \
    bash -c 'trap "" USR1 USR2; exec python "$@"' \
    python "$recipe" --log-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto \
    --checkpoint-every 500 "${@:2}"
