"""Weights from a model on two ranks to a copy on each of them, by tensorbus."""

import torch.distributed as dist
from from_megatron_model import make, report
from tensorbus.megatron import clear_refits, refit

dist.init_process_group("gloo")
source, target = make()
for version in 1, 2, 3:
    source.fill(version)
    refit(source, target, timeout=60.0)
    report(target, version)
clear_refits()
dist.destroy_process_group()
