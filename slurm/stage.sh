#!/usr/bin/env bash
# Copy the archives in --data-dir to the local disk of each node of a job, and then run the command of the job, which
# reads them there. requeue.sh calls this script:
#
#     STAGE=1 sbatch slurm/ddp_2nodes.sh imagenet/ddp_launch.py --data-dir /shared/imagenet
#
# The local disk is SLURM_TMPDIR or TMPDIR. If your cluster does not empty it after the job, delete the copies yourself.
# A requeued job copies only what is missing.
set -euo pipefail
trap "" USR1 USR2  # the warning before the time limit is for the ranks: requeue.sh repeats it until they have started

fail() {
    echo "stage.sh: $*" >&2
    exit 2
}

# On one node: copy the files that are missing there, or differ in size or in modification time (seconds).
copy() {
    local from=$1 to=$2 needed=0 free file partial
    local files=()
    for file in "$from"/*.{tar,zip,tar.gz,csv,index}; do
        [ -e "$file" ] || continue
        [ "$(stat -Lc "%s %Y" "$file")" != "$(stat -c "%s %Y" "$to/${file##*/}" 2> /dev/null)" ] || continue
        files+=("$file")
        needed=$((needed + $(stat -Lc %s "$file")))
    done
    mkdir -p "$to"
    # In /tmp, anybody can create a folder of this name before the job does.
    if [ ! -O "$to" ] || [ -L "$to" ]; then
        fail "$to belongs to another user on $(hostname)"
    fi
    free=$(df --output=avail --block-size=1 "$to" | tail -n 1)
    [ "$needed" -le "$free" ] ||
        fail "$(hostname) has $(numfmt --to=iec "$free")B left in $to, and $(numfmt --to=iec "$needed")B are needed"
    partial=$to/.partial-$(hostname)
    for file in ${files[@]+"${files[@]}"}; do
        if ! cp --dereference --preserve=timestamps "$file" "$partial"; then
            rm -f "$partial"
            fail "$(hostname) cannot copy $file to $to"
        fi
        mv "$partial" "$to/${file##*/}"
    done
}

if [ "${1:-}" = --node ]; then
    copy "$2" "$3"
    exit
fi
from=data
previous=
for word in "$@"; do
    [ "$previous" != --data-dir ] || from=$word
    [[ $word != --data-dir=* ]] || from=${word#*=}
    previous=$word
done
# Expand ~ in --data-dir=~/folder, which a shell does not, but a recipe does: common/flags.py.
[[ $from != "~"* ]] || from=$(python -c 'import os, sys; print(os.path.expanduser(sys.argv[1]))' "$from")
compgen -G "$from/*.tar" > /dev/null || compgen -G "$from/*.zip" > /dev/null ||
    fail "there is no archive in $from (--data-dir): STAGE=1 copies *.tar and *.zip"
disk=${SLURM_TMPDIR:-${TMPDIR:-}}
[ -n "$disk" ] || fail "set TMPDIR to a folder on the local disk of the nodes"
to=$disk/staged-$SLURM_JOB_ID
echo "copying the archives in $from to $to on each node"
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 slurm/stage.sh --node "$from" "$to"
exec "$@" --data-dir "$to"  # the last --data-dir counts
