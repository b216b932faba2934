"""What `advise` proposes: in order, no more than needed, and checked by the instrument."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab import Recipe, advice, estimate, gpus, models
from grpo_lab._ladder import RUNGS, SHORTEST, steps
from grpo_lab.advice import advise, longest_completion

ORDER = ["free", "time", "precision", "optimizer", "adapters", "task"]
BASELINE = Recipe.preset("baseline")


@pytest.mark.parametrize("gpu", ["RTX 3080 Laptop 16GB", "RTX 3080 Laptop 8GB"])
def test_the_baseline_comes_to_fit_and_the_instrument_agrees(gpu):
    found = advise(BASELINE, gpu)
    assert found.fits and found.verified.fits and not found.changes_task
    assert found.recipe.card.name == gpu
    kinds = [ORDER.index(kind) for kind in found.changes["kind"]]
    assert kinds == sorted(kinds)
    assert found.start.replace(**{k: v for taken in found.taken for k, v in taken.change.fields.items()}) == found.recipe
    first, last = found.taken[0], found.taken[-1]
    assert first.before == estimate(found.start).peak_allocated and last.after == estimate(found.recipe).peak_allocated
    assert found.changes["saves"].sum() == first.before - last.after
    assert found.text.splitlines()[-1].startswith("Simulated with these: ")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([name for name in models.names() if name != "tiny"]), st.sampled_from(gpus.names()),
       st.sampled_from([64, 1024, 8192]), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([0.0, 0.04]),
       st.sampled_from([None, 16]))  # fmt: skip
def test_what_is_proposed_fits_by_the_formula_and_every_paid_step_is_needed(model, gpu, length, dtype, beta, rank):
    recipe = Recipe(model=model, gpu="A100 80GB", max_completion_length=length, dtype=dtype, beta=beta, lora_rank=rank)
    found = advise(recipe, gpu, verify=False)
    assert found.least > 0
    if not found.fits:
        assert found.taken == () and "nothing that was tried" in found.text
        return
    assert estimate(found.recipe).fits
    assert found.recipe.generation_batch_size == recipe.generation_batch_size       # nothing of it was rewritten
    updates = [r.per_device_train_batch_size * r.gradient_accumulation_steps for r in (recipe, found.recipe)]
    assert updates[0] == updates[1]
    if not found.changes_task:
        for name in ("model", "max_completion_length", "max_prompt_length", "num_generations"):
            assert getattr(found.recipe, name) == getattr(recipe, name)
    for taken in found.taken:
        if taken.change.keep:
            continue
        fields = {k: v for other in found.taken if other is not taken for k, v in other.change.fields.items()}
        try:
            without = found.start.replace(**fields)
        except ValueError:
            continue
        assert not estimate(without).fits, taken.change.what


def test_the_task_is_changed_last_and_never_silently():
    found = advise(Recipe(model="Qwen3-8B", gpu="RTX 3080 Laptop 8GB", max_completion_length=32_768), verify=False)
    assert found.changes_task and found.changes["kind"].iloc[-1] == "task"
    assert "Careful: this changes what you asked for" in found.text


def test_where_nothing_fits_it_says_what_the_least_would_need():
    found = advise(Recipe(model="Qwen2.5-14B", gpu=2**30), verify=False)
    assert not found.fits and found.recipe is None and found.verified is None
    assert found.least > 2**30 and "The smallest card that would do is" in found.text
    assert len(found.changes) == 0


def test_where_there_is_room_it_says_for_what():
    recipe = Recipe.preset("laptop_8gb")
    found = advise(recipe, verify=False)
    assert found.recipe == recipe and found.taken == ()
    assert all(estimate(looser).fits for _, looser in found.room)
    (longest,) = [r.max_completion_length for what, r in found.room if "completions of up to" in what]
    assert not estimate(recipe.replace(max_completion_length=longest + 1)).fits
    assert longest_completion(recipe) == longest
    assert "There is room for one of these" in found.text


def test_no_room_for_a_single_token():
    assert longest_completion(Recipe(model="Qwen3-8B", gpu=2**30)) is None


def test_a_card_without_bfloat16_gets_none():
    """unslothai/unsloth#2783: bfloat16 was proposed on a T4, which has none."""
    found = advise(Recipe.preset("baseline", dtype="bfloat16"), "T4", verify=False)
    assert "T4 has no bfloat16" in found.text
    assert found.fits and "bfloat16" not in (found.recipe.dtype, found.recipe.autocast, found.recipe.lora_dtype)


def test_if_the_instrument_disagrees_the_search_goes_on(monkeypatch):
    """The formula may say yes where the instrument says no."""
    real, asked = advice.estimate, []

    def simulate(recipe, **_):
        from types import SimpleNamespace

        asked.append(recipe)
        size = real(recipe).peak_allocated + 2**30
        return SimpleNamespace(peak_allocated=size, peak_reserved=size, fits=size < 15 * 2**30)

    monkeypatch.setattr("grpo_lab.simulation.simulate", simulate)
    found = advise(BASELINE)
    assert found.disagreed == len(asked) - 1 and len(set(asked)) == len(asked)
    assert found.verified.fits if found.fits else len(asked) == advice.TRIES


def test_every_rung_comes_to_an_end():
    for rung in RUNGS:
        recipe, count = Recipe.preset("baseline", num_generations=8, max_completion_length=2048), 0
        while (change := rung(recipe)) is not None and count < 50:
            recipe, count = recipe.replace(**change.fields), count + 1
            assert change.cost and change.trl and change.why and change.kind in ORDER
        assert count < 50
    assert recipe.max_completion_length >= SHORTEST
    assert [change.kind for change in steps(BASELINE)] == sorted((c.kind for c in steps(BASELINE)), key=ORDER.index)


def test_html_says_the_same():
    html = advise(BASELINE, verify=False)._repr_html_()
    assert "chunked logits" in html and "GRPOConfig(" in html and "does not fit" in html


@pytest.mark.parametrize("recipe, gpu, error, words", [
    ("baseline", None, TypeError, "advise takes a Recipe, not str"),
    (BASELINE, "RTX 3099", ValueError, "not a card"),
    (BASELINE, -5, ValueError, "budget"),
])  # fmt: skip
def test_bad_input(recipe, gpu, error, words):
    with pytest.raises(error, match=words):
        advise(recipe, gpu)


def test_a_billion_tokens_are_answered():
    found = advise(Recipe(max_completion_length=10**9), verify=False)
    assert found.changes_task or not found.fits


def test_offloads_that_aren_t_there_yet_are_left_out():
    recipe = Recipe.preset("laptop_8gb", activation_offload=True)
    found = advise(recipe, verify=False)
    assert not found.recipe.activation_offload and found.text.startswith("Offloads are not available")
