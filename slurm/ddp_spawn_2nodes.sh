#!/usr/bin/env bash
# DDP on several nodes without torchrun: srun starts the recipe on each, and its mp.spawn one process per GPU.
#
#     sbatch slurm/ddp_spawn_2nodes.sh
#     sbatch --nodes=4 --gpus-per-node=8 slurm/ddp_spawn_2nodes.sh cifar10/ddp_spawn.py --epochs 10
#     sbatch --gpus-per-node=0 slurm/ddp_spawn_2nodes.sh cifar10/ddp_spawn.py --synthetic   # on CPUs, two per node
#
# Submit from the folder of the repository, with the virtual environment active: the job inherits both.
#SBATCH --job-name=ddp_spawn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
set -euo pipefail

recipe=${1:-cifar10/ddp_spawn.py}
processes=${SLURM_GPUS_ON_NODE:-2}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# A random port, so that nobody can listen there before the job does; below 32768, as Linux assigns higher ports to
# outgoing connections.
MASTER_PORT=$(shuf -i 20000-29999 -n 1)
OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > processes ? SLURM_CPUS_PER_TASK / processes : 1))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
export TORCH_FR_BUFFER_SIZE=2000  # before --timeout kills a rank, it writes a trace for torchfrtrace: docs/clusters.md
# export NCCL_DEBUG=INFO         # when NCCL does not connect: prints the interfaces it uses
# export NCCL_SOCKET_IFNAME=ib0  # when NCCL uses the wrong one; GLOO_SOCKET_IFNAME on CPUs

# Python ignores USR1 (the warning) and USR2 (print the stacks) until it sets handlers: by default they would kill it.
# One task per node, even if the job has more tasks: mp.spawn starts the processes.
# shellcheck disable=SC2016  # the bash on each node expands $SLURM_NODEID
exec slurm/requeue.sh srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1 USR2; exec python "$@" -nr "$SLURM_NODEID"' \
    python "$recipe" -n "$SLURM_NNODES" -g "$processes" \
    --log-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto --checkpoint-every 500 "${@:2}"
