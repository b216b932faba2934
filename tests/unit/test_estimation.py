"""The closed form against the instrument, on a fixed sample; the whole is scripts/bench_estimate.py."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab import Recipe, estimate, models, simulate
from grpo_lab.formula import shape
from grpo_lab.formula.step import play
from grpo_lab.formula.tape import MiB, Tape, Term, kept_beyond

SMALL = {"max_prompt_length": 64, "max_completion_length": 192, "num_generations": 4, "per_device_train_batch_size": 4}
LORA = {"lora_rank": 16}
# (fields, most that the peak may be off): every branch of the formula is taken by one of them.
SAMPLE = {
    "16 bits": {},
    "float32, reference, accumulation": {"dtype": "float32", "beta": 0.04, "gradient_accumulation_steps": 2},
    "autocast": {"dtype": "float32", "autocast": "bfloat16"},
    "autocast, checkpointed, chunked": {"dtype": "float32", "autocast": "bfloat16", "activation_checkpointing": True,
                                        "logits": "chunked", "logits_chunk_size": 128},
    "checkpointed, untied head": {"model": "TinyLlama-1.1B", "activation_checkpointing": True},
    "eager": {"attn_implementation": "eager", "optim": "adafactor"},
    "norms of queries and keys": {"model": "Qwen3-0.6B", "optim": "adamw_8bit"},
    "adapters, checkpointed": {**LORA, "activation_checkpointing": True, "gradient_accumulation_steps": 2},
    "adapters on attention, autocast": {**LORA, "lora_targets": ("q_proj", "v_proj"), "autocast": "bfloat16"},
    "NF4": {**LORA, "quantization": "nf4", "logits": "chunked"},
    "NF4 twice, float32 around it, autocast": {**LORA, "quantization": "nf4_double", "dtype": "float32",
                                               "autocast": "bfloat16", "activation_checkpointing": True},
}  # fmt: skip


def sample(name: str) -> Recipe:
    return Recipe(**{"model": "Qwen2.5-0.5B", "gpu": "RTX 3090", **SMALL, **SAMPLE[name]})


@pytest.mark.parametrize("name", SAMPLE)
def test_it_agrees_with_the_instrument(name):
    recipe = sample(name)
    simulated, estimated = simulate(recipe), estimate(recipe)
    assert list(estimated.phases.index) == list(simulated.phases.index)
    assert estimated.peak_allocated == pytest.approx(simulated.peak_allocated, rel=0.02)
    assert estimated.fits == simulated.fits
    phases = estimated.phases["peak_allocated"] / simulated.phases["peak_allocated"] - 1
    assert phases.abs().max() < 0.05, phases
    largest = simulated.categories.index[0]
    assert next(iter(estimated.by_category())) == largest
    assert estimated.by_category()[largest] == pytest.approx(simulated.categories.loc[largest, "bytes"], rel=0.06)


recipes = st.builds(
    lambda **fields: fields,
    model=st.sampled_from([name for name in models.names() if name != "tiny"]),
    dtype=st.sampled_from(["bfloat16", "float32"]), autocast=st.sampled_from([None, "bfloat16"]),
    lora_rank=st.sampled_from([None, 1, 64]), quantization=st.sampled_from([None, "nf4", "nf4_double"]),
    per_device_train_batch_size=st.sampled_from([1, 2, 8, 64]), gradient_accumulation_steps=st.sampled_from([1, 2, 16]),
    max_prompt_length=st.integers(1, 10_000), max_completion_length=st.integers(1, 100_000),
    logits=st.sampled_from(["full", "chunked"]), activation_checkpointing=st.booleans(),
    attn_implementation=st.sampled_from(["sdpa", "eager"]), beta=st.sampled_from([0.0, 0.1]),
    num_generations=st.sampled_from([2, 8]), num_iterations=st.sampled_from([1, 2]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(recipes)
def test_whatever_is_made_goes_and_what_stays_is_counted_in_every_phase(fields):
    """A forgotten `drop` would count a tensor for ever, one too many would raise."""
    try:
        recipe = Recipe(gpu="A100 80GB", **fields)
    except ValueError:
        return
    tape, s = play(recipe), shape.Shape(recipe)
    stays = [*shape.weights(s), *shape.reference(s), *shape.adapters(s), *shape.workspaces(s), *shape.states(s)]
    assert tape.bytes == sum(term.blocks for term in stays)
    assert all(moment.bytes >= tape.bytes for name, moment in tape.peaks.items() if name != "load")
    assert all(moment.bytes == sum(term.blocks for term in moment.terms) for moment in tape.peaks.values())


@settings(max_examples=60, deadline=None)
@given(recipes, st.sampled_from(["max_completion_length", "max_prompt_length", "per_device_train_batch_size"]))
def test_more_tokens_never_take_less(fields, name):
    try:
        recipe = Recipe(gpu="A100 80GB", **fields)
        more = recipe.replace(**{name: 2 * getattr(recipe, name)})
    except ValueError:
        return
    slack = 30 * MiB                                            # what blocks keep beyond their tensors
    assert estimate(more).peak_allocated >= estimate(recipe).peak_allocated * 0.99 - slack


def test_the_phases_are_those_that_the_recipe_has():
    phases = list(estimate(Recipe(beta=0.1, num_iterations=2)).moments)
    assert phases == ["load", "optimizer states", "rollout", "old log-probs", "reference log-probs", "forward",
                      "backward", "optimizer"]  # fmt: skip


def test_explain_adds_up_to_the_peak():
    report = estimate(sample("float32, reference, accumulation"))
    text = report.explain()
    assert "x 151,936 x 4 B = " in text and f"{report.peak_allocated / 2**30:.2f} GiB allocated" in text
    sizes = []
    for line in text.splitlines()[1:]:
        if line.startswith("sum"):
            break
        number, unit = line.rsplit(" ", 2)[-2:]
        sizes.append(float(number) * {"GiB": 2**30, "MiB": MiB}[unit])
    assert sum(sizes) == pytest.approx(report.peak_allocated, rel=0.005)
    assert report.explain("load").startswith("the fullest moment of phase 'load'")


def test_it_needs_no_torch():
    code = ("import sys, grpo_lab; r = grpo_lab.estimate(grpo_lab.Recipe()); r.explain(); r.phases; "
            "print('torch' in sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("recipe, error, words", [
    ({"model": "tiny"}, TypeError, "estimate takes a Recipe, not dict"),
])  # fmt: skip
def test_what_it_can_t_do_is_said(recipe, error, words):
    with pytest.raises(error, match=words):
        estimate(recipe)


def test_another_card_may_be_asked_for():
    recipe = Recipe(gpu="RTX 3080 Laptop 8GB")
    assert estimate(recipe, gpu="A100 80GB").card == "A100 80GB" and estimate(recipe).card == "RTX 3080 Laptop 8GB"
    with pytest.raises(ValueError, match="not a card"):
        estimate(recipe, gpu="RTX 9999")


def test_a_billion_tokens_are_only_a_number():
    report = estimate(Recipe(max_completion_length=10**9))
    assert not report.fits and report.peak_allocated > 10**15


def test_a_block_keeps_what_is_not_worth_splitting_off():
    assert [kept_beyond(size * MiB) for size in (1, 4, 19)] == [0, 0, MiB]
    assert Term("parameters", "weights", (19, MiB), 3).blocks == 60 * MiB


def test_a_tape_counts_users():
    tape = Tape()
    with tape.phase("forward"):
        x = tape.make("activations", "x", 100)
        tape.keep(x)
        tape.drop(x)
        assert tape.bytes == 100
        tape.drop(x, None)
    assert tape.bytes == 0 and tape.peaks["forward"].bytes == 100


LONG = dict(model="Qwen2.5-0.5B", gpu="RTX 3080 Laptop 16GB", per_device_train_batch_size=2, max_prompt_length=256,
            gradient_accumulation_steps=4, max_completion_length=512, logits="chunked", logits_chunk_size=64,
            activation_checkpointing=True, rollout_batch_size=4, optim="adamw_torch")
ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("changes", [
    {"activation_offload": True, "logits_chunk_size": 1024}, {"optimizer_offload": True}, {"master_weights": True},
    ONE | {"master_weights": True}, ONE | {"optimizer_in_backward": True}, {"micro_batch_tokens": 3 * 768 + 5},
    ONE | {"optimizer_in_backward": True, "logits": "full", "activation_checkpointing": False},
    {"beta": 0.1, "reference_offload": True, "optimizer_offload": True, "dtype": "float32"},
    {"lora_rank": 16, "activation_offload": True, "optimizer_offload": True},
], ids=lambda changes: ",".join(changes))  # fmt: skip
def test_host_memory_is_counted_as_the_instrument_counts_it(changes):
    recipe = Recipe(**LONG | changes)
    report, formula = simulate(recipe), estimate(recipe)
    assert formula.peak_allocated == pytest.approx(report.peak_allocated, rel=0.03)
    for phase in ("rollout", "forward", "backward", "optimizer"):
        assert formula.moments[phase].bytes == pytest.approx(report.phases.loc[phase, "peak_allocated"], rel=0.03)
