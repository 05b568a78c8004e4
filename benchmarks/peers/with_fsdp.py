"""One of the processes of PyTorch's FSDP2 (``fully_shard``) with Gloo: BLOCKS WIDTH HEADS LENGTH ROWS.

Rank 0 prints, as JSON: bytes of parameters and of the optimizer's tensors in this process between two steps, the collectives of a step,
and its seconds.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

BLOCKS, WIDTH, HEADS, LENGTH, ROWS = map(int, sys.argv[1:])
STEPS = 4


class Block(nn.Module):
    """The block of ``sharded.py``."""

    def __init__(self):
        super().__init__()
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        self.parts = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x):
        """Return the results for ``x``, ``(ROWS, LENGTH, WIDTH)``."""
        query, key, value = (
            part.view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.parts["qkv"](x).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.parts["out"](mixed.transpose(1, 2).reshape(-1, LENGTH, WIDTH))
        return x + self.parts["down"](functional.gelu(self.parts["up"](x)))


def local_bytes(tensors):
    """Return the bytes of tensors in this process."""
    own = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.numel() * x.element_size() for x in own)


def main():
    """Train, and print what was measured."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(ROWS, LENGTH, WIDTH)

    def step():
        optimizer.zero_grad()
        functional.mse_loss(model(x), x).backward()
        optimizer.step()

    step()
    with CommDebugMode() as found:
        step()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    slots = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    if dist.get_rank() == 0:
        counts = {str(name): count for name, count in found.get_comm_counts().items()}
        at_rest = local_bytes(model.parameters()), local_bytes(slots)
        print(json.dumps({"bytes": at_rest, "collectives": counts, "seconds": statistics.median(seconds)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
