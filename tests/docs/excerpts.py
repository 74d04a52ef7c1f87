"""Every sample in the documents is run by a test, or says why not.

usage: excerpts.py

Each fenced block has a kind. samples.py runs `console` and `sh`; `text` is a picture, a formula, or a sentence without
a command. Before any other block, and before one of these kinds that is not run there, stands one of

  <!-- from PATH -->        each line of the block is in that file, in this order; spaces and comments may differ, and a
                            line that is `...` stands for any lines
  <!-- checked by PATH -->  that test reads the block from this page
  <!-- file: NAME -->       samples.py gives it to commands that follow
  <!-- not run: WHY -->

A page with <!-- blocks checked by PATH --> has only blocks that this test reads.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"((?:^<!-- (?:(?!-->).)*? -->\n+)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (from|checked by|file|not run):? (.*?) -->", re.DOTALL)


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


def fault(page: Path, marks: dict[str, str], kind: str, block: str) -> str | None:
    """What is wrong with a block."""
    if "from" in marks:
        line = missing(lines(block, kind), lines((ROOT / marks["from"]).read_text(), kind))
        return line and f"{marks['from']} does not have '{line}', or not in this place"
    if "checked by" in marks:
        if page.name in (ROOT / marks["checked by"]).read_text():
            return None
        return f"{marks['checked by']} does not read {page.name}"
    if not kind:
        return "a block without a kind; a picture is `text`"
    if not marks and kind not in ("console", "sh", "text"):
        return "a sample that no test runs; write <!-- from PATH --> before it"
    return None


def main() -> int:
    """Looks at all documents."""
    count, failures = 0, []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        text = page.read_text()
        whole = re.search(r"^<!-- blocks (checked by) (.*?) -->$", text, re.MULTILINE)
        for match in BLOCK.finditer(text):
            count += 1
            wrong = fault(page, dict([whole.groups()] if whole else MARK.findall(match[1])), match[2], match[3])
            if wrong:
                at = text[: match.start(2)].count("\n") + 1
                failures.append(f"{page.relative_to(ROOT)}:{at}: {wrong}")
    print("\n".join(failures))
    print(f"{count} blocks, {len(failures)} failures")
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
