"""Make one file of a checkpoint that imagenet/fsdp.py --sharded-checkpoint has saved: any recipe can resume from it.

    python scripts/unshard.py runs/mine/last.pt whole.pt
"""

import io
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from common import checkpoint, flags, sharded
from common.processes import fail
from imagenet.shards import Shard, read

parser = flags.Parser(__doc__)
parser.add_argument("checkpoint", type=Path)
parser.add_argument("whole", type=Path, help="the file to write")
args = parser.parse_args()
try:
    saved, _ = read(args.checkpoint)
except (OSError, checkpoint.CorruptCheckpoint) as error:
    fail(f"{args.checkpoint}: {getattr(error, 'strerror', None) or error}")
if "shards" not in saved:
    fail(f"{args.checkpoint} is one file already")
if args.whole.exists():
    fail(f"{args.whole} already exists")
folder = args.checkpoint.parent / saved.pop("shards")["folder"]
there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in there.items()}
warnings.simplefilter("ignore")  # torch's, that there is only one process
dcp.load(tensors, checkpoint_id=folder, no_dist=True)
for name in ("model", "optimizer"):
    saved[name] = sharded.leaves(saved[name], lambda _, leaf: tensors[leaf.name] if isinstance(leaf, Shard) else leaf)
torch.save(saved, buffer := io.BytesIO())
try:
    checkpoint.write(args.whole, buffer.getbuffer())
except OSError as error:
    fail(f"{args.whole}: {error.strerror}")
