"""Samples of C and Python in the documents are excerpts of files that tests run.

usage: excerpts.py

Before a fenced block of kind `c` or `python` stands <!-- from PATH -->, and each line of the block is in that file, in
this order; spaces and comments may differ, and a line that is `...` stands for any lines. Or there stands
<!-- not run: WHY -->.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^(?:<!-- (from|not run:) (.+?) -->\n+)?```(c|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def lines(text: str, kind: str) -> list[str]:
    """The lines without spaces and comments."""
    comment = r"/\*.*?\*/|//[^\n]*" if kind == "c" else r"(?<![\"'\w])#[^\n]*"
    bare = re.sub(comment, "", text, flags=re.DOTALL)
    return [line for line in (re.sub(r"\s+", "", line) for line in bare.splitlines()) if line not in ("", "...")]


def missing(block: list[str], source: list[str]) -> str | None:
    """The first line of the block that is not in the file behind the lines before it."""
    at = 0
    for line in block:
        if line not in source[at:]:
            return line
        at = source.index(line, at) + 1
    return None


def main() -> int:
    """Looks at all documents."""
    count, failures = 0, []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        text = page.read_text()
        for match in BLOCK.finditer(text):
            where = f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
            kind, source, language, block = match.groups()
            if kind is None:
                failures.append(f"{where}: a sample that no test runs; write <!-- from PATH --> before it")
            elif kind == "from":
                count += 1
                line = missing(lines(block, language), lines((ROOT / source).read_text(), language))
                if line is not None:
                    failures.append(f"{where}: {source} does not have '{line}', or not in this place")
    print("\n".join(failures))
    print(f"{count} excerpts, {len(failures)} failures")
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
