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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = "tests/unit_tests/resharding"
FILES = ("planner", "dp_balancing", "copy_services", "refit_cache", "communication_scheduler", "task_segmenter")
FILES += ("workload_packer", "cache_refresh")
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


def _plan_tp(
    param_name: str, src_metadata: Any, dst_metadata: Any, descriptors: list[Any], my_global_rank: int
) -> list[tuple[int, Any, Any]]:
    """What their planner has for one parameter, by our planner, which takes the metadata of all ranks.

    The tests give those of one rank a side; the others of its group have the same.
    """
    from dataclasses import replace

    import tensorbus.megatron

    if not descriptors or my_global_rank not in descriptors[0].dst_dim_ranks:
        return []
    pairs: list[Any] = [([], []) for _ in range(1 + max(descriptors[0].src_dim_ranks + descriptors[0].dst_dim_ranks))]
    for side, meta in enumerate((src_metadata, dst_metadata)):
        group = (descriptors[0].src_dim_ranks, descriptors[0].dst_dim_ranks)[side]
        for rank in group:
            pairs[rank][side].append(
                replace(meta, owner_rank=rank, resolved_name=param_name, tensor_parallel_group_ranks=group)
            )
    rosters = tensorbus.megatron.index_metadata_rosters(pairs)
    plan = tensorbus.megatron.build_plan_from_rosters(*rosters, my_global_rank)
    return [(op.peer_rank, op.peer_slice, op.my_slice) for op in plan.recv_ops]


def pytest_configure() -> None:
    import tensorbus.megatron

    planner = importlib.import_module("megatron.core.resharding.planner")
    planner._plan_tp = _plan_tp  # type: ignore[attr-defined]
    _ours[id(_plan_tp)] = "_plan_tp"

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
        elif found is None and name in ("_needs_mxfp8_conversion", "_setup_mxfp8_transform_on_plan"):
            theirs.add(name)  # imported in the test itself


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
        inside = ", ".join(sorted(theirs)) or "its own objects"
        _results.append((name, "not applicable", f"tests {inside}, of which nothing is replaced; passes"))


def pytest_sessionfinish() -> None:
    Path(os.environ["ANCESTOR_RESULTS"]).write_text(json.dumps(_results))


if __name__ == "__main__":
    lines = run(sys.argv[1])
    for line in lines:
        print(" | ".join(line))
    sys.exit(any(outcome == "failed" for _, outcome, _ in lines))
