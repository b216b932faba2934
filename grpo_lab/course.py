"""What the notebooks share: the stages of the waterfall, guesses before and checks after.

>>> [stage.key for stage in STAGES][:3]
['baseline', 'micro_batches', 'bfloat16']
>>> check(2 + 2, 4)
Right: 4
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from .recipe import Recipe

NAME_SLIDERS = """<script>
(() => {  // A screen reader needs a name on the part that takes the keys; ipywidgets gives it none.
  if (window.grpoLabNamesSliders) return;
  window.grpoLabNamesSliders = true;
  const name = () => {
    for (const handle of document.querySelectorAll(".widget-slider .noUi-handle:not([aria-label])")) {
      const label = handle.closest(".widget-slider").querySelector(".widget-label");
      const text = label && (label.title || label.textContent);
      if (text) handle.setAttribute("aria-label", text);
    }
  };
  new MutationObserver(name).observe(document.body, {childList: true, subtree: true});
  name();
})();
</script>"""


@dataclass(frozen=True)
class Stage:
    """One step of the way from the baseline to 8 GB: what `notebook` changes in the recipe before it."""

    key: str
    label: str
    changes: Mapping[str, Any]
    notebook: str


STAGES: tuple[Stage, ...] = (
    Stage("baseline", "baseline", {}, "02"),
    Stage("micro_batches", "+ micro-batches of one",
          {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}, "04"),
    Stage("bfloat16", "+ bfloat16 weights", {"dtype": "bfloat16"}, "05"),
    Stage("checkpointing", "+ checkpointing", {"activation_checkpointing": True}, "06"),
    Stage("chunked_logits", "+ chunked logits", {"logits": "chunked", "logits_chunk_size": 256}, "07"),
    Stage("no_reference", "+ no reference model", {"beta": 0.0}, "08"),
    Stage("lora", "+ LoRA", {"lora_rank": 16}, "09"),
    Stage("rollout_chunks", "+ rollouts in chunks", {"rollout_batch_size": 4}, "10"),
)


def stages(upto: str | int = "07") -> list[Recipe]:
    """The recipe after each stage, from the baseline up to the stage of notebook `upto`.

    >>> [recipe.dtype for recipe in stages("05")]
    ['float32', 'float32', 'bfloat16']

    A notebook that adds no stage takes those before it. Before notebook 02 there is none (ValueError).
    """
    recipe, recipes = Recipe.preset("baseline"), []
    for stage in _stages(upto):
        recipe = recipe.replace(**stage.changes)
        recipes.append(recipe)
    return recipes


def waterfall(upto: str | int = "07", progress: bool = True) -> pd.DataFrame:
    """Simulate every stage up to notebook `upto`; one row a stage, ready for `plots.waterfall`.

    Columns: label, notebook, peak_allocated, peak_reserved, fits, then bytes of each category at the peak.
    Seconds a stage on a CPU, the first time: the results are kept in grpo_lab's cache folder, and used again
    as long as neither the package nor the libraries under it change.
    """
    from tqdm.auto import tqdm

    bar = tqdm(list(zip(_stages(upto), stages(upto))), disable=not progress, unit="stage", leave=False)
    rows = [{"label": stage.label, "notebook": stage.notebook, **_simulated(recipe)} for stage, recipe in bar]
    table = pd.DataFrame(rows)
    owners = list(table.columns[5:])
    return table.fillna(dict.fromkeys(owners, 0)).astype(dict.fromkeys(owners, "int64"))


@dataclass
class Guess:
    """A reader's guess; `value` is where the slider stands, in `unit`."""

    question: str
    low: float
    high: float
    unit: str
    slider: Any = field(repr=False)

    @property
    def value(self) -> float:
        return float(self.slider.value)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        import ipywidgets

        question = ipywidgets.HTML(f"<b>{html.escape(self.question)}</b>")
        live = ipywidgets.VBox([question, ipywidgets.HBox([self.slider, ipywidgets.Label(self.unit)])])
        at = round(20 * (self.value - self.low) / (self.high - self.low))
        track = f"{self.low:g} |{'-' * at}o{'-' * (20 - at)}| {self.high:g} {self.unit}"
        static = f"{self.question}  {track}"
        return {
            **live._repr_mimebundle_(),
            "text/plain": static,
            # Where no kernel runs (a web page of the notebook) this is shown instead of the slider.
            "text/html": f"<b>{html.escape(self.question)}</b><br><code>{html.escape(track)}</code> "
            "<i>(run the cell to move the slider)</i>",
        }


def guess(question: str, low: float, high: float, unit: str = "GiB", *, start: float | None = None,
          step: float | None = None) -> Guess:
    """Show a slider from `low` to `high` and return it as a `Guess`; `reveal` reads it later.

    Move it with the mouse or, once focused, with the arrow keys. `start`: where it stands at first (the
    middle by default); `step`: one arrow key (a hundredth of the range by default).
    """
    import ipywidgets
    from IPython.display import display

    if not low < high:
        raise ValueError(f"guess: low={low!r} must be below high={high!r}")
    slider = ipywidgets.FloatSlider(
        value=(low + high) / 2 if start is None else start,
        min=low,
        max=high,
        step=step or (high - low) / 100,
        tooltip=f"{question} ({unit})",
        readout_format=".4g",
        layout=ipywidgets.Layout(width="28em"),
    )
    made = Guess(question, low, high, unit, slider)
    display({"text/html": NAME_SLIDERS, "text/plain": ""}, raw=True)
    display(made)
    return made


def reveal(guess: Guess, truth: float) -> None:
    """Print the reader's guess beside the truth, both in the guess's unit."""
    unit, far = guess.unit, _far(guess.value, truth)
    print(f"Your guess: {guess.value:.4g} {unit}. It is {truth:.4g} {unit}{far}.")


class NotYet(AssertionError):
    """A check that did not pass; a notebook shows its one line and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def check(answer: Any, expected: Any, rel: float = 1e-2, hint: str = "") -> None:
    """Compare the answer to an exercise with what is expected: one line if right, else `NotYet` with a hint.

    >>> check(..., 4)
    Your turn: put your answer in place of the dots, then run this cell again.
    >>> check(5, 4, hint="How many bytes has a float32?")
    Traceback (most recent call last):
        ...
    grpo_lab.course.NotYet: Not yet: 5. How many bytes has a float32?

    expected: a number or an array, compared within the relative tolerance `rel`; any other value, compared
    with `==`; or a function that is called with the answer and says whether it is right.
    """
    if answer is ... or answer is None:
        print("Your turn: put your answer in place of the dots, then run this cell again.")
        return
    if not _agrees(answer, expected, rel):
        raise NotYet(f"Not yet: {_short(answer)}. {hint or 'Read the question once more.'}")
    print(f"Right: {_short(answer)}")


def _stages(upto: str | int) -> list[Stage]:
    number = f"{int(upto):02d}" if str(upto).isdigit() else str(upto)
    chosen = [stage for stage in STAGES if stage.notebook <= number]
    if not chosen or not number.isdigit():
        known = ", ".join(stage.notebook for stage in STAGES)
        raise ValueError(f"upto={upto!r}: no stage comes at or before that notebook; they come with {known}")
    return chosen


def _simulated(recipe: Recipe) -> dict[str, Any]:
    """Peaks and owners of a stage. All notebooks show the same stages, so these are kept in a cache."""
    from .smollm2 import cache_dir

    kept = cache_dir() / "simulated" / f"{_fingerprint(recipe)}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    from .simulation import simulate

    report = simulate(recipe)
    row = {name: getattr(report, name) for name in ("peak_allocated", "peak_reserved", "fits")}
    row |= {name: int(n) for name, n in report.categories["bytes"].items()}
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")  # whole or not at all: notebooks may run side by side
        draft.write_text(json.dumps(row))
        draft.replace(kept)
    except OSError:
        pass  # nowhere to keep it: the next notebook simulates it again
    return row


def _fingerprint(recipe: Recipe) -> str:
    """Of all that decides the result: the recipe, the code and data that simulate it, the libraries they run."""
    return hashlib.sha256(repr((dataclasses.astuple(recipe), _what_simulates())).encode()).hexdigest()


# What decides a simulated byte; pictures, advice and the formula don't.
FOLDERS = ("grpo", "memory")
SIMULATES = ("simulation.py", "recipe.py", "gpus.py", "models.py", "_architecture.py", "trainer/generate.py")


@functools.cache
def _what_simulates() -> tuple[str, ...]:
    from ._data import data_path

    data = [data_path("cards.csv"), *data_path("architectures").glob("*.json")]
    package = Path(__file__).parent
    parts = [*SIMULATES, *(path.relative_to(package) for name in FOLDERS for path in (package / name).glob("*.py"))]
    files = sorted([*(package / part for part in parts), *data])
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return (code, *(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "bitsandbytes")))


def _far(guessed: float, truth: float) -> str:
    if guessed <= 0 or truth <= 0:
        return ""
    if max(guessed / truth, truth / guessed) < 1.1:
        return ": within a tenth"
    if guessed < truth:
        return f", {truth / guessed:.1f} times your guess"
    return f"; your guess is {guessed / truth:.1f} times that"


def _agrees(answer: Any, expected: Any, rel: float) -> bool:
    if isinstance(expected, Callable):
        return bool(expected(answer))
    if isinstance(expected, (bool, str)):
        return type(answer) is type(expected) and answer == expected
    if isinstance(expected, (int, float)) or hasattr(expected, "__array__"):
        return _close(answer, expected, rel)
    return bool(answer == expected)


def _close(answer: Any, expected: Any, rel: float) -> bool:
    import numpy as np

    if isinstance(answer, (bool, str)):
        return False
    try:
        found, wanted = np.asarray(answer, dtype=float), np.asarray(expected, dtype=float)
    except (TypeError, ValueError):
        return False
    return found.shape == wanted.shape and bool(np.allclose(found, wanted, rtol=rel, atol=0))


def _short(answer: Any) -> str:
    text = f"{answer:.6g}" if isinstance(answer, float) else repr(answer)
    return text if len(text) <= 60 else text[:57] + "..."
