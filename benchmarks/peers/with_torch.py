"""One of the processes of PyTorch's DistributedDataParallel with Gloo: NET BATCH STEPS.

Each rank takes its share of every shuffled batch by index from arrays in memory, which is faster than a ``DataLoader``. Losses
and metrics are summed as Keras sums them, and meet once an epoch.
"""

import itertools
import os
import sys

import torch
import torch.distributed as dist
from rows import rows
from torch.nn.parallel import DistributedDataParallel
from torch_nets import build
from turns import Turns


def main():
    turns = Turns()
    net, batch, steps = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    module, make_optimizer = build(net)
    model = DistributedDataParallel(module)
    optimizer, data, shuffling = make_optimizer(model.parameters()), arrays(net, batch * steps), torch.Generator()
    for epoch in itertools.count():
        if epoch:
            turns.wait()
        train(model, optimizer, data, shares(batch, batch * steps, shuffling), has_top_5=net == "reuters")
        if epoch:
            turns.done(steps)
        else:
            turns.ready(sum(parameter.numel() for parameter in model.parameters()))


def arrays(net, count):
    x, y = rows(net, count)
    x = torch.from_numpy(x.transpose(0, 3, 1, 2).copy() if x.ndim == 4 else x)
    return x if x.is_floating_point() else x.long(), torch.from_numpy(y).long()


def train(model, optimizer, data, batches, has_top_5):
    """One epoch; returns the loss and the shares of right answers."""
    x, y = data
    criterion, totals = torch.nn.CrossEntropyLoss(), torch.zeros(3)
    for chosen in batches:
        labels = y[chosen]
        optimizer.zero_grad()
        logits = model(x[chosen])
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            totals[0] += loss * len(chosen)
            totals[1] += (logits.argmax(1) == labels).sum()
            if has_top_5:
                totals[2] += (logits.topk(5).indices == labels[:, None]).any(1).sum()
    dist.all_reduce(totals)
    return (totals / len(x)).tolist()


def shares(batch, count, shuffling):
    """For each batch, the numbers of this rank's rows; the order of the rows is the same on all ranks."""
    order = torch.randperm(count, generator=shuffling)
    return order.view(-1, dist.get_world_size(), batch // dist.get_world_size())[:, dist.get_rank()]


if __name__ == "__main__":
    main()
