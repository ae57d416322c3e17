"""What the ranks communicated last, written before the watchdog ends them, for torchfrtrace."""

import os
import pickle
from pathlib import Path

import torch


def writer(folder: str | None, rank: int, world_size: int, device: torch.device):
    """A function that writes the last collectives to `folder`/collectives-RANK.

    None unless TORCH_FR_BUFFER_SIZE is set, which lets torch record them.
    """
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        return None

    def write():
        recorder = torch._C._distributed_c10d
        dump = recorder._dump_fr_trace if device.type == "cpu" else recorder._dump_nccl_trace
        trace = pickle.loads(dump())
        # That of Gloo is not what torchfrtrace reads.
        ranks = str(list(range(world_size)))
        trace["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        with open(Path(folder or ".", f"collectives-{rank}"), "wb") as file:
            pickle.dump(trace, file)

    return write
