"""Weights from a model on two ranks to a copy on each of them, by tensorbus."""

import torch.distributed as dist
from from_megatron_model import make, report
from tensorbus.megatron import clear_all_caches, swap_model_weights

dist.init_process_group("gloo")
source, target = make()
for version in 1, 2, 3:
    source.fill(version)
    swap_model_weights(source, target, refit_method="gloo")
    report(target, version)
clear_all_caches()
dist.destroy_process_group()
