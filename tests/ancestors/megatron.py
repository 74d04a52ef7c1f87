"""Megatron-LM's unit tests of resharding, with tensorbus's planner and copy service in the place of theirs.

``python megatron.py CHECKOUT`` prints a line for each test. The tests are read from the checkout and run as they are;
only the names that they import lead to tensorbus. As a plug-in of pytest this file changes these names, and tells of
each test whether it gets to anything of ours.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = "tests/unit_tests/resharding"
FILES = ("planner", "dp_balancing", "copy_services", "refit_cache", "communication_scheduler", "task_segmenter")
FILES += ("workload_packer", "cache_refresh")
THEIR_OWN = {
    "_build_descriptors_for_param": "a step inside their planner; ours has layouts instead",
    "_PlanCacheKey": "the key of their cache of plans; refit keeps what it has made by the models themselves",
    "_needs_mxfp8_conversion": "theirs decides it, and ours calls theirs",
    "_setup_mxfp8_transform_on_plan": "theirs decides it, and ours calls theirs",
    "get_refit_tensor_dict": "their cache of a module's tensors, which their executor uses with our service, too",
    "CommunicationScheduler": "inside their NVSHMEM service",
    "TaskSegmenter": "inside their NVSHMEM service",
    "WorkloadPacker": "inside their NVSHMEM service",
    "MegatronModule": "their modules",
    "execute_reshard_plan": "their executor, with an imitation of a service",
    "build_centralized_reshard_plan": "their deprecated name of the planner, with an imitation of it",
}
NOT_OURS = {"test_mxfp8_refit.py": "needs a GPU, and Transformer Engine or FlashInfer"}

# What takes the place of what: their module and name, and ours in tensorbus.megatron.
REPLACED = (
    ("megatron.core.resharding.planner", "build_plan_from_rosters", "build_plan_from_rosters"),
    ("megatron.core.resharding.planner", "index_metadata_rosters", "index_metadata_rosters"),
    ("megatron.core.resharding.refit", "build_local_reshard_plan", "build_local_reshard_plan"),
    ("megatron.core.resharding.copy_services.base", "CopyService", "CopyService"),
    ("megatron.core.resharding.copy_services.base", "match_local_ops_by_task_id", "match_local_ops_by_task_id"),
    ("megatron.core.resharding.copy_services.nixl_copy_service", "NixlCopyService", "CopyService"),
)


def run(checkout: str) -> list[tuple[str, str, str]]:
    """Runs them; of each test its name, "passed", "failed" or "not applicable", and why."""
    files = [f"{FOLDER}/test_{name}.py" for name in FILES]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        paths = [str(HERE), str(HERE.parents[1] / "python"), str(Path(checkout).resolve())]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "ANCESTOR_RESULTS": str(results)}
        # The plug-in has another name than the package whose tests it runs.
        Path(folder, "with_tensorbus.py").write_text(Path(__file__).read_text())
        env["PYTHONPATH"] = os.pathsep.join([folder, *paths[1:]])
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
        command += ["-p", "with_tensorbus", "-o", "addopts=", *files]
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=900, check=False)
        if not results.exists():
            raise RuntimeError(f"pytest did not begin:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found = [(str(a), str(b), str(c)) for a, b, c in json.loads(results.read_text())]
    found += _run_models(checkout)
    there = [name for name in NOT_OURS if Path(checkout, FOLDER, name).exists()]
    return found + [(name, "not applicable", NOT_OURS[name]) for name in there]


def _run_models(checkout: str) -> list[tuple[str, str, str]]:
    """Those of megatron_swap.py, which imports their package, not this file."""
    command = [sys.executable, str(HERE / "megatron_swap.py"), checkout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3900, check=False)
    lines = [tuple(line.split(" | ", 2)) for line in done.stdout.splitlines() if line.startswith("test_")]
    if not lines:
        raise RuntimeError(f"{command} has run nothing:\n{done.stderr[-3000:]}")
    return [(name, outcome, why) for name, outcome, why in lines]


# ---- The plug-in ----------------------------------------------------------------------------------------------------

_ours: dict[int, str] = {}
_reached: dict[str, tuple[set[str], set[str]]] = {}
_results: list[tuple[str, str, str]] = []


def _plan(sources: Iterable[Any], targets: Iterable[Any], rank: int) -> list[tuple[int, Any, Any]]:
    """What a rank receives by our planner, from metadata with the ranks that own it."""
    from dataclasses import replace

    import tensorbus.megatron

    metas = [list(sources), list(targets)]
    pairs: list[Any] = [([], []) for _ in range(1 + max(meta.owner_rank for side in metas for meta in side))]
    for side, its in enumerate(metas):
        for meta in its:
            pairs[meta.owner_rank][side].append(replace(meta, resolved_name="parameter"))
    plan = tensorbus.megatron.build_plan_from_rosters(*tensorbus.megatron.index_metadata_rosters(pairs), rank)
    return [(op.peer_rank, op.peer_slice, op.my_slice) for op in plan.recv_ops]


def _owned(meta: Any, ranks: Iterable[int], **changed: Any) -> list[Any]:
    """The metadata of several ranks that have the same: the tests give those of one."""
    from dataclasses import replace

    return [replace(meta, owner_rank=rank, **changed) for rank in ranks]


def _plan_tp(
    param_name: str, src_metadata: Any, dst_metadata: Any, descriptors: list[Any], my_global_rank: int
) -> list[tuple[int, Any, Any]]:
    """What their planner has for a parameter that is cut."""
    if not descriptors or my_global_rank not in descriptors[0].dst_dim_ranks:
        return []
    groups = descriptors[0].src_dim_ranks, descriptors[0].dst_dim_ranks
    sides = zip((src_metadata, dst_metadata), groups, strict=True)
    return _plan(*(_owned(meta, group, tensor_parallel_group_ranks=group) for meta, group in sides), my_global_rank)


def _finalize_dp_transfers(
    param_name: str, src_metadata: Any, dst_metadata: Any, my_global_rank: int
) -> list[tuple[int, Any, Any]]:
    """What their planner has for a parameter that is not cut: all replicas of the target get it from the source given.

    Where both sides have the same replicas, each of them has the source as well. In slices, all of a dim is None.
    """
    replicas = dst_metadata.data_parallel_group_ranks
    if my_global_rank not in replicas:
        return []
    is_shared = src_metadata.data_parallel_group_ranks == replicas
    sources = _owned(src_metadata, replicas if is_shared else [src_metadata.owner_rank])
    whole = tuple(slice(0, size) for size in dst_metadata.shape)
    found = _plan(sources, _owned(dst_metadata, replicas), my_global_rank)
    assert all(slices == whole for _, *both in found for slices in both)
    return [(rank, *[tuple(slice(None) for _ in whole)] * 2) for rank, _, _ in found]


def _select_src_metadata_balanced(src_meta_list: list[Any], dst_metadata: Any, dst_rank: int) -> Any:
    """Whom a rank of the target gets a parameter from: of our plan, the rank of the first piece.

    A plan needs all ranks. Those of tensor-parallel groups that the test leaves out have the same as the others. The
    target's replicas are those of its metadata; where ``dst_rank`` is beyond them, there are more groups of as many.
    """
    groups = [meta.expert_parallel_group_ranks or [] for meta in (src_meta_list[0], dst_metadata)]
    has_experts = len(groups[0]) == len(groups[1]) > 0  # else names tell experts apart

    def peer(meta: Any, rank: int) -> Any:
        shifted = [
            [rank + each - meta.owner_rank for each in group or []]
            for group in (meta.tensor_parallel_group_ranks, meta.expert_parallel_group_ranks)
        ]
        tp = meta.tensor_parallel_group_ranks if rank in meta.tensor_parallel_group_ranks else shifted[0]
        groups = {"tensor_parallel_group_ranks": tp, "expert_parallel_group_ranks": shifted[1]}
        return _owned(meta, [rank], is_ep=has_experts, **groups)[0]

    given = {meta.owner_rank: meta for meta in src_meta_list}
    others = {rank: meta for meta in src_meta_list for rank in meta.tensor_parallel_group_ranks if rank not in given}
    sources = [peer(meta, rank) for rank, meta in (given | others).items()]
    replicas = set(dst_metadata.data_parallel_group_ranks)
    if dst_rank > max(replicas):
        replicas = set(range(-(-(dst_rank + 1) // len(replicas)) * len(replicas)))
    firsts = [peer(dst_metadata, rank) for rank in sorted(replicas | {dst_rank})]
    targets = {rank: peer(meta, rank) for meta in firsts for rank in meta.tensor_parallel_group_ranks}
    first, _, _ = _plan(sources, targets.values(), dst_rank)[0]
    return given.get(first) or others[first]


def pytest_configure() -> None:
    import tensorbus.megatron

    for module_name, function in (
        ("planner", _plan_tp),
        ("planner", _finalize_dp_transfers),
        ("utils", _select_src_metadata_balanced),
    ):
        name = function.__name__ if module_name == "planner" else "select_src_metadata_balanced"
        setattr(importlib.import_module(f"megatron.core.resharding.{module_name}"), name, function)
        _ours[id(function)] = name

    for module_name, name, our_name in REPLACED:
        ours = getattr(tensorbus.megatron, our_name)
        setattr(importlib.import_module(module_name), name, ours)
        _ours[id(ours)] = our_name


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _reach(function: Any, ours: set[str], theirs: set[str], seen: set[int]) -> None:
    """Follows the names in a test, and in the functions of its file that it calls."""
    if id(function) in seen:
        return
    seen.add(id(function))
    for name in _names(function.__code__):
        found = function.__globals__.get(name)
        if id(found) in _ours:
            ours.add(name)
        elif isinstance(found, types.FunctionType) and found.__module__ == function.__module__:
            _reach(found, ours, theirs, seen)
        elif getattr(found, "__module__", "").startswith("megatron."):
            theirs.add(name)
        elif found is None and name in THEIR_OWN:
            theirs.add(name)  # imported in the test itself, or an attribute


def pytest_runtest_setup(item: Any) -> None:
    ours: set[str] = set()
    theirs: set[str] = set()
    _reach(item.function, ours, theirs, set())
    _reached[item.nodeid] = ours, theirs - {"ParameterMetadata", "SendOp", "RecvOp", "ReshardPlan", "TransferOp"}


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.passed:
        return
    ours, theirs = _reached[report.nodeid]
    name = report.nodeid.removeprefix(f"{FOLDER}/")
    if not report.passed:
        _results.append((name, "failed", str(report.longrepr).strip().splitlines()[-1]))
    elif ours:
        _results.append((name, "passed", f"through {', '.join(sorted(ours))}"))
    else:
        inside = next((why for part, why in THEIR_OWN.items() if part in theirs), f"tests {sorted(theirs)}")
        _results.append((name, "not applicable", f"{inside}; passes"))


def pytest_sessionfinish() -> None:
    Path(os.environ["ANCESTOR_RESULTS"]).write_text(json.dumps(_results))


if __name__ == "__main__":
    lines = run(sys.argv[1])
    for line in lines:
        print(" | ".join(line))
    sys.exit(any(outcome == "failed" for _, outcome, _ in lines))
