#!/usr/bin/env bash
# Run the command of a batch script, and queue the job again if its time ends before the training does:
#
#     #SBATCH --requeue --signal=B:USR1@60
#     exec slurm/requeue.sh srun python mnist/single.py --log-dir runs/1 --resume auto
#
# SLURM sends USR1 to the batch script 60 to 90 seconds before the time limit. This script passes it on to the command;
# all ranks finish their step, the run is saved and ends with status 0. Then the job is queued again with the same
# job ID, at most MAX_REQUEUES times (10), and continues from the checkpoint.
set -euo pipefail

"$@" &
command=$!
warned=
trap 'trap "" USR1; warned=yes; kill -USR1 $command' USR1  # ignore further ones
status=0
wait $command || status=$?  # also returns when the warning comes, ...
if [ -n "$warned" ]; then
    status=0
    wait $command || status=$?  # ... and then the run has to end first
    if [ $status = 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-10}" ]; then
        echo "$SLURM_JOB_NAME: queued again, $((${SLURM_RESTART_COUNT:-0} + 1)) of ${MAX_REQUEUES:-10}"
        scontrol requeue "$SLURM_JOB_ID"
    elif [ $status = 0 ]; then
        echo "$SLURM_JOB_NAME: not queued again after $SLURM_RESTART_COUNT times; see MAX_REQUEUES in slurm/requeue.sh" >&2
    fi
fi
exit $status
