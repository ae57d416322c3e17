"""Draw one step of a timeline that Horovod has recorded: when each gradient waited, and when it
travelled.

    HOROVOD_TIMELINE=/tmp/timeline.json horovodrun --gloo -np 2 python mnist/hvd.py --epochs 1
    python benchmarks/timeline.py /tmp/timeline.json /tmp/timeline.svg

It is the second-to-last step of training.
"""

import json
from pathlib import Path

import runs

from common import flags
from common.errors import InputError

COLORS = {
    "NEGOTIATE_ALLREDUCE": "#dddddd",
    "ALLREDUCE": "#999999",
    "MEMCPY_IN_FUSION_BUFFER": "#e69f00",
    "GLOO_ALLREDUCE": "#d55e00",
    "MPI_ALLREDUCE": "#d55e00",
    "NCCL_ALLREDUCE": "#d55e00",
    "MEMCPY_OUT_FUSION_BUFFER": "#f0c060",
}


def read(path):
    """{gradient: [(what, start, end in us)]} of a timeline, which lacks its last bracket."""
    try:
        events = json.loads(path.read_text().rstrip().rstrip(",").rstrip("]") + "]")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a Horovod timeline ({error})") from error
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name" and "name" in event["args"]
    }
    found, begun = {}, {}
    for event in events:
        name = names.get(event.get("pid"), "")
        # Metrics.
        if name.startswith("allreduce.") and not name.startswith(
            ("allreduce.sums", "allreduce.noname.")
        ):
            stack = begun.setdefault(name, [])
            if event["ph"] == "B":
                stack.append((event["name"], event["ts"]))
            elif event["ph"] == "E" and stack:
                what, start = stack.pop()
                found.setdefault(name.removeprefix("allreduce."), []).append(
                    (what, start, event["ts"])
                )
    return found


def one_step(gradients):
    """The events of the second-to-last step: from each gradient's second-to-last NEGOTIATE on, in
    order of arrival.
    """
    chosen = {}
    for name, events in gradients.items():
        starts = [start for what, start, _ in events if what == "NEGOTIATE_ALLREDUCE"]
        if len(starts) < 3:
            raise InputError("the timeline has fewer than three steps: record a longer run")
        chosen[name] = [event for event in events if starts[-2] <= event[1] < starts[-1]]
    return sorted(chosen.items(), key=lambda item: min(start for _, start, _ in item[1]))


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("timeline", type=Path, help="the file that HOROVOD_TIMELINE named")
    parser.add_argument("picture", type=Path, help="where the drawing goes, as SVG")
    arguments = parser.parse_args()
    rows = one_step(read(arguments.timeline))
    first = min(start for _, events in rows for _, start, _ in events)
    fig, ((ax,),) = runs.figure(1, width=9, height=1.5 + 0.28 * len(rows))
    seen = set()
    for row, (_, events) in enumerate(rows):
        # The longest first, so below.
        for what, start, end in sorted(events, key=lambda event: event[1] - event[2]):
            if what in COLORS:
                ax.barh(
                    row,
                    (end - start) / 1e3,
                    left=(start - first) / 1e3,
                    color=COLORS[what],
                    label=what if what not in seen else None,
                )
                seen.add(what)
    ax.set(
        yticks=range(len(rows)),
        yticklabels=[name for name, _ in rows],
        xlabel="ms since the first gradient was made",
    )
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.18 * 10 / len(rows)))
    fig.savefig(arguments.picture, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    with runs.plain_exits():
        main()
