#!/usr/bin/env bash
# DDP on several nodes without torchrun: srun starts one process per GPU. A task of the job is a process.
#
#     sbatch slurm/ddp_srun_2nodes.sh
#     sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 slurm/ddp_srun_2nodes.sh cifar10/ddp_amp.py --epochs 10
#     sbatch --ntasks-per-node=2 --gpus-per-node=0 slurm/ddp_srun_2nodes.sh cifar10/ddp_launch.py --synthetic
#
# Submit from the folder of the repository, with the virtual environment active: the job inherits both.
#SBATCH --job-name=ddp-srun
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

recipe=${1:-cifar10/ddp_launch.py}
# Each process must know how many its node runs.
if [ "${SLURM_NTASKS:-}" != $((SLURM_NNODES * ${SLURM_NTASKS_PER_NODE:-0})) ]; then
    echo "ddp_srun_2nodes.sh: use --ntasks-per-node in place of --ntasks, and a fixed number of --nodes" >&2
    exit 2
fi
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# What torchrun would set for each process: the address of rank 0 and, from SLURM's variables, the ranks
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# A random port, so that nobody can listen there before the job does; below 32768, as Linux assigns higher ports to
# outgoing connections.
MASTER_PORT=$(shuf -i 20000-29999 -n 1)
export MASTER_ADDR MASTER_PORT
# shellcheck disable=SC2016  # the bash of each task expands them
who='RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE'
export TORCH_FR_BUFFER_SIZE=2000  # before --timeout kills a rank, it writes a trace for torchfrtrace: docs/clusters.md
# export NCCL_DEBUG=INFO         # when NCCL does not connect: prints the interfaces it uses
# export NCCL_SOCKET_IFNAME=ib0  # when NCCL uses the wrong one; GLOO_SOCKET_IFNAME on CPUs

# Python ignores USR1 (the warning) and USR2 (print the stacks) until it sets handlers: by default they would kill it.
exec slurm/requeue.sh srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c "trap '' USR1 USR2; export $who; exec python \"\$@\"" \
    python "$recipe" --log-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto \
    --checkpoint-every 500 "${@:2}"
