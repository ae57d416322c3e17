"""Draws docs/drawings/*.svg.

python docs/draw.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent / "drawings"
INK, QUIET, LINE, PANEL, EMPTY = "#1f2933", "#5f6b7a", "#8a96a6", "#f3f5f8", "#e6eaf0"
RANKS = ["#3f7bc8", "#dc8726", "#339a69", "#bb5a8e"]  # one colour per process, in every drawing


class Drawing:
    """An SVG on a white background with round corners, which suits light and dark pages."""

    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" '
            f'height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" '
            f'fill="{LINE}"/></marker></defs>',
        ]
        self.box(1, 1, width - 2, height - 2, "#ffffff", stroke="#d9dfe7", radius=14)

    def box(self, x, y, width, height, fill, stroke="none", radius=6, dashes="none"):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'
        )

    def text(self, x, y, text, size=14, color=INK, anchor="middle", weight="normal"):
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def line(self, x1, y1, x2, y2, tips="end", color=LINE, dashes="none"):
        """A line with an arrow tip at its end, at both of its ends, or at none of them."""
        ends = {
            "end": ' marker-end="url(#tip)"',
            "none": "",
            "both": ' marker-start="url(#tip)" marker-end="url(#tip)"',
        }[tips]
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="1.8" stroke-dasharray="{dashes}"{ends}/>'
        )

    def curve(self, path):
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.8" '
            'marker-end="url(#tip)"/>'
        )

    def circle(self, x, y, radius, fill, label):
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius}" fill="{fill}"/>')
        self.text(x, y + 5, label, color="#ffffff", weight="bold")

    def chunk(self, x, y, width, height, ranks):
        """A part of a buffer, in the colours of the ranks whose values are summed up in it."""
        self.box(x, y, width, height, EMPTY, radius=0)
        for place, rank in enumerate(ranks):
            self.box(
                x + place * width / len(ranks), y, width / len(ranks), height, RANKS[rank], radius=0
            )

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def ranks():
    drawing = Drawing(
        880, 292, "Two machines with four processes each: ranks, local ranks and the world size"
    )
    drawing.box(24, 24, 832, 244, "none", stroke=LINE, radius=12, dashes="6 5")
    drawing.text(440, 52, "one process group (MPI: communicator), world size 8", weight="bold")
    for machine in range(2):
        left = 44 + machine * 416
        drawing.box(left, 72, 376, 176, PANEL, radius=10)
        drawing.text(left + 188, 98, f"machine {machine}", color=QUIET)
        for local_rank in range(4):
            x = left + 14 + local_rank * 89
            drawing.box(x, 114, 81, 116, "#ffffff", stroke="#d9dfe7")
            drawing.box(x, 114, 81, 36, RANKS[local_rank])
            drawing.text(
                x + 40.5, 137, f"rank {4 * machine + local_rank}", color="#ffffff", weight="bold"
            )
            drawing.text(x + 40.5, 174, "local rank", size=12, color=QUIET)
            drawing.text(x + 40.5, 192, f"{local_rank}", weight="bold")
            drawing.text(x + 40.5, 216, f"GPU {local_rank}", size=12, color=QUIET)
    drawing.line(424, 172, 456, 172, tips="both")
    return drawing.svg()


def collectives():
    """What each of four ranks has before and after, in four parts.

    Reduce-scatter and all-gather make an all-reduce.
    """
    everyone = [0, 1, 2, 3]
    kinds = {  # name: what rank r has in part k before, and after
        "broadcast": (lambda r, k: [0] if r == 0 else [], lambda r, k: [0]),
        "reduce-scatter": (lambda r, k: [r], lambda r, k: everyone if r == k else []),
        "all-gather": (lambda r, k: [r] if r == k else [], lambda r, k: [k]),
        "all-reduce": (lambda r, k: [r], lambda r, k: everyone),
    }
    drawing = Drawing(880, 400, "What each of four ranks has before and after a collective")
    before_and_after(drawing, kinds)
    drawing.text(789, 44, "barrier", weight="bold")
    for rank, (length, color) in enumerate(zip((120, 70, 176, 96), RANKS, strict=True)):
        x = 724 + rank * 34
        drawing.text(x + 14, 80, f"{rank}", size=12, color=QUIET)
        drawing.box(x, 92, 28, length, color, radius=0)
        if length < 170:
            drawing.line(x + 14, 92 + length + 4, x + 14, 266, tips="none", dashes="3 3")
        drawing.line(x + 14, 276, x + 14, 318)
    drawing.line(716, 271, 862, 271, tips="none", color=INK)
    colours_of_ranks(drawing)
    drawing.text(789, 363, "the first wait for the last", size=12, color=QUIET)
    return drawing.svg()


def more_collectives():
    """What the recipes do not use: three collectives with rank 0 as the root, and a message."""
    everyone = [0, 1, 2, 3]
    kinds = {  # name: what rank r has in part k before, and after
        "reduce": (lambda r, k: [r], lambda r, k: everyone if r == 0 else []),
        "gather": (
            lambda r, k: [r] if r == k else [],
            lambda r, k: [k] if r == 0 or r == k else [],
        ),
        "scatter": (
            lambda r, k: [k] if r == 0 else [],
            lambda r, k: [k] if r == 0 or r == k else [],
        ),
        "send, recv": (
            lambda r, k: [1] if r == 1 and k == 0 else [],
            lambda r, k: [1] if r in (1, 2) and k == 0 else [],
        ),
    }
    drawing = Drawing(880, 400, "Reduce, gather and scatter with rank 0 as root, and one message")
    before_and_after(drawing, kinds)
    colours_of_ranks(drawing)
    for y, line in (
        (130, "reduce, gather: to rank 0"),
        (154, "scatter: from rank 0"),
        (178, "send, recv: rank 1 to rank 2,"),
        (202, "the others do nothing"),
    ):
        drawing.text(716, y, line, size=12, color=QUIET, anchor="start")
    return drawing.svg()


def before_and_after(drawing, kinds):
    """A column for each of `kinds`: the four parts of what each of four ranks has."""
    each = range(4)
    for column, (name, states) in enumerate(kinds.items()):
        left = 92 + column * 158
        drawing.text(left + 65, 44, name, weight="bold")
        for top, state in zip((92, 232), states, strict=True):
            for rank in each:
                for part in each:
                    drawing.chunk(left + rank * 34, top + part * 22, 28, 20, state(rank, part))
        for rank in each:
            drawing.text(left + rank * 34 + 14, 80, f"{rank}", size=12, color=QUIET)
        drawing.line(left + 65, 190, left + 65, 222)
    for top, label in ((76, "rank"), (140, "before"), (280, "after")):
        drawing.text(76, top + 4, label, size=12, color=QUIET, anchor="end")


def colours_of_ranks(drawing):
    for rank, color in enumerate(RANKS):
        drawing.box(92 + rank * 104, 350, 16, 16, color, radius=0)
        drawing.text(116 + rank * 104, 363, f"of rank {rank}", size=12, color=QUIET, anchor="start")
    drawing.chunk(508, 350, 28, 16, range(4))
    drawing.text(544, 363, "the sum of all four", size=12, color=QUIET, anchor="start")


def ring():
    """The chunks of a ring all-reduce of four processes, step by step, each in the colours of what
    is in its sum.
    """
    drawing = Drawing(
        880, 556, "A parameter server, and a ring all-reduce of four processes step by step"
    )
    drawing.text(220, 40, "parameter server", weight="bold")
    drawing.text(660, 40, "ring", weight="bold")
    drawing.box(172, 70, 96, 34, INK)
    drawing.text(220, 92, "server", color="#ffffff", weight="bold")
    for rank, color in enumerate(RANKS):
        x = 76 + rank * 96
        drawing.line(184 + rank * 24, 108, x, 166, tips="both")
        drawing.circle(x, 188, 20, color, f"{rank}")
    drawing.text(220, 240, "all p gradients pass through one link", size=12, color=QUIET)
    places = [(580, 96), (740, 96), (740, 188), (580, 188)]
    for rank, color in enumerate(RANKS):
        drawing.circle(*places[rank], 20, color, f"{rank}")
    drawing.line(604, 96, 714, 96)
    drawing.line(740, 120, 740, 162)
    drawing.line(716, 188, 606, 188)
    drawing.line(580, 164, 580, 122)
    drawing.text(660, 240, "each sends to the next, all links at once", size=12, color=QUIET)

    drawing.line(24, 266, 856, 266, tips="none", color="#d9dfe7")
    drawing.text(353, 296, "reduce-scatter: add what arrives", weight="bold")
    drawing.text(689, 296, "all-gather: copy what arrives", weight="bold")
    held = [
        [{rank} for _ in range(4)] for rank in range(4)
    ]  # [process][chunk]: whose gradients are in the sum
    for step in range(7):
        left = 92 + step * 108 + 12 * (step > 3)
        drawing.text(left + 45, 324, f"round {step}" if step else "start", size=12, color=QUIET)
        came = {}
        for rank in range(4):
            if step:
                sender = (rank - 1) % 4
                part = (sender - step + 1) % 4 if step <= 3 else (sender - step + 5) % 4
                came[rank] = part, held[sender][part] | (held[rank][part] if step <= 3 else set())
        for rank, (part, sources) in came.items():
            held[rank][part] = sources
        for rank in range(4):
            for part in range(4):
                drawing.chunk(left + part * 23, 338 + rank * 40, 20, 28, sorted(held[rank][part]))
        for rank, (part, _) in came.items():
            drawing.box(left + part * 23, 338 + rank * 40, 20, 28, "none", stroke=INK, radius=0)
    for rank, color in enumerate(RANKS):
        drawing.circle(52, 352 + rank * 40, 15, color, f"{rank}")
    drawing.text(
        440,
        530,
        "four chunks per process; colours: whose gradients are in the sum; frame: just received",
        size=12,
        color=QUIET,
    )
    return drawing.svg()


def batch():
    drawing = Drawing(880, 368, "Which samples each rank takes in a step")
    names = ["one process, -b 8", *(f"rank {rank} of 4, -b 2" for rank in range(4))]
    for row, name in enumerate(names):
        y = 92 + row * 42 + 14 * (row > 0)
        drawing.text(
            160, y + 21, name, size=13, anchor="end", weight="bold" if row == 0 else "normal"
        )
        for place in range(16):
            x = 176 + place * 41 + 20 * (place > 7)
            mine = row == 0 or place % 4 == row - 1
            drawing.box(x, y, 36, 32, RANKS[place % 4] if mine else PANEL)
            if mine:
                drawing.text(x + 18, y + 21, f"{place}", size=13, color="#ffffff", weight="bold")
    for step in range(2):
        left = 176 + step * 348
        drawing.text(left + 161, 52, f"step {step + 1}: a global batch of 8", weight="bold")
        drawing.line(left, 70, left + 323, 70, tips="none")
    drawing.text(
        440,
        342,
        "number = position in the shuffled order of the epoch, which is the same on all ranks",
        size=12,
        color=QUIET,
    )
    return drawing.svg()


def strategies():
    drawing = Drawing(
        880,
        436,
        "DataParallel, one process for all GPUs, beside DistributedDataParallel, one for each",
    )
    drawing.text(220, 40, "DataParallel", size=16, weight="bold")
    drawing.text(660, 40, "DistributedDataParallel, Horovod", size=16, weight="bold")
    drawing.box(28, 60, 384, 260, PANEL, radius=10)
    drawing.text(220, 84, "one process, one batch", size=12, color=QUIET)
    drawing.text(660, 84, "four processes, a batch each", size=12, color=QUIET)
    for rank, color in enumerate(RANKS):
        x = 48 + rank * 90  # one process
        drawing.box(x + rank * -15 + 22, 98, 75, 26, color, radius=0)
        drawing.line(x + rank * -15 + 59, 128, x + 39, 166)
        gpu(drawing, x, 172, rank, "model" if rank == 0 else "copy")
        x = 468 + rank * 100  # a process each
        drawing.box(x, 96, 86, 224, PANEL, radius=10)
        drawing.box(x + 8, 106, 70, 26, color, radius=0)
        drawing.line(x + 43, 136, x + 43, 166)
        gpu(drawing, x + 4, 172, rank, "model")
    drawing.text(220, 308, "outputs and gradients", size=12, color=QUIET)
    for rank in range(3):
        drawing.text(511 + rank * 100, 124, "batch", size=13, color="#ffffff", weight="bold")
        drawing.curve(
            f"M{177 + rank * 90},244 C{177 + rank * 90},{284 + rank * 10} 87,{284 + rank * 10} "
            "87,248"
        )
    drawing.text(811, 124, "batch", size=13, color="#ffffff", weight="bold")
    drawing.box(468, 248, 386, 28, "#ffffff", stroke=LINE, radius=14)
    drawing.text(661, 267, "all-reduce of the gradients", size=13)
    for rank in range(4):
        drawing.text(511 + rank * 100, 302, f"rank {rank}", size=12, color=QUIET)
    for y, left, right in (
        (
            350,
            "each step: split the batch, copy the model to every GPU,",
            "each step: a batch of its own, forward,",
        ),
        (
            372,
            "forward in threads, gather the outputs on GPU 0,",
            "backward, and meanwhile the all-reduce;",
        ),
        (394, "backward, add up the gradients on GPU 0,", "each process then takes the same step,"),
        (416, "one optimizer step there", "so that all weights stay equal"),
    ):
        drawing.text(220, y, left, size=13, color=QUIET)
        drawing.text(660, y, right, size=13, color=QUIET)
    return drawing.svg()


def sharding():
    drawing = Drawing(
        880,
        330,
        "What each GPU holds: with DDP all weights, gradients and momentum, with FSDP a share",
    )
    drawing.text(220, 40, "DistributedDataParallel", size=16, weight="bold")
    drawing.text(660, 40, "FSDP (fully_shard)", size=16, weight="bold")
    for rank in range(4):
        for x, sharded in ((28, False), (468, True)):
            x += rank * 100
            drawing.box(x, 60, 86, 170, PANEL, radius=10)
            drawing.text(x + 43, 220, f"rank {rank}", size=12, color=QUIET)
            for row, name in enumerate(("weights", "gradients", "momentum")):
                y = 86 + 42 * row
                drawing.text(x + 43, y - 6, name, size=12, color=QUIET)
                for part in range(4):
                    held = not sharded or part == rank
                    drawing.box(
                        x + 8 + 18 * part,
                        y,
                        16,
                        18,
                        RANKS[part] if held else "#ffffff",
                        stroke="none" if held else "#d9dfe7",
                        radius=2,
                    )
    for y, left, right in (
        (262, "each rank holds the whole", "each rank holds 1/4 of each tensor"),
        (
            284,
            "forward and backward need no weights of others;",
            "all-gather of a block's weights before its forward",
        ),
        (306, "all-reduce of the gradients", "and its backward; reduce-scatter of its gradients"),
    ):
        drawing.text(220, y, left, size=13, color=QUIET)
        drawing.text(660, y, right, size=13, color=QUIET)
    return drawing.svg()


def gpu(drawing, x, y, number, holds):
    drawing.box(x, y, 78, 68, "#ffffff", stroke="#d9dfe7")
    drawing.text(x + 39, y + 26, f"GPU {number}", size=12, color=QUIET)
    drawing.text(x + 39, y + 50, holds, weight="bold")


DRAWINGS = {
    drawing.__name__: drawing
    for drawing in (ranks, collectives, more_collectives, ring, batch, strategies, sharding)
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(drawing())
