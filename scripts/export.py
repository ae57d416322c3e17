"""Export the weights of a checkpoint as safetensors, which can be read without this code.

The file's metadata has the class names and the like, as JSON.

    python scripts/export.py runs/mine/best.pt weights.safetensors

If the checkpoint has an average of the weights (an EMA in torch's AveragedModel), it exports that,
and says so. --part picks another part, such as a discriminator, or an average that is not an
AveragedModel. --init-from can read the file.
"""

import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from common import checkpoint, flags
from common.errors import InputError, in_one_line, show
from common.files import replace, write_beside
from common.process import launch
from common.weights import is_state_dict, weights_in


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="the file to read")
    parser.add_argument("weights", type=Path, help="the file to write")
    parser.add_argument(
        "--part", help="part of the checkpoint to export (default: an average, or model)"
    )
    args = parser.parse_args()
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise InputError("safetensors is not installed: pip install safetensors") from error
    try:
        saved, _ = checkpoint.read(args.checkpoint)
    except (OSError, checkpoint.CorruptCheckpoint) as error:
        raise InputError(f"{args.checkpoint}: {checkpoint.reason_of(error)}") from error
    if args.weights.exists():
        raise InputError(f"{args.weights} already exists")
    if not is_state_dict(saved.get("model")):
        raise InputError(f"{args.checkpoint} has no model (a dict of tensors by name)")
    part, weights = weights_in(saved)
    if args.part not in (None, part):
        part = args.part
        weights = saved.get(part)
        if not is_state_dict(weights):
            raise InputError(f"--part {part}: {args.checkpoint} has no such dict of tensors")
    # safetensors does not support views or other memory formats.
    weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    try:
        metadata = {name: json.dumps(value) for name, value in saved.get("metadata", {}).items()}
    # The file is untrusted: it may hold anything.
    except Exception as error:
        raise InputError(f"{args.checkpoint}, metadata: {in_one_line(error)}") from error
    try:
        partial = write_beside(args.weights, lambda file: save_file(weights, file.name, metadata))
        replace(partial, args.weights)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{args.weights}: {checkpoint.reason_of(error)}") from error
    # An average has tensors of the same shapes.
    shapes = shapes_of(weights)
    others = [name for name, value in saved.items() if name != part and shapes_of(value) == shapes]
    hint = "".join(f"; --part {name} has weights of the same shapes" for name in others)
    show(f"{args.weights} has the weights of {part}{hint}")


def shapes_of(value) -> list[tuple[int, ...]] | None:
    """The shapes of a dict of tensors; None for anything else."""
    return sorted(tuple(part.shape) for part in value.values()) if is_state_dict(value) else None


if __name__ == "__main__":
    with launch.plain_exits():
        main()
