"""Megatron-LM's resharding and ours side by side, on CPU processes: planning, and moving weights.

    ./dev test torch -k nothing   # makes build/torch-venv, once
    build/torch-venv/bin/python bench/python/megatron_peers.py [--mib 512] [--tensors 300] [--rounds 5]

Planning is one rank's part of it, for 64 and 256 ranks, half of which send (TP8) to the other half (TP4), in processor
time. It begins with the rank's metadata and the messages of all ranks, which ``build_local_reshard_plan`` of either
exchanges, and ends with the operations; the exchange itself, in which a rank waits for others, is left out. A second
line has ``build_plan_from_rosters`` alone, which gets the metadata of all ranks as objects of Python. Moving is by
``swap_model_weights`` with their gloo service, with ours, and by our ``refit``, from four ranks to four others: one
tensor, and a model of many. Both sides have columns, the source in two stripes (partition_stride 2). All of it is in
one run, on the same tensors, which are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pickle
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python"), str(HERE.parents[1] / "python" / "tests_torch")]
warnings.simplefilter("ignore")

import megatron_models  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.resharding import planner as their_planner  # noqa: E402
from megatron.core.resharding import refit as their_refit  # noqa: E402

import tensorbus.megatron as tm  # noqa: E402
from tensorbus.megatron import _planner  # noqa: E402

# ---- Planning -------------------------------------------------------------------------------------------------------


def metadata(nranks: int, tensors: int) -> list[tuple[list[Any], list[Any]]]:
    """Of ranks 0, 1, ...: the first half has the source, in TP8, the second half the target, in TP4."""
    found = []
    half = nranks // 2
    for rank in range(nranks):
        is_source = rank < half
        tp, base = (8, 0) if is_source else (4, half)
        first = base + (rank - base) // tp * tp
        group = list(range(first, first + tp))
        copies = list(range(base + (rank - base) % tp, base + half, tp))
        metas = []
        for i in range(tensors):
            shape = [4096, 4096] if i % 10 else [4096]
            if i % 10:
                shape[i % 2] //= tp
            metas.append(
                tm.ParameterMetadata(
                    name=f"layer.{i}",
                    shape=tuple(shape),
                    dtype=torch.bfloat16,
                    element_size=2,
                    is_tp=bool(i % 10),
                    partition_dim=i % 2,
                    partition_stride=2 if i % 10 == 4 else 1,
                    owner_rank=rank,
                    tensor_parallel_group_ranks=group,
                    data_parallel_group_ranks=copies,
                    resolved_name=f"layer.{i}",
                )
            )
        found.append((metas, []) if is_source else ([], metas))
    return found


def seconds(function: Any, rounds: int) -> float:
    """The processor time of a call that waits for nobody, the median of several."""
    taken = []
    for _ in range(rounds):
        begin = time.process_time()
        function()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def compare_planning(tensors: int, rounds: int) -> None:
    """Prints how long one rank plans, theirs and ours: from messages to the plan, and the function that both have."""
    for nranks in 64, 256:
        gathered = metadata(nranks, tensors)
        rosters = their_planner.index_metadata_rosters(gathered)
        mine, rank = gathered[-1], nranks - 1
        messages = [pickle.dumps(pair) for pair in gathered]
        our_messages = [pickle.dumps(tuple(map(_planner.tell, pair))) for pair in gathered]

        def plan_theirs(mine: Any = mine, rank: int = rank, messages: Any = messages) -> Any:
            pickle.dumps(mine)
            found = their_planner.index_metadata_rosters([pickle.loads(each) for each in messages])
            return their_planner.build_plan_from_rosters(*found, rank)

        def plan_ours(mine: Any = mine, rank: int = rank, messages: Any = our_messages) -> Any:
            pickle.dumps(tuple(map(_planner.tell, mine)))
            return _planner.plan_from_told([pickle.loads(each) for each in messages], rank, *mine)

        for what, theirs, ours in (
            ("from messages", plan_theirs, plan_ours),
            (
                "build_plan_from_rosters",
                lambda r=rosters, n=rank: their_planner.build_plan_from_rosters(*r, n),
                lambda r=rosters, n=rank: tm.build_plan_from_rosters(*r, n),
            ),
        ):
            check_plans(theirs(), ours())
            took = seconds(theirs, rounds), seconds(ours, rounds)
            print(f"plan, {nranks} ranks, {tensors} tensors, {what}: Megatron {took[0] * 1e3:.1f} ms", end="")
            print(f", tensorbus {took[1] * 1e3:.2f} ms ({took[0] / took[1]:.0f} times)", flush=True)


def check_plans(theirs: Any, ours: Any) -> None:
    """Fails unless both plans write the same elements of the same parameters."""
    written = []
    for plan in theirs, ours:
        sizes: dict[str, int] = {}
        for op in plan.recv_ops:
            spans = [span.stop - span.start for span in op.my_slice if span.stop is not None]
            whole = 4096 ** op.my_slice.count(slice(None))
            sizes[op.param_name] = sizes.get(op.param_name, 0) + math.prod(spans) * whole
        written.append(sizes)
    assert written[0].keys() == written[1].keys()
    assert all(written[0][name] == written[1][name] for name in written[0]), "the plans differ"


# ---- Moving ---------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Weights whose columns are cut over four ranks, as Megatron's layers say it."""

    def __init__(self, tp: Any, dp: Any, rank: int, stride: int, count: int, side: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=None)
        self.pg_collection = SimpleNamespace(tp=tp, dp=dp, ep=None, pp=None, expt_tp=None)
        stripes = [stripe.chunk(4)[rank] for stripe in torch.arange(side).chunk(stride)]
        self.whole = torch.arange(side)[:, None] * 7 + torch.cat(stripes)[None, :]  # of all weights, before versions
        for i in range(count):
            weight = torch.nn.Parameter(torch.full(self.whole.shape, -1.0), requires_grad=False)
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 1, stride
            self.register_parameter(f"w{i}", weight)

    def expected(self, version: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every weight, with what it has to be."""
        for i, weight in enumerate(self.parameters()):
            yield weight, (self.whole + i + version).remainder(8191).float()


def move(rank: int, count: int, side: int, rounds: int) -> None:
    """Ranks 0 to 3 have the source, 4 to 7 the target."""
    everyone = [dist.new_group(list(range(first, first + 4))) for first in (0, 4)]
    copies = [dist.new_group([i]) for i in range(8)][rank]
    model = Model(everyone[rank // 4], copies, rank % 4, 2 if rank < 4 else 1, count, side)
    source, target = (model, None) if rank < 4 else (None, model)
    name = f"{count * side * side * 4 >> 20} MiB in {count} tensors"
    service = tm.CopyService(timeout=120.0)
    made = tm.Refit(source, target, timeout=120.0)
    gloo = their_refit.get_or_create_service("gloo")
    ways = {
        "Megatron, gloo": lambda: their_refit.swap_model_weights(source, target, refit_method=gloo),
        "Megatron, CopyService of tensorbus": lambda: their_refit.swap_model_weights(
            source, target, refit_method=service
        ),
        "refit of tensorbus": made.run,
    }
    taken: dict[str, list[float]] = {}
    for version in range(1, rounds + 2):
        for way, function in ways.items():
            for weight, wanted in model.expected(version):
                weight.copy_(wanted if rank < 4 else torch.tensor(-1.0))
            dist.barrier()
            begin = time.perf_counter()
            function()
            dist.barrier()
            if version > 1:  # the first one plans
                taken.setdefault(way, []).append(time.perf_counter() - begin)
            for weight, wanted in model.expected(version):
                assert torch.equal(weight, wanted), (way, version)
    made.close()
    service.close()
    their_refit.clear_all_caches()
    if rank == 0:
        medians = {way: statistics.median(each) for way, each in taken.items()}
        first = medians["Megatron, gloo"]
        for way, median in medians.items():
            rate = count * side * side * 4 / median / 1e9
            print(
                f"move, {name}: {way} {median * 1e3:.0f} ms, {rate:.2f} GB/s ({first / median:.1f} times)", flush=True
            )
    dist.barrier()


def job(folder: str, rank: int, options: argparse.Namespace) -> None:
    """One of the eight processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=8)
    side = int((options.mib * 2**18) ** 0.5) // 16 * 16
    small = int((options.mib * 2**18 / options.tensors) ** 0.5) // 16 * 16
    with megatron_models.without_gpu(), contextlib.suppress(KeyboardInterrupt):
        move(rank, 1, side, options.rounds)
        move(rank, options.tensors, small, options.rounds)
    dist.destroy_process_group()


def main() -> int:
    """Plans in this process, then moves weights between eight."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=512, help="of the weights, in all")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    compare_planning(options.tensors, min(3, options.rounds))
    sys.stdout.flush()
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(8):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    job(folder, rank, options)
                    code = 0
                except BaseException as error:
                    print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
