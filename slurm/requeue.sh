#!/usr/bin/env bash
# Run the command of a batch script, and requeue the job if it is stopped before the training ends:
#
#     #SBATCH --requeue --signal=B:USR1@60
#     exec slurm/requeue.sh srun python mnist/single.py --log-dir runs/1 --resume auto
#
# SLURM sends USR1 to the batch script 60 to 120 seconds before the time limit. This script passes it on to the command;
# all ranks stop together within 5 seconds or a step, rank 0 saves, and the run ends with status 0. Then the job is
# requeued with the same job ID, and continues from the checkpoint, unless it has already been restarted MAX_REQUEUES
# (10) times, for whatever reason.
# When a job is preempted, SLURM sends TERM to all its processes except the batch script's. SLURM itself requeues a job
# only if it had to kill it after the GraceTime. This script requeues one that ends earlier, however often.
set -euo pipefail

job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # one task's job ID is the array's
[[ ${SLURM_CPU_BIND:-} != *mask* ]] || unset "${!SLURM_CPU_BIND@}"  # from a job that called sbatch: srun would fail
[ -z "${STAGE:-}" ] || set -- slurm/stage.sh "$@"  # copies archives to the nodes, then execs the command
[ -z "${STAGE_ENV:-}" ] || set -- slurm/stage_env.sh "$@"  # does the same with the environment
usage=
if [ -n "${USAGE:-}" ]; then  # a folder: each node measures itself during the command
    srun --overlap --ntasks="$SLURM_NNODES" --ntasks-per-node=1 python scripts/usage.py "$USAGE" &
    usage=$!
fi
# The command starts with both ignored: else they kill a launcher that has no handlers yet, or no longer has any.
trap "" USR1 USR2
"$@" &
command=$!
warned=
# Pass on USR1 every 2 s, until the command has ended: launchers and ranks ignore it while they start.
# shellcheck disable=SC2317  # the traps call it
stop() {
    while kill -USR1 "$command" 2> /dev/null; do sleep 2; done &
}
trap 'trap "" USR1; warned=yes; stop' USR1  # ignore further signals
# The end of the GraceTime, or scancel. USR1 stops the ranks, too; srun would kill them after TERM, and mpirun after a
# second one, because SLURM also sends TERM to mpirun itself.
trap 'trap "" TERM; stop' TERM
trap 'kill -USR2 $command 2> /dev/null || true' USR2  # scancel --batch --signal=USR2: the stacks of mpirun's ranks
while kill -0 $command 2> /dev/null; do
    wait $command || true  # a signal interrupts it
done
status=0
wait $command || status=$?
if [ -n "$usage" ]; then
    # Not TERM: srun would kill its tasks at once, before they print what they measured.
    kill -USR1 "$usage" 2> /dev/null || true
    wait "$usage" || true
fi

again="submit it again with its recipe and the --log-dir of this run"
# Requeue the job, and then print $1.
requeue() {
    trap "" TERM  # SLURM sends it at once to all processes of the job; scontrol inherits this
    if answer=$(scontrol requeue "$job" 2>&1); then
        echo "$SLURM_JOB_NAME: $1"
    else
        echo "$SLURM_JOB_NAME: not queued again, as scontrol says '$answer' (--no-requeue?): $again" >&2
    fi
}
times=${SLURM_RESTART_COUNT:-0}
if [[ $(scontrol show job "$job") =~ PreemptTime=[0-9] ]]; then
    requeue "preempted, and queued again"
elif [ -n "$warned" ] && [ $status = 0 ] && [ "$times" -lt "${MAX_REQUEUES:-10}" ]; then
    requeue "queued again, $((times + 1)) of ${MAX_REQUEUES:-10}"
elif [ -n "$warned" ] && [ $status = 0 ]; then
    echo "$SLURM_JOB_NAME: not queued again after $times times (MAX_REQUEUES): $again" >&2
fi
exit $status
