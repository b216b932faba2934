"""What `advise` proposes: in order, no more than needed, and checked by the instrument."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab import Recipe, advice, estimate, gpus, models
from grpo_lab._advice_search import search
from grpo_lab._ladder import RUNGS, SHORTEST, forgotten_dtype, steps
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
        fields = {k: v for other in found.taken if other is not taken for k, v in other.change.fields.items()}
        try:
            without = found.start.replace(**fields)
        except ValueError:
            continue
        lower = estimate(without).peak_allocated > estimate(found.recipe).peak_allocated
        assert (not estimate(without).fits or forgotten_dtype(without) is not None
                or (taken.change.keep and lower)), taken.change.what


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["Qwen3-8B", "Llama-3.1-8B", "Qwen2.5-3B"]), st.sampled_from(["T4", "RTX 3080 Laptop 16GB", 2**34]),
       st.sampled_from(["float32", "bfloat16"]), st.sampled_from([None, 16]), st.sampled_from([256, 4096]),
       st.booleans())  # fmt: skip
def test_four_bit_weights_are_never_multiplied_in_float32(model, gpu, dtype, rank, length, quantized):
    """The trap of unslothai/unsloth#944, laid by the advice itself: 4-bit weights on a card without bfloat16, and where
    the step to 16 bits turned out not to be needed for the bytes."""
    recipe = Recipe(model=model, gpu="A100 80GB", dtype=dtype, lora_rank=rank, max_completion_length=length,
                    quantization="nf4" if quantized and rank else None)
    found = advise(recipe, gpu, verify=False)
    if found.taken:
        assert forgotten_dtype(found.recipe) is None
    if dtype == "bfloat16":                                                    # it was asked for 16 bits
        assert forgotten_dtype(found.start) is None


@pytest.mark.parametrize("size, group, micro", [(9, 3, 1), (15, 5, 1), (7, 7, 1)])
def test_an_odd_micro_batch_is_split_too(size, group, micro):
    recipe = Recipe(num_generations=group, per_device_train_batch_size=size, logits="chunked", logits_chunk_size=256,
                    optim="adamw_torch_fused", max_completion_length=1024, gpu="A100 80GB")
    small = recipe.replace(per_device_train_batch_size=micro, gradient_accumulation_steps=size // micro)
    found = advise(recipe, estimate(small).peak_reserved, verify=False)
    assert [taken.change.kind for taken in found.taken] == ["free"]
    assert found.recipe.per_device_train_batch_size * found.recipe.gradient_accumulation_steps == size


def test_the_search_keeps_within_the_budget_that_it_is_given():
    """Once the instrument had refused an answer, the next budget was below the card's, and phases between the two were
    held to fit: no change helped, and nothing was found where cheap changes would have done."""
    recipe = Recipe(gpu="A100 80GB", max_completion_length=512)
    budget = estimate(recipe).peak_reserved * 3 // 4
    found, taken, _ = search(recipe, budget)
    assert estimate(found).peak_reserved <= budget < recipe.card.budget
    assert {t.change.kind for t in taken} == {"free"}


def test_a_step_that_does_not_lower_the_peak_says_which_phase_it_lowers():
    found = advise(BASELINE, verify=False)
    for taken in found.taken:
        assert taken.phase_before > taken.phase_after or "nothing alone" in taken.effect
        assert ("at the peak yet" in taken.effect) == (taken.before <= taken.after and taken.phase_before > taken.phase_after)
    assert any(taken.before > taken.after for taken in found.taken)


def test_the_task_is_changed_last_and_never_silently():
    found = advise(Recipe(model="Qwen3-8B", gpu="RTX 3080 Laptop 8GB", max_completion_length=32_768), verify=False)
    assert found.changes_task and found.changes["kind"].iloc[-1] == "task"
    assert "Careful: this changes what you asked for" in found.text
    assert "Careful: this changes what you asked for" in found._repr_html_()


def test_where_nothing_fits_it_says_what_the_least_would_need():
    found = advise(Recipe(model="Qwen2.5-14B", gpu=2**28), verify=False)
    assert not found.fits and found.recipe is None and found.verified is None
    assert found.least > 2**28 and "The smallest card that would do is" in found.text
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


@pytest.mark.parametrize("fields, words", [
    ({"optim": "paged_adamw_8bit"}, "AdamW's states whole"),
    ({"quantization": "nf4", "lora_rank": 8}, "16 bits instead of 4"),
    ({"lora_rank": 8}, "every weight trained"),
    ({"activation_checkpointing": True}, "no activation checkpointing"),
    ({"rollout_batch_size": 2}, "all sequences generated at once"),
    ({}, "weights in float32"),
    ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 8}, "without accumulation"),
    ({}, "64 answers a prompt: 8 times the completions"),
])  # fmt: skip
def test_all_that_the_ladder_turns_on_can_be_turned_back_off(fields, words):
    recipe = Recipe(model="Qwen2.5-0.5B", gpu="H200", **fields)
    found = advise(recipe, verify=False)
    (looser,) = [r for what, r in found.room if words in what]
    assert looser != recipe and estimate(looser).fits
    if "answers" not in words:
        assert looser.generation_batch_size == recipe.generation_batch_size


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


def test_full_training_is_kept_where_the_host_can_help():
    """Nothing that changes learning more than host memory does comes before it."""
    found = advise(Recipe.preset("laptop_16gb", model="Qwen2.5-7B", gpu="RTX 4090"), verify=False)
    assert found.fits and found.recipe.lora_rank is None and found.recipe.optimizer_offload
    assert "GiB of host memory" in found.text and "ZeRO-Offload" in found.text


def test_checkpoints_go_to_the_host_where_they_are_what_is_too_much():
    long = Recipe(model="Llama-3.1-8B", gpu="RTX 4090", quantization="nf4_double", lora_rank=16, num_generations=8,
                  per_device_train_batch_size=1, gradient_accumulation_steps=8, max_prompt_length=480,
                  max_completion_length=36_000, lora_dtype="bfloat16", logits="chunked", logits_chunk_size=256, activation_checkpointing=True,
                  rollout_batch_size=1)
    found = advise(long, verify=False)
    assert found.fits and found.recipe.activation_offload and found.recipe.max_completion_length == 36_000
