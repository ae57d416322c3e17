#!/usr/bin/env bash
# Print the hosts of a host file as horovodrun -H and mpirun --host take them: node1:4,node2:4
#
#     slurm/hosts.sh HOSTFILE
#
# A line is "node1 slots=4", or "node1:4"; "node1" alone is one process. Comments (#), blank lines, max_slots= and what
# Windows adds (line ends, a byte order mark) are fine. horovodrun and mpirun disagree on how to read such files.
set -euo pipefail

file=${1:-}
if [ ! -r "$file" ] || [ -d "$file" ]; then
    echo "hosts.sh: cannot read the file '$file': give one with a line for each host: node1 slots=4" >&2
    exit 2
fi

LC_ALL=C awk -v file="$file" '
    function wrong(what) {
        printf "%s: %s; a line is: node1 slots=4\n", file, what > "/dev/stderr"
        failed = 1
        exit 2
    }
    {
        sub(/^\357\273\277/, "")
        sub(/\r$/, "")
        sub(/#.*/, "")
        sub(/:/, " slots=")
        gsub(/[ \t]*=[ \t]*/, "=")
    }
    NF == 0 { next }
    {
        host = $1
        slots = 1
        if (host !~ /^[A-Za-z0-9][A-Za-z0-9._-]*$/) wrong("line " NR " has " host)
        for (i = 2; i <= NF; i++) {
            if ($i ~ /^slots=[0-9]+$/) slots = substr($i, length("slots=") + 1) + 0
            else if ($i !~ /^max[-_]slots=[0-9]+$/) wrong("line " NR " has " $i)
        }
        if (slots < 1) wrong("line " NR " has no slot")
        if (!(host in sum)) order[++hosts] = host
        sum[host] += slots
    }
    END {
        if (failed) exit 2  # exit in wrong() runs END, too
        if (!hosts) wrong("it names no host")
        for (i = 1; i <= hosts; i++) printf "%s%s:%d", (i > 1 ? "," : ""), order[i], sum[order[i]]
        print ""
    }
' < "$file"
