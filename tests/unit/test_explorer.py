"""The explorer without a browser: positions, what is said of impossible ones, pins, the lines to copy."""

import base64
import dataclasses
import re
from xml.etree import ElementTree

import ipywidgets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab import Recipe, estimate, models
from grpo_lab import _explorer_search as search
from grpo_lab._explorer_search import most_that_fits
from grpo_lab._explorer_text import picture_svg
from grpo_lab._trl_text import trl_lines
from grpo_lab.advice import longest_completion
from grpo_lab.explorer import CHOSEN, LENGTHS, explore
from grpo_lab.explorer_picture import LEFT, picture

LAPTOP = Recipe.preset("laptop_8gb")


def test_a_moved_control_is_another_recipe_and_everything_follows():
    made = explore(LAPTOP)
    verdict, picture_, table, lines = (part.value for part in (made._verdict, made._picture, made._table, made._lines))
    assert "It fits" in verdict and "of the 7.58 GiB" in verdict
    made.controls["max_completion_length"].value = 8192
    made.controls["lora_rank"].value = "none"
    assert made.recipe == LAPTOP.replace(max_completion_length=8192, lora_rank=None)
    assert "It does not fit" in made._verdict.value and "max_completion_length=8192" in made._lines.value
    assert "LoraConfig" in lines and "LoraConfig" not in made._lines.value
    assert made._picture.value != picture_ and made._table.value != table


def test_an_impossible_position_explains_itself_and_keeps_the_last_picture():
    made = explore(LAPTOP.replace(quantization="nf4"))
    before = made._picture.value
    made.controls["lora_rank"].value = "none"
    assert "nothing to train" in made.problem and "don&#x27;t go together" in made._verdict.value
    assert made._picture.value == before and made.estimate is None
    assert made.simulate.disabled and made.pin.disabled         # there is nothing that they could do
    made.controls["lora_rank"].value = 8
    assert made.problem == "" and made.recipe.lora_rank == 8


def test_a_pinned_position_stays_beside_the_next_ones():
    made = explore(LAPTOP)
    made.pin.click()
    made.controls["max_completion_length"].value = 4096
    assert "pinned" in made._table.value and 'stroke-dasharray="2 2"' in made._picture.value
    assert "completion tokens <b>1,024</b> → <b>4,096</b>" in made._compared.value
    made.pin.click()
    assert made.pinned is None and "pinned" not in made._table.value and made._compared.value == ""


def test_simulate_this_shows_both_numbers():
    made = explore(Recipe(model="SmolLM2-135M", gpu="RTX 3090", max_completion_length=64, max_prompt_length=16))
    made.simulate.click()
    assert re.search(r"<b>simulated</b>: .* the formula said .*%", made._simulated.value)
    assert not made.simulate.disabled
    made.controls["beta"].value = 0.04
    assert made._simulated.value == ""                          # it was of another position


def test_what_the_instrument_can_t_do_is_shown_and_not_raised(monkeypatch):
    def fails(recipe):
        raise RuntimeError("no room")

    monkeypatch.setattr("grpo_lab.simulation.simulate", fails)
    made = explore(LAPTOP)
    made.simulate.click()
    assert "not simulated</b>: no room" in made._simulated.value and not made.simulate.disabled


def test_two_in_one_notebook_are_apart_and_a_closed_one_stays_readable():
    one, other = explore(LAPTOP), explore(LAPTOP)
    one.controls["num_generations"].value = 4
    assert other.recipe == LAPTOP and one.recipe.num_generations == 4
    ids = [set(re.findall(r'<pattern id="([^"]+)"', made._picture.value)) for made in (one, other)]
    assert not ids[0] & ids[1]                                  # else the one's hatches would be the other's
    one.close()
    one.controls["num_generations"].value = 8
    assert one.recipe.num_generations == 4 and set(one._repr_mimebundle_()) == {"text/plain", "text/html"}
    one.close()
    one.pin.click()                                             # a click that was under way
    assert one.pinned.recipe == one.recipe


def test_every_control_has_a_name_and_every_field_of_memory_has_a_control():
    made = explore()
    for control in made.controls.values():
        assert control.description and control.tooltip
    without = {"lora_alpha", "lora_targets", "lora_dtype", "steps_per_generation", "num_iterations",
               "logits_chunk_size", "micro_batch_tokens", "optimizer_in_backward", "master_weights", "reference_offload", "loss_type", "scale_rewards", "epsilon",
               "epsilon_high", "temperature", "learning_rate", "max_steps", "seed", "task"}
    assert {field.name for field in dataclasses.fields(Recipe)} - without == {*CHOSEN, *LENGTHS}


def test_where_widgets_don_t_run_there_is_a_picture_in_words_too():
    bundle = explore(LAPTOP)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    html = bundle["text/html"]
    assert "Run the cell for the sliders" in html and "GRPOConfig(" in html and "navigator" not in html
    ((label, svg),) = re.findall(r'<img alt="([^"]+)".* src="data:image/svg.xml;base64,([^"]+)">', html)
    assert "backward" in label and "the card has 7.58 GiB" in label
    assert ElementTree.fromstring(base64.b64decode(svg)).get("aria-label") == label


def test_the_picture_is_well_formed_and_true_to_scale():
    found = estimate(LAPTOP)
    svg = picture_svg(found, estimate(LAPTOP.replace(lora_rank=None)))
    root = ElementTree.fromstring(svg)
    bars: dict[str, float] = {}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        title = rect.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            phase = title.text.split(":")[0]
            bars[phase] = bars.get(phase, 0) + float(rect.get("width"))
    for name, moment in found.moments.items():
        assert bars[name] / bars[found.peak_phase] == pytest.approx(moment.bytes / found.peak_allocated, rel=0.02)
    budget = float(root.find("{http://www.w3.org/2000/svg}line").get("x1")) - LEFT
    assert bars[found.peak_phase] / budget == pytest.approx(found.peak_reserved / found.budget, rel=0.02)


def test_words_of_others_stay_words():
    svg = picture({"a<b": {"parameters": 2**30}}, 2**31, 'a < b & "c"')
    assert ElementTree.fromstring(svg).get("aria-label") == 'a < b & "c"'


def test_a_bar_beyond_the_line_is_a_verdict_that_says_so():
    """A bar of what is allocated stayed left of the line, the allocator's margin did not: words against picture."""
    need = estimate(LAPTOP)
    between = (need.peak_allocated + need.peak_reserved) // 2
    made = explore(LAPTOP.replace(gpu=between))
    assert "It does not fit" in made._verdict.value and 'font-weight="bold"' in made._picture.value
    roomy = explore(LAPTOP.replace(gpu=need.peak_reserved))
    assert "It fits" in roomy._verdict.value and 'font-weight="bold"' not in roomy._picture.value


def test_what_would_fit_is_the_most():
    most = most_that_fits(LAPTOP)
    assert estimate(LAPTOP.replace(max_completion_length=most["completion tokens"])).fits
    assert not estimate(LAPTOP.replace(max_completion_length=most["completion tokens"] + 1)).fits
    larger = [name for name in models.names() if models.architecture(name).parameters
              > models.architecture(most["model"]).parameters]
    assert not any(estimate(LAPTOP.replace(model=name)).fits for name in larger)
    assert most_that_fits(Recipe(gpu=2**28)) == {"completion tokens": None, "micro-batch": None, "model": None}


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["SmolLM2-135M", "Qwen2.5-1.5B", "Llama-3.1-8B"]), st.sampled_from(["T4", "RTX 4090"]),
       st.sampled_from([None, 16]), st.sampled_from([None, "nf4"]), st.sampled_from(["full", "chunked"]),
       st.sampled_from(["sdpa", "eager"]), st.sampled_from([64, 1000, 8192]))  # fmt: skip
def test_the_quick_search_finds_what_asking_everything_finds(model, gpu, rank, quantized, logits, attention, length):
    try:
        recipe = Recipe(model=model, gpu=gpu, lora_rank=rank, quantization=quantized, logits=logits, dtype="float32",
                        attn_implementation=attention, max_completion_length=length)  # fmt: skip
    except ValueError:
        return
    assert search.longest(recipe) == longest_completion(recipe)
    larger = [name for name in models.names() if name != "tiny" and estimate(recipe.replace(model=name)).fits]
    weights = {name: models.architecture(name).parameters for name in larger}
    assert search.largest_model(recipe) == max(larger, key=weights.get, default=None)
    sizes = [size for size in search.POWERS if not size * recipe.gradient_accumulation_steps % recipe.num_generations]
    fit = [size for size in sizes if estimate(recipe.replace(per_device_train_batch_size=size)).fits]
    assert search.largest_batch(recipe) == max(fit, default=None)


@given(st.integers(-5, 60), st.integers(1, 60), st.sampled_from([0.5, 1, 2, 3]), st.integers(1, 7))
def test_a_growing_function_has_one_last_place_below(root, start, power, stair):
    """Stairs, squares and roots: wherever the search begins it ends where counting ends, and soon."""
    asked = []

    def beyond(n):
        asked.append(n)
        return (n // stair) ** power - (max(root, 0) // stair) ** power if root > 0 else n

    below = [n for n in range(1, 51) if beyond(n) <= 0]
    asked.clear()
    assert search.last_below(beyond, start, 50) == (below[-1] if below else None)
    assert len(asked) <= 30


def test_a_redraw_asks_for_few_estimates(monkeypatch):
    """It took up to 50 of them, and slow machines more than the tenth of a second that feels immediate."""
    made, asked = explore(LAPTOP), []
    monkeypatch.setattr(search, "estimate", lambda recipe: asked.append(recipe) or estimate(recipe))
    counts = []
    for length in range(128, 8192, 640):
        asked.clear()
        made.controls["max_completion_length"].value = length
        counts.append(len(asked))
    assert 0 < sum(counts) / len(counts) <= 25


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([None, 4, 64]), st.sampled_from([None, "nf4", "nf4_double"]),
       st.sampled_from([None, "bfloat16"]), st.booleans(), st.sampled_from(["all-linear", ("q_proj", "v_proj")]),
       st.sampled_from([None, 16]))  # fmt: skip
def test_the_lines_to_copy_build_what_to_trl_builds(rank, quantization, autocast, checkpointing, targets, steps):
    try:
        recipe = Recipe(lora_rank=rank, quantization=quantization, autocast=autocast, lora_targets=targets,
                        activation_checkpointing=checkpointing, steps_per_generation=steps, epsilon_high=0.28)
    except ValueError:
        return
    built: dict = {}
    text = trl_lines(recipe)
    assert "gradient_checkpointing" not in text                 # an alias by now, and a warning to whoever copies it
    text = text.replace('output_dir="grpo_lab_runs",', 'output_dir="grpo_lab_runs", use_cpu=True, report_to="none",')
    exec(text, built)  # noqa: S102 - that is what a reader does with it
    args, peft_config = recipe.to_trl(use_cpu=True)
    ours, theirs = built["args"].to_dict(), args.to_dict()
    for times in (ours, theirs):
        times.pop("logging_dir", None)
    assert str(ours) == str(theirs)
    if rank is None:
        assert peft_config is None and "peft_config" not in built
    else:
        one, other = built["peft_config"].to_dict(), peft_config.to_dict()
        assert {k: v for k, v in one.items()} == {k: v for k, v in other.items()}


def test_a_value_that_isn_t_on_the_list_is_added():
    made = explore(LAPTOP.replace(lora_rank=12, max_completion_length=20_000))
    assert made.controls["lora_rank"].value == 12 and made.controls["max_completion_length"].max == 20_000


def test_bad_input():
    with pytest.raises(TypeError, match="explore takes a Recipe, not str"):
        explore("baseline")
    assert isinstance(explore().box, ipywidgets.VBox)
