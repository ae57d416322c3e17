#!/usr/bin/env bash
# Unpack an archive of the virtual environment on the local disk of each node of a job, and run the command of the job
# in it. requeue.sh calls this script:
#
#     tar -cf /shared/env.tar -C .venv .
#     STAGE_ENV=/shared/env.tar sbatch slurm/ddp_2nodes.sh
#
# Each rank looks up tens of thousands of files when it starts. This way the shared file system serves one archive per
# node. The local disk is SLURM_TMPDIR or TMPDIR. A requeued job finds the environment there.
set -euo pipefail
trap "" USR1 USR2  # the warning before the time limit is for the ranks: requeue.sh repeats it until they have started

fail() {
    echo "stage_env.sh: $*" >&2
    exit 2
}

# On one node.
unpack() {
    local archive=$1 to=$2
    mkdir -p "$to"
    # In /tmp, anybody can create a folder of this name before the job does.
    if [ ! -O "$to" ] || [ -L "$to" ]; then
        fail "$to belongs to another user on $(hostname)"
    fi
    [ ! -e "$to/.unpacked" ] || return 0
    tar -xf "$archive" -C "$to" || fail "$(hostname) cannot unpack $archive to $to"
    # Scripts such as torchrun start with the path of the Python that was packed: change it.
    grep -lI '^#!.*/bin/python' "$to"/bin/* | xargs sed -i "1s|^#!.*/bin/python[0-9.]*|#!$to/bin/python|"
    touch "$to/.unpacked"
}

if [ "${1:-}" = --node ]; then
    unpack "$2" "$3"
    exit
fi
[ -r "$STAGE_ENV" ] || fail "STAGE_ENV=$STAGE_ENV: there is no such file; make it with tar -cf $STAGE_ENV -C .venv ."
disk=${SLURM_TMPDIR:-${TMPDIR:-}}
[ -n "$disk" ] || fail "set TMPDIR to a folder on the local disk of the nodes"
to=$disk/env-$SLURM_JOB_ID
echo "unpacking $STAGE_ENV to $to on each node"
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 slurm/stage_env.sh --node "$STAGE_ENV" "$to"
export VIRTUAL_ENV=$to PATH=$to/bin:$PATH
exec "$@"
