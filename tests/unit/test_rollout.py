"""Generation: the same tokens as transformers' own, whatever the padding, the chunks or the checkpointing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import EOS, PAD, make_batch, make_model, make_tokenizer

from grpo_lab.grpo.loss import token_logps
from grpo_lab.grpo.rollout import (
    decode, encode_prompts, generate, generation_mode, mask_after_eos, prefill, sample,
)  # fmt: skip

ENDING = {"eos_token_id": EOS, "pad_token_id": PAD}
GREEDY = {"max_completion_length": 12, "temperature": 0, **ENDING}


@pytest.fixture(scope="module")
def model():
    """A model that ends its answers now and then."""
    model = make_model(seed=3)
    with torch.no_grad():
        model.model.embed_tokens.weight[EOS] *= 1.5
    return model


@pytest.fixture
def prompts():
    return make_batch(8, 7, 1, seed=5)[:2]


def texts(completion_ids, completion_mask):
    return [row[mask.bool()].tolist() for row, mask in zip(completion_ids, completion_mask, strict=True)]


def test_greedy_equals_transformers_generate(model, prompts):
    ids, mask = prompts
    ours, our_mask = generate(model, ids, mask, **GREEDY)
    theirs = model.eval().generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False,
                                   **ENDING)  # fmt: skip
    theirs = theirs[:, ids.shape[1] :]
    assert torch.equal(ours, theirs)
    lengths = set(our_mask.sum(1).tolist())
    assert len(lengths) > 1, "all answers are equally long: the end token was not tried"


def test_left_padding_changes_nothing(model, prompts):
    """Every row alone and unpadded says the same, and so do its log-probs."""
    ids, mask = prompts
    together = texts(*generate(model, ids, mask, **GREEDY))
    logps_of = {}
    for row in range(len(ids)):
        alone = ids[row : row + 1, mask[row].bool()]
        completion, completion_mask = generate(model, alone, torch.ones_like(alone), **GREEDY)
        assert texts(completion, completion_mask) == together[row : row + 1]
        whole = torch.cat([alone, completion], 1)
        kept = torch.cat([torch.ones_like(alone), completion_mask], 1)
        with torch.no_grad():
            logps_of[row] = (token_logps(model, whole, kept, completion.shape[1]) * completion_mask)[0]
    completion, completion_mask = generate(model, ids, mask, **GREEDY)
    with torch.no_grad():
        padded = token_logps(model, torch.cat([ids, completion], 1), torch.cat([mask, completion_mask], 1),
                             completion.shape[1]) * completion_mask  # fmt: skip
    for row, logps in logps_of.items():
        torch.testing.assert_close(padded[row, : len(logps)], logps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_chunks_equal_one_batch(model, prompts, batch_size):
    expected_ids, expected_mask = generate(model, *prompts, **GREEDY)
    ids, mask = generate(model, *prompts, batch_size=batch_size, **GREEDY)
    assert torch.equal(ids, expected_ids) and torch.equal(mask, expected_mask)


def test_chunks_of_different_lengths_are_padded(model, prompts):
    """A chunk whose answers all ended early is shorter than the others."""
    ids, mask = generate(model, *prompts, batch_size=1, **GREEDY)
    assert len(set(mask.sum(1).tolist())) > 1
    assert (ids[mask == 0] == PAD).all() and (ids[mask == 1] != PAD).all()


def test_without_an_end_token_answers_take_the_whole_length(model, prompts):
    ids, mask = generate(model, *prompts, **{**GREEDY, "eos_token_id": None})
    assert ids.shape == mask.shape == (8, 12) and mask.all()


@pytest.mark.parametrize("batch_size", [None, 6, 4])
def test_a_shared_prefill_equals_repeated_prompts(model, prompts, batch_size):
    """A group's rows follow each other, also where the chunk doesn't hold whole groups."""
    ids, mask = prompts
    expected = generate(model, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), **GREEDY)
    got = generate(model, ids, mask, num_return_sequences=3, batch_size=batch_size, **GREEDY)
    assert texts(*got) == texts(*expected)


def test_checkpointing_gives_the_same_text_and_comes_back(model, prompts):
    """Checkpointed layers drop the KV cache in training mode: generation was slow, and degenerate in some
    versions. The rollout switches checkpointing off and the cache on, and then restores both."""
    expected = texts(*generate(model, *prompts, **GREEDY))
    checkpointed = make_model(seed=3)
    checkpointed.load_state_dict(model.state_dict())
    checkpointed.activation_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    checkpointed.config.use_cache = False
    layers = [layer.gradient_checkpointing for layer in checkpointed.model.layers]
    cache_lengths = []
    original = checkpointed.model.forward

    def forward(*args, **kwargs):
        output = original(*args, **kwargs)
        cache_lengths.append(output.cache.get_seq_length())
        return output

    checkpointed.model.forward = forward
    assert texts(*generate(checkpointed, *prompts, **GREEDY)) == expected
    assert cache_lengths[:3] == [7, 8, 9], "the cache was off"
    assert layers == [layer.gradient_checkpointing for layer in checkpointed.model.layers] == [True, True]
    assert checkpointed.training and checkpointed.config.use_cache is False and torch.is_grad_enabled()


def test_the_modes_come_back_after_an_error(model):
    model.train()
    model.model.norm.eval()
    with pytest.raises(RuntimeError, match="out of memory"), generation_mode(model):
        assert not model.training and not torch.is_grad_enabled()
        raise RuntimeError("out of memory")
    assert model.training and not model.model.norm.training and torch.is_grad_enabled()


def test_prefill_and_decode_equal_one_forward(model):
    ids, mask = make_batch(4, 9, 1, seed=2)[:2]
    kept = mask[:, :-1].any(1)  # rows with a token before the last one
    ids, mask = ids[kept], mask[kept]
    with generation_mode(model):
        expected = model(input_ids=ids, attention_mask=mask).logits
        first, cache = prefill(model, ids[:, :-1], mask[:, :-1])
        assert cache.get_seq_length() == 8
        second = decode(model, ids[:, -1:], mask, cache)
        assert cache.get_seq_length() == 9
    torch.testing.assert_close(first, expected[:, -2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, expected[:, -1], rtol=1e-4, atol=1e-4)


@given(st.lists(st.lists(st.sampled_from([EOS, 3, 4]), min_size=5, max_size=5), min_size=1, max_size=4))
def test_mask_after_eos(rows):
    mask = mask_after_eos(torch.tensor(rows), EOS)
    for row, kept in zip(rows, mask.tolist(), strict=True):
        length = row.index(EOS) + 1 if EOS in row else 5
        assert kept == [1] * length + [0] * (5 - length)


def test_several_end_tokens_and_none():
    ids = torch.tensor([[3, 9, 3], [EOS, 3, 3]])
    assert mask_after_eos(ids, [EOS, 9]).tolist() == [[1, 1, 0], [1, 0, 0]]
    assert mask_after_eos(ids, None).tolist() == [[1, 1, 1], [1, 1, 1]]


@settings(max_examples=20, deadline=None)
@given(temperature=st.floats(0.3, 3.0), seed=st.integers(0, 1000))
def test_sampling_follows_the_softmax_at_that_temperature(temperature, seed):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    draws = sample(logits.expand(20_000, 4), temperature, torch.Generator().manual_seed(seed))
    shares = torch.bincount(draws, minlength=4) / 20_000
    assert (shares - torch.softmax(logits / temperature, 0)).abs().max() < 0.02


def test_a_seed_gives_the_same_samples(model, prompts):
    keywords = {**GREEDY, "temperature": 1.0}
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    runs = [generate(model, *prompts, generator=seed, **keywords) for seed in seeds]
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][0].shape != runs[2][0].shape or not torch.equal(runs[0][0], runs[2][0])


def test_generation_stops_when_all_rows_have_ended(model, prompts, monkeypatch):
    from grpo_lab.grpo import rollout

    steps = []
    monkeypatch.setattr(rollout, "decode", lambda *args: steps.append(1) or decode(*args))
    ids, mask = generate(model, *prompts, **{**GREEDY, "max_completion_length": 50})
    assert len(steps) == ids.shape[1] - 1 == mask.sum(1).max() - 1


def test_prompts_are_padded_on_the_left():
    ids, mask = encode_prompts(make_tokenizer(), [{"prompt": "1+1="}, {"prompt": "7="}])
    assert mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert ids[1, :2].tolist() == [PAD, PAD] and ids[0, -1] == ids[1, -1]


def test_chat_prompts_go_through_the_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    chat = [{"prompt": [{"role": "user", "content": "1+1"}]}]
    assert torch.equal(encode_prompts(tokenizer, chat)[0], encode_prompts(tokenizer, [{"prompt": "1+1="}])[0])


def test_a_prompt_that_is_too_long_is_refused():
    """Cutting it silently would ask another question."""
    rows = [{"prompt": "1+1="}, {"prompt": "123456+1="}]
    message = r"max_prompt_length=5 .*'123456\+1='.* 9 tokens.*at least 9"
    with pytest.raises(ValueError, match=message) as caught:
        encode_prompts(make_tokenizer(), rows, max_prompt_length=5)
    assert "\n" not in str(caught.value)
