"""The tiny model as it is stored, the script that made it, and that it learns."""

import importlib.util
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import models, tasks
from grpo_lab._data import data_path
from grpo_lab.grpo.train import evaluate, train
from grpo_lab.recipe import TRAIN_KEYWORDS, Recipe

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def warm_up():
    return script("warm_up_tiny")


@pytest.fixture
def tiny():
    folder = data_path("tiny")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def accuracy(model, tokenizer, split="test"):
    task = tasks.get("addition")
    return evaluate(model, tokenizer, task.prompts(split), task.reward_funcs, max_completion_length=3)


# --- as it is stored ----------------------------------------------------------------------------------------


def test_gets_a_third_to_a_half_of_the_test_problems_right(tiny):
    assert 0.33 <= accuracy(*tiny) <= 0.55


def test_answers_do_not_depend_on_the_padding(tiny):
    """Left padding with the wrong positions costs a model most of its accuracy, unnoticed."""
    model, tokenizer = tiny
    task = tasks.get("addition")
    one_by_one = evaluate(
        model, tokenizer, task.prompts("test")[:40], task.reward_funcs, max_completion_length=3, batch_size=1
    )
    together = evaluate(
        model, tokenizer, task.prompts("test")[:40], task.reward_funcs, max_completion_length=3
    )
    assert one_by_one == together


def test_size_and_form(tiny):
    model, tokenizer = tiny
    assert model.num_parameters() == models.architecture("tiny").parameters == 109_888
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tokenizer.padding_side == "left"
    assert model.config.vocab_size == len(tokenizer) == 48
    assert (model.config.pad_token_id, model.config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    assert sum(path.stat().st_size for path in data_path("tiny").iterdir()) < 2**20


def test_one_token_a_character(tiny, warm_up):
    _, tokenizer = tiny
    ids = tokenizer(warm_up.CHARACTERS)["input_ids"]
    assert len(set(ids)) == len(ids) == len(warm_up.CHARACTERS)
    assert tokenizer.decode(ids) == warm_up.CHARACTERS
    assert tokenizer("12+30=<eos>")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("42<eos><pad>")["input_ids"], skip_special_tokens=True) == "42"
    assert tokenizer("4€2")["input_ids"][1] == tokenizer.unk_token_id


@pytest.mark.parametrize("name", tasks.names())
@pytest.mark.parametrize("split", tasks.SPLITS)
def test_every_problem_can_be_written_in_its_characters(name, split, tiny):
    _, tokenizer = tiny
    for row in tasks.get(name).prompts(split):
        text = row["prompt"] + row["answer"]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_chat_reads_like_the_plain_prompts(tiny):
    _, tokenizer = tiny
    user, assistant = {"role": "user", "content": "12+30"}, {"role": "assistant", "content": "42"}
    for add in (True, False):
        assert tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=add) == "12+30="
    assert tokenizer.apply_chat_template([user, assistant], tokenize=False) == "12+30=42<eos>"


# --- the script that made it --------------------------------------------------------------------------------


def test_the_script_makes_the_stored_configuration_and_tokenizer(warm_up):
    """Compared as loaded: releases of transformers write the same facts with other keys."""
    tokenizer, loaded = warm_up.make_tokenizer(), AutoTokenizer.from_pretrained(data_path("tiny"))
    assert tokenizer.backend_tokenizer.to_str() == loaded.backend_tokenizer.to_str()
    for name in ("special_tokens_map", "chat_template", "padding_side", "model_max_length"):
        assert getattr(tokenizer, name) == getattr(loaded, name), name
    made = warm_up.make_model(tokenizer).config.to_dict()
    stored = AutoModelForCausalLM.from_pretrained(data_path("tiny")).config.to_dict()
    for key in made.keys() - {"architectures", "_name_or_path", "dtype", "transformers_version"}:
        assert made[key] == stored[key], key


def test_only_the_answer_is_taught(warm_up):
    tokenizer = warm_up.make_tokenizer()
    rows = warm_up.encode(
        tokenizer, [{"prompt": "12+30=", "answer": "42"}, {"prompt": "1+2=", "answer": "3"}]
    )
    taught = [tokenizer.decode(labels[labels != -100]) for labels in rows["labels"]]
    assert taught == ["42<eos>", "3<eos>"]
    assert rows["position_ids"][1].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5]


def test_warming_up_starts_to_learn(warm_up, capsys):
    """Twenty steps: the whole run takes the rest of ten seconds, and its result is the stored model."""
    warm_up.warm_up(seed=0, max_steps=20)
    losses = [float(line.split("loss")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[1] < losses[0] < 4.5


# --- learning with GRPO -------------------------------------------------------------------------------------


def test_thirty_batches_raise_the_reward(tiny):
    """Two updates a batch. Ten batches' mean reward is good to 0.01; four seeds rose by 0.07 to 0.09."""
    model, tokenizer = tiny
    recipe = Recipe.preset("tiny", max_steps=60)
    _, history = train(recipe, model=model, tokenizer=tokenizer, progress=False, **TRAIN_KEYWORDS["tiny"])
    assert history.reward.tail(20).mean() > history.reward.head(10).mean() + 0.04


def test_the_stored_table_is_of_the_stored_model(tiny):
    """A new checkpoint without a new table would print numbers that nobody can reproduce."""
    table = pd.read_csv(data_path("tiny_seeds.csv"))
    assert set(table.before) == {accuracy(*tiny)}
    real, control = table[table.rewards == "real"], table[table.rewards == "shuffled"]
    assert real.seed.nunique() == 5 and (real.after > 0.85).all()
    assert len(control) >= 1 and (control.after < control.before).all()
    assert (table.steps == Recipe.preset("tiny").max_steps).all()


def test_the_controls_rewards_are_the_same_ones_dealt_out_again():
    rewards = [1.0] * 10 + [0.0] * 30
    dealt = script("train_tiny_seeds").shuffled(lambda **_: list(rewards), seed=0)
    first, second = dealt(), dealt()
    assert sorted(first) == sorted(second) == sorted(rewards)
    assert len({tuple(first), tuple(second), tuple(rewards)}) == 3
