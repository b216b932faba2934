"""Sliders on a recipe: what each phase takes, whether it fits, what else would fit, and the lines to copy.

>>> explore(Recipe.preset("laptop_8gb"))                                        # doctest: +SKIP

The numbers are :func:`grpo_lab.estimate`'s; a button asks `simulate`. Where widgets don't run there is a picture.
"""

from __future__ import annotations

import functools
from html import escape
from typing import Any

import ipywidgets as widgets

from . import gpus, models
from ._rules import CHOICES
from ._trl_text import trl_lines
from .advice import longest_completion
from .course import NAME_SLIDERS
from .estimation import Estimate, estimate, human
from .explorer_picture import picture
from .recipe import Recipe

POWERS = [1, 2, 4, 8, 16, 32, 64, 128]
# Field -> (label, options). Lengths are sliders.
CHOSEN: dict[str, tuple[str, list[Any]]] = {
    "model": ("model", [name for name in models.names() if name != "tiny"]),
    "gpu": ("card", gpus.names()),
    "num_generations": ("answers a prompt", [2, 4, 8, 16, 32, 64]),
    "per_device_train_batch_size": ("micro-batch", POWERS),
    "gradient_accumulation_steps": ("accumulation", POWERS),
    "rollout_batch_size": ("rollout batch", [None, *POWERS]),
    "dtype": ("weights in", list(CHOICES["dtype"])),
    "autocast": ("autocast", list(CHOICES["autocast"])),
    "quantization": ("quantization", list(CHOICES["quantization"])),
    "lora_rank": ("LoRA rank", [None, 4, 8, 16, 32, 64, 128]),
    "optim": ("optimizer", list(CHOICES["optim"])),
    "attn_implementation": ("attention", list(CHOICES["attn_implementation"])),
    "logits": ("logits", list(CHOICES["logits"])),
    "activation_checkpointing": ("checkpointing", [False, True]),
    "beta": ("reference (beta)", [0.0, 0.001, 0.04]),
}
LENGTHS = {"max_prompt_length": ("prompt tokens", 16, 4096, 16), "max_completion_length": ("completion tokens", 64, 8192, 64)}
ORDER = ["model", "gpu", "num_generations", "max_prompt_length", "max_completion_length", *list(CHOSEN)[3:]]
NONE = "none"  # a Dropdown takes the value None for no choice at all
WORDS = {True: "on", False: "off"}


def explore(recipe: Recipe | None = None) -> Explorer:
    """Sliders that start at ``recipe`` (the course's baseline if there is none).

    Leave the call as a cell's last line. ``.recipe`` is the present position, ``.close()`` ends it.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"explore takes a Recipe, not {type(recipe).__name__}: make one with Recipe(model=...)")
    return Explorer(Recipe.preset("baseline") if recipe is None else recipe)


class Explorer:
    """What `explore` returns: ``controls`` (field -> widget), ``recipe``, ``estimate``, ``problem`` where there is none."""

    def __init__(self, recipe: Recipe) -> None:
        self.start, self.recipe, self.problem = recipe, recipe, ""
        self.pinned: Estimate | None = None
        self.controls = {name: _control(name, getattr(recipe, name)) for name in ORDER}
        self._verdict, self._picture, self._table, self._most, self._lines = (widgets.HTML() for _ in range(5))
        self._simulated = widgets.HTML()
        self.pin = widgets.Button(description="pin this", tooltip="keep this position and compare the next ones with it")
        self.simulate = widgets.Button(description="simulate this", tooltip="check the formula with the instrument")
        self.pin.on_click(self._on_pin)
        self.simulate.on_click(self._on_simulate)
        for control in self.controls.values():
            control.observe(self._on_change, "value")
        self.box = self._laid_out()
        self.closed = False
        self._show()

    @property
    def estimate(self) -> Estimate | None:
        return None if self.problem else _estimate(self.recipe)

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
            _estimate(recipe)
        except (ValueError, TypeError, NotImplementedError) as error:
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

        self.simulate.disabled, self._simulated.value = True, "<i>simulating: the real step, some seconds ...</i>"
        try:
            report, formula = simulate(self.recipe), self.estimate
            verdict = "fits" if report.fits else "does not fit"
            self._simulated.value = (
                f"<b>simulated</b>: {human(report.peak_allocated)} allocated ({human(report.peak_reserved)} reserved), "
                f"{verdict}; the formula said {human(formula.peak_allocated)}, "
                f"{formula.peak_allocated / report.peak_allocated - 1:+.1%}")  # fmt: skip
        except Exception as error:  # shown where it was asked for: a traceback of a callback goes to a log
            self._simulated.value = f"<b>not simulated</b>: {escape(str(error))}"
        finally:
            self.simulate.disabled = False

    # ---- what is seen -----------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self._verdict.value = self.verdict_html()
        if self.problem:  # the last good position stays in sight
            return
        self._picture.value, self._table.value = self.picture_html(), self.table_html()
        self._most.value, self._lines.value = most_html(self.recipe), lines_html(self.recipe)

    def verdict_html(self) -> str:
        """One sentence, announced by screen readers."""
        if self.problem:
            words, colour = f"These don't go together: {self.problem}", "#8a6d00"
        else:
            found = self.estimate
            left = found.budget - found.peak_reserved
            words = (f"It fits: about {human(found.peak_reserved)} of {human(found.budget)} at the peak, in {found.peak_phase}; "
                     f"{human(left)} are left." if left >= 0 else
                     f"It does not fit: about {human(found.peak_reserved)} at the peak, in {found.peak_phase}; the card has "
                     f"{human(found.budget)}.")  # fmt: skip
            colour = "#005a32" if left >= 0 else "#a50f15"
        return (f'<div role="status" aria-live="polite" style="border-left:6px solid {colour};padding:4px 10px;'
                f'line-height:1.4"><b>{escape(words)}</b></div>')  # fmt: skip

    def picture_html(self) -> str:
        found = self.estimate
        phases = {name: found.by_category(name) for name in found.moments}
        before = None if self.pinned is None else {n: m.bytes for n, m in self.pinned.moments.items()}
        text = ", ".join(f"{name} {human(moment.bytes)}" for name, moment in found.moments.items())
        return picture(phases, found.budget, f"Estimated bytes by phase: {text}; the card has {human(found.budget)}.", before)

    def table_html(self) -> str:
        """The picture in numbers: the peak by category, beside the pinned position's."""
        found, pinned = self.estimate, self.pinned
        rows = {name: (nbytes, None) for name, nbytes in found.by_category().items()}
        if pinned is not None:
            old = pinned.by_category()
            rows = {name: (rows.get(name, (0,))[0], old.get(name, 0)) for name in [*rows, *(n for n in old if n not in rows)]}
        rows["sum"] = (found.peak_allocated, None if pinned is None else pinned.peak_allocated)
        head = f"<tr><th>peak, in {escape(found.peak_phase)}</th><th>now</th>" + ("<th>pinned</th>" if pinned else "") + "</tr>"
        body = "".join(f"<tr><td>{escape(name)}</td><td>{human(now)}</td>"
                       + (f"<td>{human(before)}</td>" if before is not None else "") + "</tr>"
                       for name, (now, before) in rows.items())  # fmt: skip
        return f'<table style="text-align:right;border-spacing:8px 1px;white-space:nowrap;line-height:1.3">{head}{body}</table>'

    def static_html(self) -> str:
        """For where no kernel runs."""
        return (f"<div>{self.verdict_html()}{self.picture_html()}{self.table_html()}{most_html(self.recipe)}"
                f"{lines_html(self.recipe)}<p><i>Run the cell for the sliders.</i></p></div>")  # fmt: skip

    def _laid_out(self) -> widgets.VBox:
        why = "activation_offload and optimizer_offload are not available in this version"
        offload = widgets.Dropdown(options=["not available yet"], description="offload", disabled=True, tooltip=why,
                                   style={"description_width": "130px"}, layout=widgets.Layout(width="auto"))  # fmt: skip
        grid = widgets.GridBox([*self.controls.values(), offload], layout=widgets.Layout(
            grid_template_columns="repeat(3, minmax(0, 1fr))", grid_gap="2px 10px", width="100%"))  # fmt: skip
        right = widgets.VBox([self._table, self._most], layout=widgets.Layout(width="36%", padding="0 0 0 10px"))
        self._picture.layout.width = "64%"
        middle = widgets.HBox([self._picture, right])
        buttons = widgets.HBox([self.pin, self.simulate, self._simulated])
        return widgets.VBox([grid, self._verdict, middle, buttons, self._lines], layout=widgets.Layout(max_width="960px"))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        text = {"text/plain": str(self), "text/html": self.static_html()}
        if self.closed:
            return text
        from IPython.display import display

        display({"text/html": NAME_SLIDERS, "text/plain": ""}, raw=True)
        return {**self.box._repr_mimebundle_(), **text}

    def __repr__(self) -> str:
        return f"explore({self.recipe!r}): {self.problem or self.estimate}"


def _control(name: str, value: Any) -> widgets.Widget:
    style, layout = {"description_width": "130px"}, widgets.Layout(width="auto")
    if name in LENGTHS:
        label, low, high, step = LENGTHS[name]
        return widgets.IntSlider(value=value, min=min(low, value), max=max(high, value), step=step, description=label,
                                 tooltip=label, style=style, layout=layout, continuous_update=True)  # fmt: skip
    label, options = CHOSEN[name]
    options = [NONE if option is None else option for option in options]
    value = NONE if value is None else value
    if value not in options:
        options.append(value)
    shown = [(WORDS[option] if isinstance(option, bool) else str(option), option) for option in options]
    return widgets.Dropdown(options=shown, value=value, description=label, tooltip=label, style=style, layout=layout)


@functools.lru_cache(512)
def _estimate(recipe: Recipe) -> Estimate:
    return estimate(recipe)


@functools.lru_cache(256)
def most_that_fits(recipe: Recipe) -> dict[str, Any]:
    """The longest completion, the largest micro-batch and the largest model with which it would fit, the rest as it is.

    >>> most_that_fits(Recipe.preset("laptop_8gb"))["micro-batch"] >= 1
    True
    """
    def fits(**fields: Any) -> bool:
        try:
            return _estimate(recipe.replace(**fields)).fits
        except ValueError:
            return False

    by_size = sorted((name for name in models.names() if name != "tiny"), key=lambda n: -models.architecture(n).parameters)
    batches = [size for size in reversed(POWERS) if fits(per_device_train_batch_size=size)]
    return {"completion tokens": longest_completion(recipe), "micro-batch": batches[0] if batches else None,
            "model": next((name for name in by_size if fits(model=name)), None)}  # fmt: skip


def most_html(recipe: Recipe) -> str:
    items = "".join(f"<li>{name}: <b>{'none' if value is None else f'{value:,}' if isinstance(value, int) else escape(value)}"
                    "</b></li>" for name, value in most_that_fits(recipe).items())  # fmt: skip
    return f"<div style='line-height:1.4'>The most that would fit, each alone:<ul style='margin:0'>{items}</ul></div>"


def lines_html(recipe: Recipe) -> str:
    return (f"<details open><summary>the same in TRL and PEFT</summary><pre style='line-height:1.3'>{escape(trl_lines(recipe))}"
            "</pre></details>")  # fmt: skip
