"""MkDocs' hook for the pages in ``docs/``: the same Markdown reads well on a code host and in the site.

Three things differ in the site:

- A link out of ``docs/`` (to an example, a folder, CONTRIBUTING.md) leads to a page of the site with that file. The
  site knows no address of the repository, and is read offline too.
- The info string of a fenced block, which configures its test, becomes the block's title.
- A pipe in a table's code needs no backslash.

``hooks`` in mkdocs.yml names this module; only the functions ``on_…`` need MkDocs.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
#: Folder of the site for files outside of docs/.
REPOSITORY = "repository"
LANGUAGES = {".py": "python", ".sh": "sh", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
#: Suffixes of the files that a linked folder shows.
SHOWN = (".md", ".ipynb", *LANGUAGES)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})(\S*)(.*)$")


# ---------------------------------------------------------------------------------------------------------------- links


def place(path: str) -> str:
    """Return the site's path for the file or folder ``path`` of the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if (ROOT / path).is_dir():
        return f"{REPOSITORY}/{path}/index.md"
    return f"{REPOSITORY}/{path}" if path.endswith(".md") else f"{REPOSITORY}/{path}.md"


def leads_to(page: str, link: str) -> tuple[str, str] | None:
    """Return (file or folder of the repository, anchor with its #) for a relative link in the file ``page``, else None.

    Raises `ValueError` for a missing file, or one outside of the repository.
    """
    target, mark, anchor = link.partition("#")
    if not target or re.match(r"[a-z][a-z0-9+.-]*:|/", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if path.startswith("..") or not (ROOT / path).exists():
        raise ValueError(f"{page}: the link {link} leads to no file")
    return path, mark + anchor


def links(page: str) -> Iterator[str]:
    """Yield the files and folders of the repository that a Markdown file links to."""
    for line, in_block in lines((ROOT / page).read_text(encoding="utf-8")):
        for found in [] if in_block else LINK.findall(line):
            if led := leads_to(page, found[1]):
                yield led[0]


def shown() -> list[str]:
    """Return the files and folders outside of docs/ that the pages link to, directly or through each other, sorted."""
    ahead = [path.relative_to(ROOT).as_posix() for path in (ROOT / DOCS).rglob("*.md")]
    found: set[str] = set()
    while ahead:
        path = ahead.pop()
        if (ROOT / path).is_dir():
            new = {f"{path}/{name}" for name in entries(path)}
        else:
            new = set(links(path)) if path.endswith(".md") else set()
        new = {path for path in new if not path.startswith(f"{DOCS}/")} - found
        found |= new
        ahead += new
    return sorted(found)


def entries(folder: str) -> list[str]:
    """Return the names of the files of a folder that the site shows."""
    return sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file() and path.suffix in SHOWN)


# ---------------------------------------------------------------------------------------------------------------- pages


def lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, with True if it belongs to a fenced block."""
    fence = ""
    for line in text.splitlines():
        mark = FENCE.match(line)
        opens = bool(mark and not fence)
        yield line, bool(fence) or opens
        if mark and opens:
            fence = mark[2]
        elif mark and mark[2].startswith(fence) and not mark[3] + mark[4].strip():
            fence = ""


def markdown_of(path: str) -> str:
    """Return the page that shows a file or folder outside of docs/."""
    if (ROOT / path).is_dir():
        rows = "\n".join(f"- [{name}]({name if name.endswith('.md') else name + '.md'})" for name in entries(path))
        return f"# {path}/\n\n{rows}\n"
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return adapted(path, text)
    if path.endswith(".ipynb"):
        return "\n".join(cell_of(cell) for cell in json.loads(text)["cells"])
    return f"# {path}\n\n{block(text, LANGUAGES.get(Path(path).suffix, 'text'))}\n"


def cell_of(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook as Markdown: its source and its text output."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return f"{source}\n"
    texts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        texts.append("".join(output.get("text", data.get("text/plain", ""))))
    left = "".join(text if text.endswith("\n") else f"{text}\n" for text in texts if text)
    return block(source, "python") + (f"\n{block(left, 'text', title='Output')}" if left else "")


def block(text: str, language: str, title: str = "") -> str:
    """Return a fenced block for any text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{fence}{language}{f' title={json.dumps(title)}' if title else ''}\n{text.rstrip()}\n{fence}\n"


def adapted(path: str, text: str) -> str:
    """Return the Markdown of the file ``path`` for the site."""
    out = []
    own = posixpath.dirname(place(path)) or "."

    def link(found: re.Match[str]) -> str:
        led = leads_to(path, found[2])
        return found[0] if led is None else f"]({posixpath.relpath(place(led[0]), own)}{led[1]})"

    for line, in_block in lines(text):
        mark = FENCE.match(line) if in_block else None
        if mark and mark[3]:
            words = dict(word.partition("=")[::2] for word in mark[4].split())
            title = f" title={json.dumps(words['file'])}" if "file" in words else ""
            out.append(f"{mark[1]}{mark[2]}{mark[3]}{title}")
        elif in_block:
            out.append(line)
        else:
            table = line.startswith("|")
            out.append(LINK.sub(link, re.sub(r"`[^`]+`", piped, line) if table else line))
    return "\n".join(out) + "\n"


def piped(code: re.Match[str]) -> str:
    r"""Return code of a table for the site, where a ``\|`` of a code host would be two characters."""
    if r"\|" not in code[0]:
        return code[0]
    text = code[0][1:-1].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace(r"\|", "&#124;")
    return f"<code>{text}</code>"


# -------------------------------------------------------------------------------------------------------- MkDocs' hooks


def on_files(files: Any, config: Any) -> Any:
    """Add the pages for files outside of docs/."""
    from mkdocs.structure.files import File

    for path in shown():
        files.append(File.generated(config, place(path), content=markdown_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt a page of docs/; the others are already adapted."""
    own = page.file.src_uri
    return markdown if own.startswith(f"{REPOSITORY}/") else adapted(f"{DOCS}/{own}", markdown)
