"""Runs the tests of Etha and of Megatron-LM with tensorbus in their place, and prints how each ended, as a table.

``python table.py ETHA MEGATRON``: paths of their checkouts. Tests of a class, and cases of a test, that ended alike are
one line, with their number; what failed has a line for each. The table is written to docs/coming-from.md, too. The exit
status is 1 if a test failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import etha  # noqa: E402
import megatron  # noqa: E402


PAGE = HERE.parents[1] / "docs" / "coming-from.md"
HEAD = "| of | test | cases | outcome | |\n|---|---|---|---|---|\n"
OUTCOMES = ("passed", "not applicable", "failed")


def main(checkouts: list[str]) -> int:
    """Prints the table, and writes it to the page."""
    runs = (("Etha", etha.run), ("Megatron-LM", megatron.run))
    table = HEAD
    print(HEAD, end="")
    counts = ""
    nfailed = 0
    for (name, run), checkout in zip(runs, checkouts, strict=True):
        lines: dict[tuple[str, str, str], list[str]] = {}
        told = run(checkout)
        for test, outcome, why in told:
            file, *inside = test.split("::")
            which = "::".join(inside) if outcome == "failed" or not inside else inside[0].partition("[")[0]
            apart = why if why.startswith("fails") else ""
            lines.setdefault((", ".join(filter(None, (file, which))), outcome, apart), []).append(why)
        for (test, outcome, _), whys in lines.items():
            count = len(whys) if ", " in test else ""
            line = f"| {name} | {test} | {count} | {outcome} | {max(whys, key=len)} |\n"
            print(line, end="", flush=True)
            table += line
        numbers = [sum(each == outcome and "::" in test for test, each, _ in told) for outcome in OUTCOMES]
        commit = subprocess.run(
            ["git", "-C", checkout, "log", "-1", "--format=%h of %cd", "--date=format:%B %Y"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        inside = ", ".join(f"{n} {outcome}" for n, outcome in zip(numbers, OUTCOMES, strict=True))
        counts += f"{name} at {commit}: {inside}.\n"
        nfailed += numbers[-1]
    print(f"\n{counts}", end="")
    text = PAGE.read_text()
    before, _, after = text.partition(HEAD)
    after = after[re.match(r"(\|.*\n)*\n?(.* at .*: \d+ passed, .*\n)*", after).end() :]  # type: ignore[union-attr]
    PAGE.write_text(f"{before}{table}\n{counts}{after}")
    return 1 if nfailed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: table.py ETHA MEGATRON (paths of their checkouts)")
    sys.exit(main([str(Path(path).resolve()) for path in sys.argv[1:]]))
