"""An engine with tensor parallelism: torchrun --standalone --nproc-per-node 2 engine.py. The trainer is trainer.py.

It gets each version whole or not at all. When it loses the trainer, it keeps the version that it has, says whom it has
lost, and waits for the trainer to come back.
"""

import argparse
import time

import torch
import torch.distributed as dist
from model import Model, is_version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tensorbus as tb

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="unix:/tmp/tensorbus-tutorial.sock")
parser.add_argument("--last", type=int, default=5)
options = parser.parse_args()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Model()
for block in model.blocks:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
step = torch.zeros(1, dtype=torch.int64)


def meet(bus: tb.Bus, batch: tb.Batch) -> tb.Pair:
    """Meets the trainer, and adds the tensors that come from there."""
    pair = bus.pair("weights", "trainer", timeout=120.0)
    batch.add_module(pair, model, mesh=mesh)  # embeddings and norms are plain tensors, the same on all ranks
    batch.add(pair, "step", step, layout=f"mesh={bus.size} place=Replicate")
    return pair


with tb.join(options.url, group="engine", timeout=120.0) as bus:
    batch = bus.batch("weights", commit="shadow")
    pair = meet(bus, batch)
    while step.item() < options.last:
        try:
            batch.recv(timeout=120.0)
        except tb.PeerLost as lost:
            whole = is_version(model, step.item())
            print(
                f"engine {bus.index} at {time.time():.3f}: lost {lost.group} {lost.seat}; "
                f"version {step.item()} is {'whole' if whole else 'BROKEN'}: {lost}",
                flush=True,
            )
            batch.remove_pair(pair)
            pair.close()
            pair = meet(bus, batch)
            continue
        equal = "equal" if is_version(model, step.item()) else "DIFFERENT"
        print(f"engine {bus.index}: version {step.item()}, {equal}", flush=True)
dist.destroy_process_group()
