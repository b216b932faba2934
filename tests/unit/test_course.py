"""What the notebooks share."""

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab import Recipe, course


def test_the_stages_lead_from_the_baseline_to_the_last_recipe():
    """The course promises that its last notebook's recipe is the preset for 8 GB."""
    recipes = course.stages("10")
    assert recipes[0] == Recipe.preset("baseline")
    assert recipes[-1].replace(gpu="RTX 3080 Laptop 8GB") == Recipe.preset("laptop_8gb")


def test_each_stage_changes_something_and_keeps_the_update_the_same_size():
    recipes = course.stages("17")
    for before, after in zip(recipes, recipes[1:]):
        assert before != after
        assert after.generation_batch_size == before.generation_batch_size
        assert after.num_generations == before.num_generations


@pytest.mark.parametrize("upto, count", [("02", 1), (2, 1), ("03", 1), ("07", 5), (7, 5), ("17", 8)])
def test_stages_up_to_a_notebook(upto, count):
    assert len(course.stages(upto)) == count


@pytest.mark.parametrize("upto", ["01", 0, "seven", ""])
def test_a_notebook_before_the_first_stage_is_refused(upto):
    with pytest.raises(ValueError, match="upto=.*they come with 02, 04"):
        course.stages(upto)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The recipes that the simulator was asked for; its numbers tell the calls apart."""
    calls = []

    def simulate(recipe):
        calls.append(recipe)
        owners = {"parameters": 10 * len(calls), ("logits" if len(calls) == 1 else "KV cache"): 3}
        return SimpleNamespace(peak_allocated=100 - len(calls), peak_reserved=100, fits=len(calls) > 1,
                               categories=pd.DataFrame({"bytes": owners}))

    monkeypatch.setattr(importlib.import_module("grpo_lab.simulation"), "simulate", simulate)
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    return calls


def test_waterfall_asks_the_simulator_for_each_stage_once(asked):
    table = course.waterfall("04", progress=False)
    assert course.waterfall("04", progress=False).equals(table)
    assert asked == course.stages("04")
    assert table["label"].tolist() == ["baseline", "+ micro-batches of one"]
    assert table["fits"].tolist() == [False, True]
    assert table[["parameters", "logits", "KV cache"]].values.tolist() == [[10, 3, 0], [20, 0, 3]]
    assert all(table[name].dtype == "int64" for name in ("peak_allocated", "logits", "KV cache"))


def test_a_changed_package_is_simulated_again(asked, monkeypatch):
    """A number kept from an older version of the code would be a hard-coded number."""
    course.waterfall("02", progress=False)
    monkeypatch.setattr(course, "_what_simulates", lambda: ("another version",))
    course.waterfall("02", progress=False)
    assert len(asked) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(asked, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "file" / "cache"))
    assert len(course.waterfall("02", progress=False)) == 1


def test_a_guess_is_a_slider_with_words_for_those_who_have_no_kernel():
    made = course.guess("How much?", 0, 40, start=10)
    assert made.value == 10 and made.slider.step == 0.4
    made.slider.value = 30
    assert made.value == 30
    bundle = made._repr_mimebundle_()
    assert bundle["text/plain"] == "How much?  0 |---------------o-----| 40 GiB"
    assert "How much?" in bundle["text/html"] and "application/vnd.jupyter.widget-view+json" in bundle


def test_a_slider_s_handle_gets_a_name(capsys):
    """ipywidgets gives the focusable handle none; the script takes the tooltip's text for it."""
    made = course.guess("How much?", 0, 1)
    assert made.slider.tooltip == "How much? (GiB)"
    assert "aria-label" in course.NAME_SLIDERS and "title" in course.NAME_SLIDERS


def test_a_guess_needs_a_range():
    with pytest.raises(ValueError, match="low=3 must be below high=3"):
        course.guess("How much?", 3, 3)


@pytest.mark.parametrize("start, says", [
    (20, "Your guess: 20 GiB. It is 60 GiB, 3.0 times your guess."),
    (60, "Your guess: 60 GiB. It is 60 GiB: within a tenth."),
    (90, "Your guess: 90 GiB. It is 60 GiB; your guess is 1.5 times that."),
    (0, "Your guess: 0 GiB. It is 60 GiB."),
])
def test_reveal(start, says, capsys):
    made = course.guess("How much?", 0, 100, start=start)
    capsys.readouterr()
    course.reveal(made, 60)
    assert capsys.readouterr().out == says + "\n"


@pytest.mark.parametrize("answer, expected", [
    (4, 4), (4.001, 4), (torch.tensor(4.0), 4), (np.float32(4), 4.0), ("logits", "logits"), (True, True),
    ([1, 2], [1, 2]), (torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])),
    ([1.0, -1.0], np.array([1.0, -1.0])),
    (7, lambda x: x % 2 == 1), (0, 0), (Recipe(beta=0.1), Recipe(beta=0.1)),
])
def test_a_right_answer_is_said_to_be_right(answer, expected, capsys):
    course.check(answer, expected)
    assert capsys.readouterr().out.startswith("Right: ")


@pytest.mark.parametrize("answer, expected", [
    (4.1, 4), (math.nan, 4), ("4", 4), (True, 1), (1, True), ([1, 2, 3], [1, 2]), ("Logits", "logits"),
    (0.1, 0),
    (torch.tensor([1.0]), torch.tensor([1.0, -1.0])), ("one", np.array([1.0])), (8, lambda x: x % 2 == 1),
    ([1.0, -1.2], np.array([1.0, -1.0])), ([4], 4),
])
def test_a_wrong_answer_gets_the_hint(answer, expected):
    with pytest.raises(course.NotYet, match="Not yet: .* Count the bytes."):
        course.check(answer, expected, hint="Count the bytes.")


def test_an_unanswered_exercise_does_not_stop_the_notebook(capsys):
    course.check(..., 4, hint="secret")
    assert capsys.readouterr().out.startswith("Your turn")


def test_a_wrong_answer_does_not_give_the_right_one_away():
    with pytest.raises(course.NotYet) as caught:
        course.check(1, 123456)
    assert "123456" not in str(caught.value)
    assert caught.value._render_traceback_() == [str(caught.value)]


@given(st.floats(0.001, 1e12), st.floats(-0.5, 0.5))
def test_the_tolerance_is_relative_to_what_is_expected(expected, error):
    right = abs(error) <= 0.01
    if abs(abs(error) - 0.01) < 1e-6:
        return
    if right:
        course.check(expected * (1 + error), expected, rel=0.01)
    else:
        with pytest.raises(course.NotYet):
            course.check(expected * (1 + error), expected, rel=0.01)
