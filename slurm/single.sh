#!/usr/bin/env bash
# One process on one GPU.
#
#     sbatch slurm/single.sh
#     sbatch --time=01:00:00 slurm/single.sh mnist/single.py --epochs 10
#     sbatch --gpus-per-node=0 slurm/single.sh cifar10/single.py --synthetic   # on a CPU
#
# Submit from the folder of the repository, with the virtual environment active: the job inherits both.
#SBATCH --job-name=single
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
set -euo pipefail

recipe=${1:-cifar10/single.py}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Python ignores USR1 (the warning) and USR2 (print the stacks) until it sets handlers: by default they would kill it.
# One process, even if the job has more tasks.
# shellcheck disable=SC2016  # the inner bash expands "$@"
exec slurm/requeue.sh srun --ntasks=1 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1 USR2; exec python "$@"' \
    python "$recipe" --log-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto \
    --checkpoint-every 500 "${@:2}"
