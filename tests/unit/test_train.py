"""The loop: it learns, says what it did, and says in one sentence what can't work."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny_llama import make_model, make_tokenizer

from grpo_lab.grpo import train as loop
from grpo_lab.grpo.step import windows
from grpo_lab.grpo.train import evaluate, prompt_batches, sample_batch, train
from grpo_lab.recipe import Recipe

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 6) for b in range(1, 6)]


def letters(completions, **_):
    """The share of an answer's characters that are letters: a thing that any model can learn in seconds."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]


def recipe(**changes) -> Recipe:
    fields = dict(model="tiny", dtype="float32", num_generations=4, per_device_train_batch_size=32,
                  max_prompt_length=8, max_completion_length=5, learning_rate=3e-3, max_steps=2)  # fmt: skip
    return Recipe(**fields | changes)


def run(fields=None, rewards=letters, **keywords):
    """A run on a random model, whose long answers and chance rewards may rightly be warned of."""
    keywords = {"model": make_model(seed=1), "tokenizer": make_tokenizer(), "prompts": PROMPTS,
                "progress": False, "reward_funcs": [rewards], **keywords}  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*hit max_completion_length")
        return train(recipe() if fields is None else fields, **keywords)


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:All rewards in every group are equal .mean 1")
def test_the_reward_rises():
    fields = recipe(max_steps=30, per_device_train_batch_size=64, learning_rate=1e-2)
    model, history = run(fields)
    assert history.reward[:5].mean() < 0.75 < 0.95 < history.reward[-5:].mean()
    assert evaluate(model, make_tokenizer(), PROMPTS, letters, max_completion_length=5) > 0.9


def test_shuffled_rewards_teach_nothing():
    random = torch.Generator().manual_seed(0)

    def shuffled(completions, **_):
        rewards = torch.tensor(letters(completions))
        return rewards[torch.randperm(len(rewards), generator=random)].tolist()

    _, history = run(recipe(max_steps=30, per_device_train_batch_size=64, learning_rate=1e-2), shuffled)
    assert history.reward[-5:].mean() < 0.9


def test_a_seed_repeats_a_run():
    first, again, other = (run(recipe(seed=seed, max_steps=3))[1] for seed in (1, 1, 2))
    same = [name for name in first if name != "seconds"]
    assert first[same].equals(again[same])
    assert not first[same].equals(other[same])


def test_the_callers_random_state_stays():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    run(recipe(lora_rank=2))
    assert torch.rand(1) == expected


def test_history_has_a_row_for_each_update():
    fields = recipe(steps_per_generation=4, gradient_accumulation_steps=2, per_device_train_batch_size=8,
                    num_iterations=2, max_steps=6)  # fmt: skip
    _, history = run(fields)
    assert list(history) == [name for name in loop.COLUMNS if name != "kl"]
    assert history.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert history.reward.nunique() == 2, "two generation batches, the first for four updates"
    assert history.reward[:4].nunique() == 1
    assert history.notna().all(axis=None) and (history.seconds > 0).all()
    assert (history.grad_norm > 0).all() and history.clip_ratio[0] == 0
    assert history.clipped.between(0, 1).all() and history.completion_length.between(1, 5).all()


def test_an_update_sees_many_prompts(monkeypatch):
    """Unshuffled, the first update of a batch would take the first prompts' groups only; TRL shuffles too."""
    seen = []
    spy = lambda samples, recipe: seen.append(samples) or windows(samples, recipe)  # noqa: E731
    monkeypatch.setattr(loop, "windows", spy)
    run(recipe(steps_per_generation=2, per_device_train_batch_size=16, max_steps=1))
    first_half = {tuple(row.tolist()) for row in seen[0].prompt_ids[:16]}
    assert len(first_half) > 4, "16 rows are 4 groups"
    assert len({tuple(row.tolist()) for row in seen[0].prompt_ids}) == 8


def test_loss_is_zero_while_it_learns():
    """Reported again and again as a bug: loss 0, and yet the gradient isn't."""
    _, history = run(recipe(max_steps=3, loss_type="dr_grpo"))
    scored = history[["loss", "grad_norm"]]
    _, grpo = run(recipe(max_steps=3, loss_type="grpo"))
    assert grpo.loss.abs().max() < 1e-6 < 0.01 < grpo.grad_norm.min()
    assert (scored.grad_norm > 0.01).all()


def test_kl_is_in_the_history_where_there_is_a_reference():
    for changes in ({}, {"lora_rank": 2}):
        _, history = run(recipe(beta=0.1, max_steps=4, **changes))
        assert history.kl[0] == pytest.approx(0, abs=1e-6) and history.kl[3] > 1e-6


def test_without_max_steps_it_goes_through_the_prompts_three_times():
    _, history = run(recipe(max_steps=-1))
    assert len(history) == 3 * (25 // 8)


def test_learning_rate_schedules():
    def rates(**keywords):
        return run(recipe(max_steps=4, learning_rate=1e-3), **keywords)[1].learning_rate.tolist()

    assert rates() == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert rates(lr_scheduler_type="constant") == pytest.approx([1e-3] * 4)
    assert rates(final_lr_fraction=0.2)[-1] == pytest.approx(1e-3 * (0.2 + 0.8 / 4))
    assert rates(lr_scheduler_type="cosine")[2] == pytest.approx(5e-4)
    with pytest.raises(ValueError, match="lr_scheduler_type='step'.*constant, linear, cosine"):
        run(lr_scheduler_type="step")


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_skipping_flat_groups_gives_the_same_update(loss_type):
    def rarely(completions, **_):
        return [float("a" in text) for text in completions]

    fields = recipe(max_steps=1, optim="sgd", learning_rate=1.0, loss_type=loss_type)
    runs = [run(fields, rarely, skip_flat_groups=skip) for skip in (False, True)]
    assert 0 < runs[0][1].frac_reward_zero_std[0] < 1
    for (name, ours), theirs in zip(runs[1][0].named_parameters(), runs[0][0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name, rtol=1e-4, atol=1e-6)
    assert runs[0][1].grad_norm[0] == pytest.approx(runs[1][1].grad_norm[0], rel=1e-4)


def test_a_batch_of_flat_groups_is_skipped_whole():
    with pytest.warns(UserWarning, match="All rewards in every group are equal"):
        model, history = run(rewards=lambda completions, **_: [1.0] * len(completions), skip_flat_groups=True)
    assert history.grad_norm.tolist() == [0, 0]
    both = zip(model.parameters(), make_model(seed=1).parameters(), strict=True)
    assert all(torch.equal(ours, initial) for ours, initial in both)


def test_a_shared_prefill_and_chunks_sample_the_same():
    fields = recipe(rollout_batch_size=8)
    batches = []
    for keywords in ({}, {"share_prefill": False}):
        batches.append(sample_batch(make_model(seed=1), make_tokenizer(), PROMPTS[:4], [letters], fields,
                                    generator=torch.Generator().manual_seed(0), **keywords)[0])  # fmt: skip
    assert torch.equal(batches[0].completion_ids, batches[1].completion_ids)
    assert torch.equal(batches[0].prompt_ids, batches[1].prompt_ids)


# -- what a reward function sees -------------------------------------------------------------------


def test_rewards_get_trls_columns():
    seen = {}

    def spy(prompts, completions, completion_ids, answer, **_):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        return [0.5, 1.0] * 16

    samples, metrics = sample_batch(make_model(seed=1), make_tokenizer(), PROMPTS[:8], [spy], recipe(),
                                    generator=torch.Generator().manual_seed(0))  # fmt: skip
    assert seen["prompts"] == [row["prompt"] for row in PROMPTS[:8] for _ in range(4)]
    assert seen["answer"] == [row["answer"] for row in PROMPTS[:8] for _ in range(4)]
    assert [len(ids) for ids in seen["ids"]] == samples.completion_mask.sum(1).tolist()
    decoded = [make_tokenizer().decode([i for i in ids if i > 2]) for ids in seen["ids"]]
    assert [text.replace("<unk>", "") for text in seen["completions"]] == decoded
    assert metrics["reward"] == 0.75


def test_chat_prompts_get_chat_answers():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    chats = [{"prompt": [{"role": "user", "content": row["prompt"][:-1]}]} for row in PROMPTS]
    kinds = []

    def spy(completions, **_):
        kinds.extend((type(c), c[0]["role"]) for c in completions)
        return list(range(len(completions)))

    run(recipe(max_steps=1), spy, tokenizer=tokenizer, prompts=chats)
    assert set(kinds) == {(list, "assistant")}


@pytest.mark.parametrize(("reward", "message"), [
    (lambda completions, **_: 1 / 0, "bad_reward.*ZeroDivisionError"),
    (lambda completions, **_: [1.0], "bad_reward.*returned 1 value for 32 completions"),
    (lambda completions, **_: [float("nan")] * 32, "bad_reward.*nan"),
])  # fmt: skip
def test_a_bad_reward_function_is_named(reward, message):
    reward.__name__ = "bad_reward"
    with pytest.raises(ValueError, match=message) as caught:
        run(rewards=reward)
    assert "\n" not in str(caught.value)


# -- what is said ----------------------------------------------------------------------------------


def test_long_answers_are_warned_of():
    """All answers cut off: reward 0, loss 0, and nothing said why."""
    with pytest.warns(UserWarning, match=r"\d\d% of the completions hit max_completion_length=1 ") as caught:
        train(recipe(max_steps=6, max_completion_length=1), model=make_model(seed=1), reward_funcs=letters,
              tokenizer=make_tokenizer(), prompts=PROMPTS, progress=False)  # fmt: skip
    assert sum("hit max_completion_length" in str(w.message) for w in caught) == 1, "said once"
    assert caught[0].filename == __file__


def test_flat_rewards_are_warned_of():
    with pytest.warns(UserWarning, match=r"All rewards in every group are equal \(mean 0\)"):
        _, history = run(recipe(), lambda completions, **_: [0.0] * len(completions))
    assert history.frac_reward_zero_std.tolist() == [1, 1]


def test_a_single_flat_batch_later_on_is_no_warning():
    calls = iter(range(100))

    def sometimes(completions, **_):
        return [0.0] * len(completions) if next(calls) == 2 else letters(completions)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(recipe(max_steps=5), sometimes)


def test_a_prompt_that_is_too_long_is_refused_before_any_work():
    prompts = [*PROMPTS, {"prompt": "123456+123456=", "answer": "246912"}]
    with pytest.raises(ValueError, match=r"max_prompt_length=8 .*'123456\+123456='.* 14 tokens") as caught:
        run(prompts=prompts, rewards=lambda completions, **_: pytest.fail("sampled before checking"))
    assert "\n" not in str(caught.value)


def test_too_few_prompts_are_refused():
    with pytest.raises(ValueError, match="wants 8 different prompts and there are 3.*raise num_generations"):
        run(prompts=PROMPTS[:3])


def test_epochs_take_each_prompt_once():
    batches = prompt_batches(PROMPTS, 8, seed=0)
    epochs = [[row["prompt"] for _ in range(3) for row in next(batches)] for _ in range(2)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_progress_and_the_quiet_switch(capsys):
    run(progress=False)
    out, err = capsys.readouterr()
    assert out == err == ""
    run(progress=True)
    out, err = capsys.readouterr()
    assert "2 steps on 2 batches of 32 completions (8 prompts x 4): at most 320 tokens" in out
    assert "2/2" in err


def test_ctrl_c_returns_what_there_is(capsys):
    def stop(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    model, history = run(recipe(max_steps=10), callback=stop)
    assert len(history) == 3
    assert "Interrupted after 3 of 10 steps" in capsys.readouterr().out
    assert not torch.equal(model.model.norm.weight, make_model(seed=1).model.norm.weight)


def test_the_callback_sees_each_row():
    rows = []
    _, history = run(recipe(max_steps=3), callback=rows.append)
    assert [row["reward"] for row in rows] == history.reward.tolist()


# -- evaluation ------------------------------------------------------------------------------------


def test_evaluate_is_the_greedy_mean_reward():
    model, tokenizer = make_model(seed=1), make_tokenizer()
    seen = []

    def spy(completions, **_):
        seen.extend(completions)
        return letters(completions)

    whole = evaluate(model, tokenizer, PROMPTS, spy, max_completion_length=5)
    assert whole == pytest.approx(sum(letters(seen)) / 25)
    chunks = evaluate(model, tokenizer, PROMPTS, letters, max_completion_length=5, batch_size=4)
    assert whole == pytest.approx(chunks)


def test_half_precision_trains():
    for changes in ({"autocast": "bfloat16", "gpu": "A100 80GB"}, {"autocast": "float16"}):
        _, history = run(recipe(**changes, max_steps=2))
        assert history.grad_norm.between(1e-3, 1e3).all()
