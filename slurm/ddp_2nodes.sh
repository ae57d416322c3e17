#!/usr/bin/env bash
# DDP on several nodes: srun starts one torchrun on each, and torchrun one process per GPU.
#
#     sbatch slurm/ddp_2nodes.sh
#     sbatch --nodes=4 --gpus-per-node=8 slurm/ddp_2nodes.sh cifar10/ddp_launch.py --epochs 10
#     sbatch --gpus-per-node=0 slurm/ddp_2nodes.sh cifar10/ddp_launch.py --synthetic   # two processes, on the CPUs
#
# Submit from the folder of the repository, with the virtual environment active: a job takes both over.
#SBATCH --job-name=ddp
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

recipe=${1:-cifar10/ddp_launch.py}
processes=${SLURM_GPUS_ON_NODE:-2}
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))  # below 32768, where Linux begins to give ports to whoever asks for any
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > processes ? SLURM_CPUS_PER_TASK / processes : 1))
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a restarted group can read addresses of ranks that are gone
# export NCCL_DEBUG=INFO         # when NCCL does not connect: prints which interfaces it takes
# export NCCL_SOCKET_IFNAME=ib0  # when it takes the wrong one; GLOO_SOCKET_IFNAME on CPUs
# In a container: srun ... --container-image=..., or apptainer exec --nv IMAGE torchrun ...

# torchrun would die of the two signals that are for its processes (the warning; USR2, which shows where each one is):
# it ignores them. RESTARTS=2 sbatch ... lets it start its processes again, from the last checkpoint, when one has died.
# is_host: torchrun guesses from host names which node hosts the rendezvous, and a node can have several (pytorch issue
# 73656). Where the nodes do not reach each other by name, add --local-addr=ADDRESS, the address of each node itself
# shellcheck disable=SC2016  # $SLURM_NODEID is for the bash on each node, which says there which one it is
exec slurm/requeue.sh srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1 USR2; exec torchrun --rdzv-conf="is_host=$((SLURM_NODEID == 0))" "$@"' \
    torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$processes" \
    --rdzv-backend=c10d --rdzv-endpoint="$host:$port" --rdzv-id="$SLURM_JOB_ID" --max-restarts="${RESTARTS:-0}" \
    "$recipe" --log-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto "${@:2}"
