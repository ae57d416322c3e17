#!/usr/bin/env bash
# Print the hosts of a host file as horovodrun -H and mpirun --host take them: node1:4,node2:4
#
#     slurm/hosts.sh HOSTFILE
#
# A line is "node1 slots=4", or "node1:4"; "node1" alone is one process. Comments (#), blank lines, max_slots= and the
# line ends of Windows do no harm. horovodrun and mpirun differ in what they make of such files.
set -euo pipefail
[ -r "${1:-}" ] || { echo "hosts.sh: give a file with a line for each host: node1 slots=4" >&2; exit 2; }

awk -v file="$1" '
    function wrong(what) { printf "%s: %s; a line is: node1 slots=4\n", file, what > "/dev/stderr"; exit failed = 2 }
    { sub(/\r$/, ""); sub(/#.*/, ""); gsub(/[ \t]*=[ \t]*/, "=") }
    NF == 0 { next }
    {
        host = $1
        slots = 1
        if (host ~ /:[0-9]+$/) {
            slots = substr(host, match(host, /[0-9]+$/))
            sub(/:[0-9]+$/, "", host)
        }
        for (i = 2; i <= NF; i++) {
            if ($i ~ /^slots=[0-9]+$/) slots = substr($i, length("slots=") + 1)
            else if ($i !~ /^max[-_]slots=[0-9]+$/) wrong("line " NR " has " $i)
        }
        if (slots < 1) wrong("line " NR " has no slot")
        if (!(host in sum)) order[++hosts] = host
        sum[host] += slots
    }
    END {
        if (failed) exit failed
        if (!hosts) wrong("it names no host")
        for (i = 1; i <= hosts; i++) printf "%s%s:%d", (i > 1 ? "," : ""), order[i], sum[order[i]]
        print ""
    }
' "$1"
