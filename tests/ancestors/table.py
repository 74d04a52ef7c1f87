"""Runs the tests of Etha and of Megatron-LM with tensorbus in their place, and prints how each ended, as a table.

``python table.py ETHA MEGATRON``: paths of their checkouts. Tests of a class, and cases of a test, that ended alike are
one line, with their number; what failed has a line for each. The exit status is 1 if one failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import etha  # noqa: E402
import megatron  # noqa: E402


def main(checkouts: list[str]) -> int:
    """Prints the table."""
    runs = (("Etha", etha.run), ("Megatron-LM", megatron.run))
    nfailed = 0
    print("| of | test | cases | outcome | |\n|---|---|---|---|---|")
    for (name, run), checkout in zip(runs, checkouts, strict=True):
        lines: dict[tuple[str, str, str], list[str]] = {}
        for test, outcome, why in run(checkout):
            file, *inside = test.split("::")
            which = "::".join(inside) if outcome == "failed" or not inside else inside[0].partition("[")[0]
            apart = why if why.startswith("fails") else ""
            lines.setdefault((", ".join(filter(None, (file, which))), outcome, apart), []).append(why)
            nfailed += outcome == "failed"
        for (test, outcome, _), whys in lines.items():
            count = len(whys) if ", " in test else ""
            print(f"| {name} | {test} | {count} | {outcome} | {max(whys, key=len)} |", flush=True)
    return 1 if nfailed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: table.py ETHA MEGATRON (paths of their checkouts)")
    sys.exit(main([str(Path(path).resolve()) for path in sys.argv[1:]]))
