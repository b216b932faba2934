"""Execute notebooks and store their outputs: `make notebooks`, or `python scripts/run_notebooks.py FILE...`.

What is stored depends on the notebook and the package alone: counts run from 1, metadata says only what a
reader's Jupyter needs, and the state of widgets is left out (a stored slider without a kernel is an error
message; the text beside it remains).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_IN_CELLS = {"tags", "jupyter", "alt"}
WIDGET = "application/vnd.jupyter.widget-view+json"


def run(path: Path, timeout: int = 900) -> nbformat.NotebookNode:
    """Execute a notebook in a fresh kernel, in its own folder; CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return tidy(notebook)


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what differs from run to run or machine to machine, in place."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_IN_CELLS})
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET, None)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    for path in parser.parse_args().notebooks:
        start = time.perf_counter()
        print(f"{path} ", end="", flush=True)
        nbformat.write(run(path), path)
        print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
