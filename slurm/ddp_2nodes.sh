#!/usr/bin/env bash
# DDP on several nodes: srun starts one torchrun on each, and torchrun one process per GPU.
#
#     sbatch slurm/ddp_2nodes.sh
#     sbatch --nodes=4 --gpus-per-node=8 slurm/ddp_2nodes.sh cifar10/ddp_launch.py --epochs 10
#     sbatch --gpus-per-node=0 slurm/ddp_2nodes.sh cifar10/ddp_launch.py --synthetic   # on CPUs, two per node
#
# Submit from the folder of the repository, with the virtual environment active: the job inherits both.
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
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# A random port, so that nobody can listen there before the job does; below 32768, as Linux assigns higher ports to
# outgoing connections.
port=$(shuf -i 20000-29999 -n 1)
id=$(< /proc/sys/kernel/random/uuid)
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > processes ? SLURM_CPUS_PER_TASK / processes : 1))
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a restarted group can read addresses of dead ranks
export TORCH_FR_BUFFER_SIZE=2000  # before --timeout kills a rank, it writes a trace for torchfrtrace: docs/clusters.md
# export NCCL_DEBUG=INFO         # when NCCL does not connect: prints the interfaces it uses
# export NCCL_SOCKET_IFNAME=ib0  # when NCCL uses the wrong one; GLOO_SOCKET_IFNAME on CPUs
# In a container: srun ... --container-image=..., or apptainer exec --nv IMAGE torchrun ...

# USR1 (the warning), TERM (preempted) and USR2 (print the stacks) are for torchrun's processes. torchrun must ignore
# them: USR1 and USR2 would kill it, and on TERM it ends with status 1, whatever its processes do.
# With RESTARTS=2 sbatch ... torchrun restarts its processes from the last checkpoint when one of them dies.
# is_host: else torchrun guesses from host names which node hosts the rendezvous, but a node can have several names
# (pytorch issue 73656). If the nodes do not reach each other by name, add --local-addr with each node's own address.
# One task per node, even if the job has more tasks: torchrun starts the processes.
# shellcheck disable=SC2016  # the bash on each node expands $SLURM_NODEID
exec slurm/requeue.sh srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1 USR2 TERM; exec torchrun --signals-to-handle=SIGINT \
        --rdzv-conf="is_host=$((SLURM_NODEID == 0))" "$@"' \
    torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$processes" \
    --rdzv-backend=c10d --rdzv-endpoint="$host:$port" --rdzv-id="$id" --max-restarts="${RESTARTS:-0}" \
    "$recipe" --log-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto \
    --checkpoint-every 500 "${@:2}"
