"""Sliders on a recipe: what each phase takes, whether it fits, what else would fit, and the lines to copy.

>>> explore(Recipe.preset("laptop_8gb"))                                        # doctest: +SKIP

The numbers are :func:`grpo_lab.estimate`'s; a button asks `simulate`. Where widgets don't run there is a picture.
"""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from . import _explorer_text as text
from . import gpus, models
from ._explorer_search import POWERS, cached, most_that_fits
from ._rules import CHOICES
from .course import NAME_SLIDERS
from .estimation import Estimate, human
from .recipe import Recipe

# Field -> (label, options). Lengths are sliders.
CHOSEN: dict[str, tuple[str, list[Any]]] = {
    "model": ("model", [name for name in models.names() if name != "tiny"]),
    "gpu": ("card", gpus.names()),
    "num_generations": ("answers a prompt", [2, 4, 8, 16, 32, 64]),
    "per_device_train_batch_size": ("micro-batch", POWERS),
    "gradient_accumulation_steps": ("accumulation", POWERS),
    "rollout_batch_size": ("rollout batch", [None, *POWERS]),
    "logits": ("logits", list(CHOICES["logits"])),
    "activation_checkpointing": ("checkpointing", [False, True]),
    "activation_offload": ("inputs on host", [False, True]),
    "dtype": ("weights in", list(CHOICES["dtype"])),
    "autocast": ("autocast", list(CHOICES["autocast"])),
    "optim": ("optimizer", list(CHOICES["optim"])),
    "optimizer_offload": ("optimizer on host", [False, True]),
    "lora_rank": ("LoRA rank", [None, 4, 8, 16, 32, 64, 128]),
    "quantization": ("quantization", list(CHOICES["quantization"])),
    "beta": ("reference (beta)", [0.0, 0.001, 0.04]),
    "attn_implementation": ("attention", list(CHOICES["attn_implementation"])),
}
LENGTHS = {
    "max_prompt_length": ("prompt tokens", 16, 4096, 16),
    "max_completion_length": ("completion tokens", 64, 8192, 64),
}
WIDE = ["model", "gpu", *LENGTHS]  # two a row: a name of a card, a track to move on
ORDER = [*WIDE, *list(CHOSEN)[2:]]
LABELS = {name: {**CHOSEN, **LENGTHS}[name][0] for name in ORDER}
NONE = "none"  # a Dropdown takes the value None for no choice at all
WORDS = {
    ("rollout_batch_size", NONE): "all at once", ("lora_rank", NONE): "none: all weights", ("beta", 0.0): "0: none",
}  # fmt: skip
STYLE = {"description_width": "120px"}
RUNNING = '<progress aria-label="simulating"></progress> <i>the real step, without data: some seconds</i>'


def explore(recipe: Recipe | None = None) -> Explorer:
    """Sliders that start at ``recipe`` (the course's baseline if there is none).

    Leave the call as a cell's last line. ``.recipe`` is the present position, ``.close()`` ends it.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"explore takes a Recipe, not {type(recipe).__name__}: make one with Recipe(model=...)")
    return Explorer(Recipe.preset("baseline") if recipe is None else recipe)


class Explorer:
    """What `explore` returns: ``controls`` (field -> widget), ``recipe``, ``estimate`` or ``problem``."""

    def __init__(self, recipe: Recipe) -> None:
        self.start, self.recipe, self.problem = recipe, recipe, ""
        self.pinned: Estimate | None = None
        self.controls = {name: _control(name, getattr(recipe, name)) for name in ORDER}
        self._verdict, self._picture, self._table, self._most, self._lines = (widgets.HTML() for _ in range(5))
        self._simulated, self._compared = widgets.HTML(), widgets.HTML()
        self.pin = widgets.Button(description="pin this", tooltip="keep this position, compare the next ones with it")
        self.simulate = widgets.Button(description="simulate this", tooltip="check the formula with the instrument")
        self.pin.on_click(self._on_pin)
        self.simulate.on_click(self._on_simulate)
        for control in self.controls.values():
            control.observe(self._on_change, "value")
        self.box = self._laid_out()
        self.closed = False
        self._on_change()

    @property
    def estimate(self) -> Estimate | None:
        return None if self.problem else cached(self.recipe)

    def close(self) -> None:
        """Ends the widgets; what was found stays readable."""
        self.closed = True
        for control in self.controls.values():
            control.unobserve_all("value")
        self.box.close()

    # ---- what happens -----------------------------------------------------------------------------------------------

    def _on_change(self, _: Any = None) -> None:
        try:
            fields = {name: control.value for name, control in self.controls.items()}
            recipe = self.start.replace(**{k: None if v == NONE else v for k, v in fields.items()})
            cached(recipe)
        except (ValueError, TypeError) as error:
            self.problem = str(error)
        else:
            self.recipe, self.problem = recipe, ""
        self._simulated.value = ""
        self._show()

    def _on_pin(self, _: Any = None) -> None:
        self.pinned = None if self.pinned is not None else self.estimate
        self.pin.description = "pin this" if self.pinned is None else "unpin"
        self._show()

    def _on_simulate(self, _: Any = None) -> None:
        if self.problem:
            return
        from .simulation import simulate

        self.simulate.disabled = True
        self._simulated.value = RUNNING
        try:
            self._simulated.value = text.simulated_html(simulate(self.recipe), self.estimate)
        except Exception as error:  # shown where it was asked for: a traceback of a callback goes to a log
            self._simulated.value = f"<b>not simulated</b>: {escape(str(error))}"
        finally:
            self.simulate.disabled = False

    # ---- what is seen -----------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self.pin.disabled, self.simulate.disabled = bool(self.problem) and self.pinned is None, bool(self.problem)
        if self.problem:  # the last good position stays in sight
            self._verdict.value = text.problem_html(self.problem)
            return
        found = cached(self.recipe)
        self._verdict.value = text.verdict_html(found)
        self._picture.value = text.picture_svg(found, self.pinned)
        self._table.value = text.table_html(found, self.pinned)
        self._compared.value = text.pinned_html(LABELS, self.pinned and self.pinned.recipe, self.recipe)
        self._lines.value = text.lines_html(self.recipe)
        self._most.value = text.most_html(most_that_fits(self.recipe), self.recipe)  # last: it asks for many estimates

    def static_html(self) -> str:
        """For where no kernel runs."""
        found = cached(self.recipe)
        verdict = text.problem_html(self.problem) if self.problem else text.verdict_html(found)
        return text.static_html(verdict, most_that_fits(self.recipe), found, self.pinned)

    def _laid_out(self) -> widgets.VBox:
        wide = [self.controls[name] for name in WIDE]
        rest = [control for name, control in self.controls.items() if name not in WIDE]
        right = widgets.VBox([self._table, self._most], layout=widgets.Layout(width="40%"))
        self._picture.layout.width = "60%"
        buttons = widgets.HBox([self.pin, self.simulate, self._simulated])
        seen = [self._verdict, widgets.HBox([self._picture, right]), self._compared, buttons, self._lines]
        return widgets.VBox([_grid(wide, 2), _grid(rest, 3), *seen], layout=widgets.Layout(max_width="960px"))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = {"text/plain": str(self), "text/html": self.static_html()}
        if self.closed:
            return bundle
        from IPython.display import display

        display({"text/html": NAME_SLIDERS, "text/plain": ""}, raw=True)
        return {**self.box._repr_mimebundle_(), **bundle}

    def __repr__(self) -> str:
        return f"explore({self.recipe!r}): {self.problem or self.estimate}"




def _grid(controls: list[widgets.Widget], columns: int) -> widgets.GridBox:
    return widgets.GridBox(controls, layout=widgets.Layout(
        grid_template_columns=f"repeat({columns}, minmax(0, 1fr))", grid_gap="2px 8px", width="100%"))  # fmt: skip


def _control(name: str, value: Any) -> widgets.Widget:
    layout = widgets.Layout(width="auto")
    if name in LENGTHS:
        label, low, high, step = LENGTHS[name]
        return widgets.IntSlider(value=value, min=min(low, value), max=max(high, value), step=step, description=label,
                                 tooltip=label, style=STYLE, layout=layout, continuous_update=True)  # fmt: skip
    label, options = CHOSEN[name]
    options = [NONE if option is None else option for option in options]
    value = NONE if value is None else value
    if value not in options:
        options.append(value)
    shown = [(_shown(name, option), option) for option in options]
    return widgets.Dropdown(options=shown, value=value, description=label, tooltip=label, style=STYLE, layout=layout)


def _shown(name: str, option: Any) -> str:
    if isinstance(option, bool):
        return "on" if option else "off"
    if name == "gpu" and isinstance(option, int):
        return f"{human(option)} for PyTorch"
    return WORDS.get((name, option), str(option))
