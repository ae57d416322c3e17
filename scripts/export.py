"""Write the weights of a checkpoint as safetensors, which needs none of this code to be read.

    python scripts/export.py runs/mine/best.pt weights.safetensors
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from common import checkpoint, flags
from common.processes import fail

parser = flags.Parser(__doc__)
parser.add_argument("checkpoint", type=Path)
parser.add_argument("weights", type=Path, help="the file to write")
args = parser.parse_args()
try:
    from safetensors.torch import save
except ImportError:
    fail("it needs a package: pip install safetensors")
try:
    saved, _ = checkpoint.read(args.checkpoint)
except (OSError, checkpoint.CorruptCheckpoint) as error:
    fail(f"{args.checkpoint}: {getattr(error, 'strerror', None) or error}")
if "shards" in saved:
    fail(f"{args.checkpoint} is in shards: make it whole with scripts/unshard.py first")
if args.weights.exists():
    fail(f"{args.weights} already exists")
try:
    weights = {name: tensor.contiguous().clone() for name, tensor in saved["model"].items()}  # safetensors wants it so
    checkpoint.write(args.weights, save(weights))
except OSError as error:
    fail(f"{args.weights}: {error.strerror}")
