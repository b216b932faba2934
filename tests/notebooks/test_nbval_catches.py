"""A wrong number in a stored output fails `make test`: shown by putting one there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def nbval(path: Path) -> subprocess.CompletedProcess:
    """Compare as `make test` does, with the options of the Makefile."""
    options = re.search(r"^NBVAL = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(options)]
    return subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=600)


def sanitized(text: str) -> str:
    config = (ROOT / "tests/notebooks/sanitize.cfg").read_text()
    for pattern, replacement in re.findall(r"^regex: (.*)$\n^replace: (.*)$", config, re.MULTILINE):
        text = re.sub(pattern, replacement, text)
    return text


SOURCES = [
    "import time; import pandas as pd; from grpo_lab import course, plots",
    "print(8 * 1280 * 151_936 * 4, 'bytes')",
    "pd.DataFrame({'bytes': [2**30, 2**20]}, index=['logits', 'gradients'])",
    "plots.learning(pd.DataFrame({'reward': [0.25, 0.75]}), smooth=1)",
    "print(f'took {time.perf_counter() % 1000:.1f} s')",
    "made = course.guess('How many?', 0, 80)",
    "course.reveal(made, 160)",
    "print('said')",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A notebook like the course's: bytes, a table, a picture with words, a time, a slider, a sentence."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in SOURCES])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    path = tmp_path_factory.mktemp("nbval") / "small.ipynb"
    nbformat.write(notebook, path)
    return path


def change(outputs: list, wanted: str, put: str) -> None:
    """Put one text for another in a cell's stored outputs, where it must be."""
    places = [(output, "text") for output in outputs if "text" in output]
    places += [(output.data, mime) for output in outputs if "data" in output for mime in output.data]
    places = [(holder, key) for holder, key in places if wanted in str(holder[key])]
    assert places, f"{wanted!r} is not stored"
    for holder, key in places:
        if isinstance(holder[key], str):
            holder[key] = holder[key].replace(wanted, put)


def test_an_unchanged_notebook_passes(small):
    run = nbval(small)
    assert run.returncode == 0, run.stdout
    assert f"{len(SOURCES)} passed" in run.stdout


def test_each_wrong_number_fails(small):
    notebook = nbformat.read(small, 4)
    change(notebook.cells[1].outputs, "6223298560", "6223298561")  # printed bytes
    change(notebook.cells[2].outputs, "1073741824", "1073741825")  # a table
    change(notebook.cells[3].outputs, "from 0.25 to 0.75", "from 0.25 to 0.85")  # a picture, in words
    change(notebook.cells[6].outputs, "4.0 times your guess", "3.0 times your guess")  # a sentence
    notebook.cells[7].outputs = []  # an output that got lost
    changed = small.with_name("changed.ipynb")
    nbformat.write(notebook, changed)
    run = nbval(changed)
    assert run.returncode == 1
    failed = {int(cell) for cell in re.findall(r"^FAILED .*::Cell (\d+)", run.stdout, re.MULTILINE)}
    assert failed == {1, 2, 3, 6, 7}, run.stdout


@pytest.mark.parametrize("text", [
    "peak 6223298560 bytes", "5.80 GiB", "fits: True", "reward 0.91", "64 prompts x 8", "3 steps", "16 GB",
])
def test_what_matters_survives_the_sanitizer(text):
    """A pattern that is too wide would hide wrong numbers."""
    assert sanitized(text) == text


@pytest.mark.parametrize("one, other", [
    ("took 12.3 s", "took 4 s"), ("3 min 20 s", "2 min 1 s"), ("1.25 it/s", "300 it/s"),
    (" 50%|#####     | 5/10 [00:01<00:01]", "100%|##########| 10/10 [00:02<00:00]"),
    ("<object at 0x7f00aa11>", "<object at 0x7f00bb22>"),
    ('<img alt="a" src="data:image/png;base64,AAAA">', '<img alt="a" src="data:image/png;base64,BBBB=">'),
])
def test_what_differs_from_run_to_run_does_not_count(one, other):
    assert sanitized(one) == sanitized(other)


@pytest.mark.skipif(not NOTEBOOKS, reason="no notebook in notebooks/ yet")
def test_a_wrong_number_in_the_course_fails(tmp_path):
    """The first number in a course notebook's stored outputs that is compared, with another last digit."""
    path, cells, digit = next(filter(None, map(first_number, NOTEBOOKS)))
    notebook = nbformat.read(path, 4)
    notebook.cells = notebook.cells[:cells]
    whole = tmp_path / path.name
    nbformat.write(notebook, whole)
    assert nbval(whole).returncode == 0
    output = notebook.cells[-1].outputs[0]
    output.text = output.text[:digit] + str((int(output.text[digit]) + 1) % 10) + output.text[digit + 1 :]
    nbformat.write(notebook, whole)
    assert nbval(whole).returncode == 1


def first_number(path: Path) -> tuple[Path, int, int] | None:
    """(notebook, cells up to the first that prints a compared number, where its digit is)."""
    for i, cell in enumerate(nbformat.read(path, 4).cells):
        ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
        outputs = [] if ignored or cell.cell_type != "code" else cell.outputs[:1]
        for output in outputs:
            for match in re.finditer(r"\d", output.get("text", "")):
                changed = output.text[: match.start()] + "_" + output.text[match.end() :]
                if sanitized(changed) != sanitized(output.text):
                    return path, i + 1, match.start()
    return None
