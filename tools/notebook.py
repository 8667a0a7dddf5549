"""``make notebook``: run examples/notebook.ipynb in a real Jupyter kernel, and keep its outputs in it.

    .venv-docs/bin/python tools/notebook.py .venv/bin/python

The kernel is the named Python, which has torch and cloudtrain. Jupyter's packages are this interpreter's: they come
last on its path, so they replace nothing. A cell that raises ends the run, and nothing is written.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"
KERNEL = (
    "import sys; sys.path.append(sys.argv.pop(1)); from ipykernel.kernelapp import launch_new_instance as run; run()"
)
SECONDS = 300


def main(python: str) -> None:
    """Run the notebook with ``python`` as its kernel, in an empty folder."""
    import nbformat
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient

    class Manager(AsyncKernelManager):  # type: ignore[misc]
        kernel_spec = KernelSpec(
            argv=[os.path.abspath(python), "-c", KERNEL, sysconfig.get_path("purelib"), "-f", "{connection_file}"],
            language="python",
        )

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_manager_class=Manager,
            resources={"metadata": {"path": folder}},
            record_timing=False,
        )
        client.execute()
    keep(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def keep(notebook: Any) -> None:
    """Join outputs that a cell printed in pieces, and drop those of no use to a reader."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = {}
            texts = [output.text for output in cell.outputs if output.output_type == "stream"]
            assert len(texts) == len(cell.outputs), f"not text: {cell.outputs}"
            text = "".join(texts).splitlines(keepends=True)
            cell.outputs = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
        cell.source = cell.source.splitlines(keepends=True)


if __name__ == "__main__":
    main(sys.argv[1])
