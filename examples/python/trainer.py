"""A trainer with FSDP2: torchrun --standalone --nproc-per-node 4 trainer.py. The engine is engine.py.

After a rank was lost, start it again with --first and the version that comes next.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from model import Model, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tensorbus as tb

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="unix:/tmp/tensorbus-tutorial.sock")
parser.add_argument("--first", type=int, default=1)
parser.add_argument("--last", type=int, default=5)
parser.add_argument("--pause", type=float, default=1.0, help="seconds that a step of training takes")
options = parser.parse_args()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)

with tb.join(options.url, group="trainer", timeout=120.0) as bus:  # its seat is its rank in torch.distributed
    pair = bus.pair("weights", "engine")  # every tensor brings its own layout
    batch = bus.batch("weights")
    batch.add_module(pair, model)
    step = torch.zeros(1, dtype=torch.int64)
    batch.add(pair, "step", step, layout=f"mesh={bus.size} place=Replicate")
    for number in range(options.first, options.last + 1):
        time.sleep(options.pause)
        load(model, number)
        step.fill_(number)
        batch.send(timeout=120.0)
        print(f"trainer {bus.index} (process {os.getpid()}): sent version {number}", flush=True)
dist.destroy_process_group()
