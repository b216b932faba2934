"""What can be said of a notebook without running it."""

import ast
import dataclasses
import inspect
import json
import re
import statistics
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEADINGS = ["The question", "Guess first", "See it small", "Do it", "Prove it", "What it bought", "In TRL",
            "What the article says", "Exercises"]
pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def markdown(path):
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]


def tags(cell):
    return set(cell.metadata.get("tags", []))


def is_lesson(path):
    """Lessons are numbered; the gallery shows the tools on other people's code."""
    return path.stem[:2].isdigit()


def test_the_nine_parts_come_in_order(path):
    if not is_lesson(path):
        pytest.skip("no lesson")
    found = re.findall(r"^## (.+?) *$", "\n".join(markdown(path)), re.MULTILINE)
    assert [part for part in found if part in HEADINGS] == HEADINGS


def test_it_opens_with_its_title(path):
    assert markdown(path)[0].startswith("# ")


def test_outputs_are_stored_and_counted(path):
    """nbval compares nothing in a cell without an execution count, and passes it."""
    cells = [cell for cell in code_cells(path) if cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "execute_result":
                assert output.execution_count == cell.execution_count


def test_no_cell_failed_by_accident(path):
    """nbval takes any exception in a cell tagged raises-exception: the next one must look at what it was."""
    cells = code_cells(path)
    for cell, after in zip(cells, [*cells[1:], None]):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in tags(cell))
        if failed:
            assert after is not None and "assert" in after.source


def test_no_widget_state_is_stored(path):
    """Without its model a stored slider is an error message; state without models makes a file unreadable."""
    raw = json.loads(path.read_text())
    assert "widgets" not in raw["metadata"]
    assert "widget-view" not in path.read_text()


def test_metadata_is_the_same_on_every_machine(path):
    metadata = json.loads(path.read_text())["metadata"]
    assert metadata["language_info"] == {"name": "python"} and metadata["kernelspec"]["name"] == "python3"


def test_cells_are_short(path):
    lengths = [len(cell.source.splitlines()) for cell in code_cells(path)]
    assert statistics.median(lengths) <= 6
    assert max(lengths) <= 25


def test_every_checked_number_is_really_checked(path):
    """A notebook all of whose cells ignore their output would pass with any number in it."""
    cells = [cell for cell in code_cells(path) if cell.outputs]
    ignored = [cell for cell in cells if "nbval-ignore-output" in tags(cell) or "NBVAL_IGNORE" in cell.source]
    assert len(ignored) <= len(cells) / 2


def test_no_machine_path_is_stored(path):
    folders = r"(?<![\w.:/])/(home|root|Users|tmp|work|usr|opt|var)/[\w.-]+|site-packages"
    found = re.search(folders, path.read_text())
    assert not found, found[0]


def test_pictures_have_alternative_text(path):
    for cell in code_cells(path):
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                assert output.metadata.get("image/png", {}).get("alt"), "use plots.show(figure, alt=...)"
            for image in re.findall(r"<img\b[^>]*>", "".join(data.get("text/html", ""))):
                assert re.search(r'\balt="[^"]+"', image)
    for text in markdown(path):
        assert not re.search(r"!\[\s*\]\(", text)
        assert all(re.search(r'\balt="[^"]+"', image) for image in re.findall(r"<img\b[^>]*>", text))


def test_exercises_have_checks_and_solutions(path):
    """A solution runs with the notebook: one that no longer passes its own check fails there."""
    if not is_lesson(path):
        pytest.skip("no lesson")
    cells = code_cells(path)
    exercises = [i for i, cell in enumerate(cells) if "exercise" in tags(cell)]
    assert len(exercises) >= 2
    for i in exercises:
        exercise, solution = cells[i], cells[i + 1]
        assert "..." in exercise.source and "check(" in exercise.source
        assert "solution" in tags(solution), "the code cell after an exercise is its solution"
        assert solution.metadata.get("jupyter", {}).get("source_hidden") is True
        assert "check(" in solution.source and "..." not in solution.source
        assert "Your turn" in str(exercise.outputs) and "Right" in str(solution.outputs)


def test_keywords_given_to_trl_and_peft_exist(path):
    """Names come and go between versions: one that no longer exists is noticed before a reader meets it."""
    for cell in code_cells(path):
        for name, keyword in keywords(cell.source):
            assert keyword in known(name), f"{name} has no keyword {keyword!r}"


def keywords(source):
    """(callable, keyword) of each call of a configuration class; IPython's own syntax is taken out."""
    plain = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!", "?")))
    for node in ast.walk(ast.parse(plain)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("GRPOConfig", "LoraConfig", "BitsAndBytesConfig"):
                yield from ((name, keyword.arg) for keyword in node.keywords if keyword.arg)


def known(name):
    if name == "GRPOConfig":
        from trl import GRPOConfig as config
    elif name == "LoraConfig":
        from peft import LoraConfig as config
    else:
        from transformers import BitsAndBytesConfig as config
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    return fields | set(inspect.signature(config.__init__).parameters)
