"""What the site has beside the pages of docs/: README, CONTRIBUTING and CHANGELOG, the C headers as pages, and the
files that pages link to. Called by mkdocs, see mkdocs.yml.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
HEADERS = {"include/tensorbus/tensorbus.h": "c-api.md", "include/tensorbus/plan.h": "c-plan.md"}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def moved(source: str, target: str) -> str | None:
    """The path in the site of what a file of the repository links to; None if the link is to a page beside it."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in PAGES or path in HEADERS:
        return PAGES.get(path) or HEADERS[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).exists():
        raise PluginError(f"{source} links to {target}, which does not exist")
    return f"files/{path}" + (".md" if (ROOT / path).is_dir() else "" if path.endswith(".md") else ".txt")


def with_links(source: str, text: str, wanted: set[str]) -> str:
    """The text with links as the site needs them; adds to `wanted` the files that it links to."""

    def one(match: re.Match[str]) -> str:
        site = moved(source, match[2])
        if site is None:
            return match[0]
        if site.startswith("files/"):
            wanted.add(site)
        here = posixpath.dirname(PAGES.get(source) or source.removeprefix("docs/"))
        return f"{match[1]}{posixpath.relpath(site, here or '.')}{match[3] or ''}{match[4]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(one, part) for part in parts)


def prose(comment: str) -> str:
    """The text of a comment."""
    text = comment.removeprefix("/*").removesuffix("*/")
    text = "\n".join(re.sub(r"^ \* ?| \*$", "", line).rstrip() for line in text.split("\n")).strip()
    text = re.sub(r"(?<=[^\n])\n *(- .*(?:\n +\S.*|\n *- .*)*)", r"\n\n\1", text)  # a list is a paragraph of its own
    return re.sub(r"\*(?=_)", r"\*", re.sub(r"^ - ", "- ", text, flags=re.MULTILINE))


def names(code: str) -> list[str]:
    """What a block of declarations declares, in order."""
    found = re.findall(r"\b(tb_\w+)\(|^\}? ?(tb_\w+);|^typedef [^;{]*?\b(tb_\w+);|\(\*(tb_\w+)\)\(", code, re.MULTILINE)
    return list(dict.fromkeys("".join(groups) for groups in found))


def header_page(path: str) -> str:
    """A header as a page: a heading for each section and each block of declarations."""
    text = (ROOT / path).read_text()
    body = text[: text.rindex("#ifdef __cplusplus")]
    first, body = re.match(r"(/\*.*?\*/)\n(.*)", body, re.DOTALL).groups()  # type: ignore[union-attr]
    out = [f"# {Path(path).name}", prose(first)]
    seen: set[str] = set()
    for block in re.split(r"\n{2,}(?=\S)", body.strip()):
        section = re.match(r"/\* -+ (.*?) -+ \*/", block)
        if section:
            out.append(f"## {section[1]}")
            continue
        comment = re.match(r"/\*.*?\*/", block, re.DOTALL)
        # A comment behind a declaration stays with it.
        code = block[comment.end() :].strip() if comment else block
        if code.startswith("#"):
            continue
        fresh = [name for name in names(code) if name not in seen]
        seen.update(fresh)
        if fresh:
            shown = ", ".join(f"`{name}`" for name in fresh[:4]) + (", ..." if len(fresh) > 4 else "")
            out.append(f"### {shown} {{: #{fresh[0]} }}")
            out.append("".join(f'<a id="{name}"></a>' for name in fresh[1:]))
        if comment:
            out.append(prose(comment[0]))
        if code:
            out.append(f"```c\n{code}\n```")
    return "\n\n".join(part for part in out if part) + "\n"


def folder_page(path: str, wanted: set[str]) -> str:
    """A list of a folder's files."""
    names = sorted(entry.name for entry in (ROOT / path).iterdir() if entry.is_file() and entry.suffix != ".md")
    wanted.update(f"files/{path}/{name}.txt" for name in names)
    return f"# {path}\n\n" + "".join(f"- [{name}]({posixpath.basename(path)}/{name}.txt)\n" for name in names)


def linked_file(site: str, wanted: set[str]) -> str:
    """What is shown for files/PATH.txt, files/PATH.md or files/FOLDER.md."""
    path = site.removeprefix("files/")
    if (ROOT / path).is_file():
        return with_links(path, (ROOT / path).read_text(), wanted)
    path = path.removesuffix(".txt").removesuffix(".md")
    return folder_page(path, wanted) if (ROOT / path).is_dir() else (ROOT / path).read_text()


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, and the files that pages link to."""
    wanted: set[str] = set()
    for source, site in PAGES.items():
        text = with_links(source, (ROOT / source).read_text(), wanted)
        files.append(File.generated(config, site, content=text))
    for source, site in HEADERS.items():
        files.append(File.generated(config, site, content=header_page(source)))
    for file in list(files.documentation_pages()):
        if file.src_uri not in (*PAGES.values(), *HEADERS.values()):
            source = f"docs/{file.src_uri}"
            file.content_string = with_links(source, (ROOT / source).read_text(), wanted)
    done: set[str] = set()
    while left := sorted(wanted - done):
        for site in left:
            done.add(site)
            files.append(File.generated(config, site, content=linked_file(site, wanted)))
    return files
