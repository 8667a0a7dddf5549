"""The site of docs/: its menu, its hook's changes to pages, and the notebook. `make docs` builds it strictly."""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pages import environment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
#: As IPython does it: each cell within an event loop that runs, with ``await`` at its top level.
CELLS = """
import ast, asyncio, contextlib, inspect, io, json, sys

async def main():
    space, printed = {"__name__": "__main__"}, []
    for source in json.load(sys.stdin):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            done = eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), space)
            if inspect.iscoroutine(done):
                await done
        printed.append(out.getvalue())
    print(json.dumps(printed))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def menu(items: Any) -> list[str]:
    """Return the pages of a part of the menu."""
    if isinstance(items, str):
        return [items]
    return [page for item in (items.values() if isinstance(items, dict) else items) for page in menu(item)]


def test_every_page_is_in_the_menu_once(site: ModuleType) -> None:
    pages = menu(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["nav"])
    assert len(pages) == len(set(pages))
    own = [page for page in pages if "/" not in page or page.startswith("recipes/")]
    written = {page.relative_to(DOCS).as_posix() for folder in ("", "recipes") for page in (DOCS / folder).glob("*.md")}
    assert set(own) == written, "add it to nav in mkdocs.yml"
    others = {page for page in pages if page not in own}
    assert others <= {*map(site.place, site.shown()), "proof/README.md"}


def test_each_link_of_a_page_is_one_of_the_site(site: ModuleType) -> None:
    shown = {site.place(path) for path in site.shown()}
    found = 0
    for path in sorted((ROOT / "docs").rglob("*.md")):
        own = path.relative_to(ROOT / "docs").as_posix()
        text = site.adapted(f"docs/{own}", path.read_text())
        for line, in_block in site.lines(text):
            for _, link, _ in [] if in_block else site.LINK.findall(line):
                target = posixpath.normpath(posixpath.join(posixpath.dirname(own), link.partition("#")[0]))
                if link.startswith(("#", "http", "mailto:")):
                    continue
                assert target in shown or (ROOT / "docs" / target).is_file(), f"{own}: {link}"
                found += target in shown
    assert found > 10


def test_a_link_that_leads_nowhere_is_an_error(site: ModuleType) -> None:
    for link in ("../nosuch.py", "../../elsewhere.md", "nosuch.md#there"):
        with pytest.raises(ValueError, match=re.escape(link)):
            site.adapted("docs/index.md", f"[x]({link})\n")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("[x](../examples/finetune.py)", "[x](repository/examples/finetune.py.md)"),
        ("[x](../examples)", "[x](repository/examples/index.md)"),
        ("[x](../benchmarks/README.md#measured)", "[x](repository/benchmarks/README.md#measured)"),
        (
            "[x](cli.md#stores) [y](#here) [z](https://a.example/b)",
            "[x](cli.md#stores) [y](#here) [z](https://a.example/b)",
        ),
        ("```python file=a.py\n[x](../nosuch)\n```", '```python title="a.py"\n[x](../nosuch)\n```'),
        ("```sh run exit=2\nfalse\n```", "```sh\nfalse\n```"),
        ("- a\n\n  ```text output\n  b\n  ```", "- a\n\n  ```text\n  b\n  ```"),
        (r"| `a \| <b>` | `c` |", "| <code>a &#124; &lt;b&gt;</code> | `c` |"),
        (r"`a \| b`", r"`a \| b`"),
    ],
)
def test_what_a_page_becomes(site: ModuleType, given: str, wanted: str) -> None:
    assert site.adapted("docs/index.md", given) == wanted + "\n"


def test_what_lies_outside_is_shown_as_it_is(site: ModuleType) -> None:
    source = (ROOT / "entrypoints" / "ddp.py").read_text()
    page = site.markdown_of("entrypoints/ddp.py")
    assert source.rstrip() in page
    assert page.startswith("# entrypoints/ddp.py\n\n```python\n")
    assert "[finetune.py](finetune.py.md)" in site.markdown_of("examples")
    assert "](../design.md)" in site.markdown_of("CONTRIBUTING.md")
    assert site.block("a\n````\nb", "text").startswith("`````text\n")
    notebook = site.markdown_of("examples/notebook.ipynb")
    assert 'text title="Output"\n[n0] cloudtrain: attempt 0.0: a fresh start\n' in notebook


@pytest.mark.slow
@pytest.mark.proof
def test_the_notebook_prints_what_it_holds(tmp_path: Path) -> None:
    """Ignore floats, which other machines may round differently. `make notebook` tests a real kernel."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CELLS],
        cwd=tmp_path,
        env=environment(tmp_path),
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    held = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]
    assert [rounded(text) for text in json.loads(done.stdout)] == [rounded(text) for text in held]
    assert any("await " in line for cell in cells for line in cell["source"])


def rounded(text: str) -> str:
    return re.sub(r"\b\d+\.\d+\b(?!:)", "…", text)
