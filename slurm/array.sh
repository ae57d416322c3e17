#!/usr/bin/env bash
# A job array: each task is the same run with a different seed or learning rate; one process on one GPU.
#
#     sbatch slurm/array.sh
#     sbatch --array=0-9 slurm/array.sh mnist/single.py --epochs 10
#     RATES="0.01 0.03 0.1" sbatch --array=0-2 slurm/array.sh mnist/single.py
#
# When they have ended: python scripts/summarize_runs.py runs/array-JOBID
#
# Submit from the folder of the repository, with the virtual environment active: the job inherits both.
#SBATCH --job-name=array
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
set -euo pipefail

recipe=${1:-cifar10/single.py}
this=(--seed "$SLURM_ARRAY_TASK_ID")
if [ -n "${RATES:-}" ]; then
    read -ra rates <<< "$RATES"
    this=(--lr "${rates[$SLURM_ARRAY_TASK_ID]}")
fi
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Python ignores USR1 (the warning) and USR2 (print the stacks) until it sets handlers: by default they would kill it.
# One process, even if the job has more tasks.
# shellcheck disable=SC2016  # the inner bash expands "$@"
exec slurm/requeue.sh srun --ntasks=1 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1 USR2; exec python "$@"' python "$recipe" "${this[@]}" --resume auto \
    --log-dir "runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID" --checkpoint-every 500 "${@:2}"
