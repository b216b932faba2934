"""The search for the largest micro-batch, on small budgets whose steps are really simulated."""

import functools
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from grpo_lab import Recipe, simulation
from grpo_lab.batch_search import find_batch_size

MiB = 2**20
TINY = Recipe(model="tiny", gpu=64 * MiB, max_prompt_length=16, max_completion_length=240, num_generations=4,
              per_device_train_batch_size=32, gradient_accumulation_steps=2)  # fmt: skip
simulate = functools.cache(simulation.simulate)
COLUMNS = ["per_device_train_batch_size", "how", "peak_reserved", "fits"]


def search(recipe=TINY, **options):
    return find_batch_size(recipe, progress=False, **options)


def size(found):
    return 0 if found.recipe is None else found.recipe.per_device_train_batch_size


@pytest.fixture(scope="module", autouse=True)
def each_simulated_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "simulate", simulate)
        yield


@pytest.fixture(scope="module")
def divisors():
    return search()


@pytest.fixture(scope="module")
def groups():
    return search(keep_effective=False)


def test_what_is_found_fits_and_the_next_does_not(divisors):
    found = divisors.recipe
    assert simulate(found).fits
    larger = next(n for n in (1, 2, 4, 8, 16, 32, 64) if n > size(divisors))
    next_one = found.replace(per_device_train_batch_size=larger, gradient_accumulation_steps=64 // larger)
    assert not simulate(next_one).fits


def test_the_batch_stays_as_it_was(divisors):
    found = divisors.recipe
    assert found.per_device_train_batch_size * found.gradient_accumulation_steps == 64
    assert found.generation_batch_size == TINY.generation_batch_size
    changed = {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert {name for name in found.changes() if found.changes()[name] != TINY.changes().get(name)} <= changed


def test_without_that_the_batch_grows_in_whole_groups(groups):
    found = groups.recipe
    assert found.gradient_accumulation_steps == 2
    unit = 2  # 2 x 2 completions make a group of 4
    assert found.per_device_train_batch_size % unit == 0 and found.generation_batch_size % 4 == 0
    assert simulate(found).fits
    assert not simulate(found.replace(per_device_train_batch_size=size(groups) + unit)).fits


def test_tries_tell_how_each_size_was_judged(groups):
    tries = groups.tries
    assert list(tries.columns) == COLUMNS and set(tries["how"]) == {"estimated", "simulated"}
    simulated = tries[tries["how"] == "simulated"].set_index("per_device_train_batch_size")
    assert 2 <= len(simulated) <= 6
    assert simulated.loc[size(groups), "peak_reserved"] == simulate(groups.recipe).peak_reserved
    assert (simulated["fits"] == (simulated["peak_reserved"] <= 64 * MiB)).all()


def test_a_larger_card_takes_no_smaller_batch():
    sizes = [size(search(gpu=n * MiB)) for n in (64, 96, 160)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_steps_per_generation_follows():
    start = TINY.replace(steps_per_generation=4)
    found = search(start).recipe
    assert found.generation_batch_size == start.generation_batch_size
    assert found.steps_per_generation == 2 * found.gradient_accumulation_steps


def test_a_whole_batch_is_not_missed():
    """It keeps no gradients of an earlier micro-batch beside its activations: it may take less than its half."""
    start = Recipe(model="SmolLM2-135M", dtype="float32", num_generations=2, per_device_train_batch_size=2,
                   max_prompt_length=8, max_completion_length=8, optim="sgd")  # fmt: skip
    half = start.replace(per_device_train_batch_size=1, gradient_accumulation_steps=2)
    whole, accumulated = simulate(start).peak_reserved, simulate(half).peak_reserved
    assert whole < accumulated
    assert search(half, gpu=(whole + accumulated) // 2).recipe == start.replace(gpu=(whole + accumulated) // 2)


def test_where_nothing_fits_it_says_so():
    found = search(Recipe(model="Qwen2.5-7B", gpu="8GB"))
    assert found.recipe is None and not found.tries["fits"].any()
    assert set(found.tries["how"]) == {"estimated"}
    assert "no size fits" in repr(found) and "advise" in repr(found)
    assert "advise" in found._repr_html_()


def test_where_the_formula_is_in_doubt_it_simulates_before_it_says_no():
    start = TINY.replace(max_completion_length=3000, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    found = search(start)
    assert found.recipe is None and "no size fits" in repr(found)
    assert "(simulated)" in repr(found) and "simulated" in set(found.tries["how"])


class Card:
    """Runs out of memory above so many rows, and notes whether what an earlier try had made is still there."""

    def __init__(self, most):
        self.most, self.made, self.left = most, [], 0

    def __call__(self, recipe):
        self.left += sum(made() is not None for made in self.made)
        activations = torch.zeros(1000)
        self.made.append(weakref.ref(activations))
        if recipe.per_device_train_batch_size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. ")
        return SimpleNamespace(peak_reserved=len(activations))


@pytest.mark.parametrize("less", [0, 1, 6])
def test_it_goes_down_after_each_out_of_memory_and_keeps_nothing(groups, less):
    most = max(2, size(groups) - 2 * less)
    card = Card(most)
    found = search(keep_effective=False, attempt=card)
    assert size(found) == most and card.left == 0
    measured = found.tries[found.tries["how"] == "measured"]
    assert len(measured) == len(card.made) <= 1 + 2 * less
    assert measured.loc[~measured["fits"], "peak_reserved"].isna().all()
    assert "measured" in repr(found) and ("out of memory" in repr(found)) == (less > 0)


def test_an_attempt_that_runs_but_takes_too_much_does_not_fit(divisors):
    found = search(attempt=lambda recipe: SimpleNamespace(peak_reserved=recipe.per_device_train_batch_size * 20 * MiB))
    assert size(found) == min(2, size(divisors))


def test_no_try_for_real_succeeds():
    found = search(attempt=Card(0))
    assert found.recipe is None and "runs out of memory (measured)" in repr(found)


def test_other_errors_of_an_attempt_come_through():
    def broken(recipe):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        search(attempt=broken)


def test_it_shows_itself(divisors):
    text, html = repr(divisors), divisors._repr_html_()
    assert f"per_device_train_batch_size={size(divisors)}" in text
    assert "64 completions an optimizer step (as before)" in text
    assert "64.0 MiB" in text and "(simulated)" in text and "tries: 7 estimated, 2 simulated" in text
    assert "<table" in html and "simulated" in html


@pytest.mark.parametrize(("arguments", "error", "words"), [
    (("tiny",), TypeError, "takes a Recipe, not str"),
    ((TINY, {"keep_effective": 8}), TypeError, "keep_effective=8 must be True or False"),
    ((TINY, {"attempt": 3}), TypeError, "attempt=3 must be a function"),
    ((TINY, {"model": "tiny"}), TypeError, "models.load"),
    ((TINY, {"gpu": "RTX 3080 Laptop"}), ValueError, "8GB"),
    ((TINY.replace(micro_batch_tokens=512),), ValueError, "micro_batch_tokens=None"),
])  # fmt: skip
def test_a_wrong_input_is_named(arguments, error, words):
    recipe, options = (*arguments, {})[:2]
    with pytest.raises(error, match=words):
        search(recipe, **options)


def test_to_import_it_takes_no_torch():
    code = "import grpo_lab.batch_search, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_on_a_card_it_is_tried_for_real():
    from grpo_lab import models

    model, _ = models.load("tiny", dtype="bfloat16")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = search(model=model, keep_effective=False)
    assert "measured" in set(found.tries["how"])
    assert found.recipe is None or found.tries.iloc[-1]["peak_reserved"] <= 64 * MiB
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
