#!/usr/bin/env bash
# DDP that continues while nodes fail and return. Each task of the job array is one torchrun on one node. The torchruns
# find each other through a file in runs/, because any node may fail: flock must work across nodes there (Lustre:
# mounted with flock). When a node fails, the others restart from the last checkpoint without it. SLURM queues its task
# again; when it starts, the others save, and all restart together.
#
#     sbatch slurm/ddp_elastic.sh cifar10/ddp_launch.py -G 1024 --lr 0.8
#     sbatch --array=0-3 --gpus-per-node=8 slurm/ddp_elastic.sh cifar10/ddp_amp.py --epochs 10 -G 3072 --lr 2.4
#     sbatch --gpus-per-node=0 slurm/ddp_elastic.sh cifar10/ddp_launch.py --synthetic -G 256   # on the CPUs
#
# -G (--global-batch-size) keeps the batch, and so the steps, on any number of nodes; --lr is for this batch. -G must
# be a multiple of every number of processes that can remain: 3072 is one of 8, 16, 24 and 32. When a task is cancelled
# or preempted, or its time ends, the run is saved, and the others continue from there.
# Submit from the folder of the repository, with the virtual environment active: the job inherits both.
#SBATCH --job-name=ddp-elastic
#SBATCH --array=0-1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --output=%x-%A-%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@60
set -euo pipefail

recipe=${1:-cifar10/ddp_launch.py}
processes=${SLURM_GPUS_ON_NODE:-2}
run=runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID
mkdir -p runs
[[ ${SLURM_CPU_BIND:-} != *mask* ]] || unset "${!SLURM_CPU_BIND@}"  # from a job that called sbatch: srun would fail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a node can keep the address of a store that is gone
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > processes ? SLURM_CPUS_PER_TASK / processes : 1))
export TORCH_FR_BUFFER_SIZE=2000  # before --timeout kills a rank, it writes a trace for torchfrtrace: docs/clusters.md

# last_call_timeout: after a change the torchruns wait 10 s for more nodes before they start. A node that does not
# answer for 15 s counts as gone. USR1 (stop) and USR2 (print the stacks) are for torchrun's processes, and would kill
# torchrun.
# One torchrun, even if the job has more tasks.
# shellcheck disable=SC2016  # the inner bash expands "$@"
exec srun --ntasks=1 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    bash -c 'trap "" USR1 USR2; exec torchrun "$@"' torchrun \
    --nnodes="1:$SLURM_ARRAY_TASK_COUNT" --nproc-per-node="$processes" --max-restarts=100 \
    --rdzv-backend=c10d --rdzv-endpoint="$run.rendezvous" --rdzv-id="$SLURM_ARRAY_JOB_ID" \
    --rdzv-conf=store_type=file,last_call_timeout=10 \
    "$recipe" --log-dir "$run" --resume auto --checkpoint-every 100 "${@:2}"
