"""The arithmetic: advantages, log-probs in full and by chunks, the loss and its denominators."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_llama import make_batch, make_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lab.grpo.loss import (
    ChunkedLogps, entropy_from_logits, group_advantages, loss_metrics, policy_loss, selective_log_softmax,
    token_logps,
)  # fmt: skip

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


# -- advantages ------------------------------------------------------------------------------------


@given(st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8))
def test_advantages_of_a_group_add_up_to_zero(rewards):
    advantages = group_advantages(torch.tensor(rewards), 4, "none").view(2, 4)
    assert advantages.sum(1).abs().max() < 1e-4
    scaled = group_advantages(torch.tensor(rewards), 4, "group").view(2, 4)
    assert ((scaled * advantages) >= 0).all(), "scaling changed a sign"
    assert scaled.std(1).max() <= 1 + 1e-4


def test_equal_rewards_give_zero_advantages():
    assert group_advantages(torch.tensor([0.5, 0.5, 1.0, 0.0]), 2).tolist()[:2] == [0.0, 0.0]


def test_an_answer_that_nobody_judged_takes_no_part():
    """TRL's rule for a completion for which every reward function returned None."""
    rewards = torch.tensor([1.0, float("nan"), 3.0, 0.0, 1.0, 2.0])
    for scale in ("group", "batch", "none"):
        advantages = group_advantages(rewards, 3, scale)
        assert advantages[1] == 0 and not advantages.isnan().any()
        assert advantages[0] == -advantages[2] != 0


def test_unknown_choices_are_refused_by_name():
    with pytest.raises(ValueError, match="scale_rewards='groups'.*'group', 'batch' or 'none'"):
        group_advantages(torch.zeros(4), 2, "groups")
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="loss_type='ppo'.*'dapo'"):
        policy_loss(ones, None, None, torch.ones(1), ones, loss_type="ppo")
    with pytest.raises(ValueError, match="logits='fused'.*'chunked'"):
        token_logps(make_model(), torch.ones(1, 2).long(), torch.ones(1, 2).long(), 1, logits="fused")


# -- log-probs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_log_softmax_is_log_softmax_then_gather(dtype):
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = torch.arange(15).view(3, 5) % 11
    expected = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(selective_log_softmax(logits, tokens), expected)


def test_entropy_over_more_rows_than_a_chunk():
    logits = torch.randn(2, 150, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    assert not entropy.requires_grad


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 30), hidden=st.integers(1, 9), vocabulary=st.integers(1, 40),
       chunk_size=st.integers(1, 40), temperature=st.floats(0.3, 3.0), bias=st.booleans(),
       frozen=st.booleans(), masked=st.integers(0, 5), seed=st.integers(0, 2**31))  # fmt: skip
def test_chunked_equals_full(tokens, hidden, vocabulary, chunk_size, temperature, bias, frozen, masked, seed):
    """For every shape, also chunks that don't divide the tokens, one token, one word; in double precision, so
    that a wrong term can't hide behind rounding."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=random, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, generator=random, dtype=torch.float64, requires_grad=not frozen)
    shift = torch.randn(vocabulary, generator=random, dtype=torch.float64).requires_grad_() if bias else None
    ids = torch.randint(0, vocabulary, (tokens,), generator=random)
    upstream = torch.randn(tokens, generator=random, dtype=torch.float64)
    upstream[:masked] = 0
    leaves = [leaf for leaf in (states, weight, shift) if leaf is not None and leaf.requires_grad]

    logits = F.linear(states, weight, shift) / temperature
    full = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    settings_ = temperature, chunk_size, torch.float64, True
    chunked, entropy = ChunkedLogps.apply(states, weight, shift, ids, *settings_)
    torch.testing.assert_close(chunked, full)
    torch.testing.assert_close(entropy, entropy_from_logits(logits))
    for ours, theirs in zip(torch.autograd.grad(chunked, leaves, upstream),
                            torch.autograd.grad(full, leaves, upstream), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs)


def qwen():
    shape = dict(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
                 initializer_range=0.2)  # fmt: skip
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**shape))


def lora(model):
    torch.manual_seed(0)
    policy = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


MODELS = {"tied": make_model, "untied": lambda: make_model(tie_word_embeddings=False), "qwen2": qwen,
          "lora": lambda: lora(make_model())}  # fmt: skip


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_equals_full_in_a_model(name, autocast):
    """The loss and every gradient, to a relative 1e-5 in fp32; under autocast both round products to bf16."""
    prompt_ids, prompt_mask, completion_ids, completion_mask = make_batch(4, 6, 9, seed=1)
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    advantages, results = torch.tensor([1.0, -2.0, 0.5, 0.5]), []
    for logits in ("full", "chunked"):
        model = MODELS[name]()
        logps, entropy = token_logps(model, ids, mask, 9, temperature=0.7, logits=logits, chunk_size=5,
                                     autocast=autocast, return_entropy=True)  # fmt: skip
        assert logps.dtype == torch.float32 and logps.shape == entropy.shape == (4, 9)
        loss = policy_loss(logps, None, None, advantages, completion_mask, loss_type="grpo")
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        results.append((logps, entropy, loss, gradients))
    full, chunked = results
    tolerance = 1e-5 if autocast is None else 0.03
    for ours, theirs in zip(chunked[:2], full[:2], strict=True):
        assert relative(ours, theirs) <= tolerance
    assert abs(chunked[2] - full[2]) <= tolerance
    assert chunked[3].keys() == full[3].keys()
    for key, gradient in full[3].items():
        assert relative(chunked[3][key], gradient) <= tolerance, key


def test_chunked_refuses_a_head_that_is_not_a_plain_layer():
    """The output layer's weight is used directly: an adapter on it would be left out without a word."""
    ids = torch.ones(1, 3, dtype=torch.long)
    model = make_model(tie_word_embeddings=False)
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="logits='chunked'.*output layer.*logits='full'"):
        token_logps(policy, ids, ids, 2, logits="chunked")
    model = make_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="logits='chunked'.*final_logit_softcapping"):
        token_logps(model, ids, ids, 2, logits="chunked")


def test_chunked_holds_one_chunk_of_logits():
    """The last chunk's logits once stayed alive, by the loop's variable, while the next chunk's were made."""
    import weakref

    from torch.utils._python_dispatch import TorchDispatchMode

    class Track(TorchDispatchMode):
        alive = highest = 0

        def gone(self):
            self.alive -= 1

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (10, 50) and not func.is_view:
                storage = out.untyped_storage()
                if all(storage.data_ptr() != t.untyped_storage().data_ptr() for t in args
                       if isinstance(t, torch.Tensor)):  # fmt: skip
                    self.alive += 1
                    weakref.finalize(storage, self.gone)
                self.highest = max(self.highest, self.alive)
            return out

    weight, states = torch.randn(50, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    with Track() as track:
        logps, _ = ChunkedLogps.apply(states, weight, None, torch.arange(40), 0.7, 10, torch.float32, False)
        logps.sum().backward()
    assert track.alive == 0
    assert track.highest == 1


def test_chunked_holds_one_gradient_of_the_weight():
    """Recomputing by `torch.utils.checkpoint` holds a second gradient of the output layer while adding it to
    the first; ours adds in place. Seen by counting every tensor of that size that the backward makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == weight.shape and not func.is_view:
                is_new = all(out is not arg for arg in args if isinstance(arg, torch.Tensor))
                self.made += is_new
            return out

    weight = torch.randn(50, 8, requires_grad=True)
    states = torch.randn(40, 8, requires_grad=True)
    logps, _ = ChunkedLogps.apply(states, weight, None, torch.arange(40), 1.0, 10, torch.float32, False)
    with Count() as count:
        logps.sum().backward()
    assert count.made == 1  # four chunks


# -- the loss --------------------------------------------------------------------------------------


def loss_inputs(seed=0, rows=4, length=5):
    random = torch.Generator().manual_seed(seed)
    logps, old, ref = (-3 * torch.rand(rows, length, generator=random) for _ in range(3))
    lengths = torch.randint(1, length + 1, (rows, 1), generator=random)
    return logps, old, ref, torch.randn(rows, generator=random), (torch.arange(length) < lengths).long()


def test_denominators_by_hand():
    """One completion of 1 token and one of 3, every token's loss -1 and -2."""
    logps, mask = torch.zeros(2, 3), torch.tensor([[1, 0, 0], [1, 1, 1]])
    values = {name: policy_loss(logps, logps, None, torch.tensor([1.0, 2.0]), mask, loss_type=name,
                                max_completion_length=10).item() for name in LOSS_TYPES}  # fmt: skip
    assert values == pytest.approx({"grpo": -1.5, "bnpo": -7 / 4, "dr_grpo": -7 / 20, "dapo": -7 / 4})


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_changes_nothing(loss_type):
    logps, old, ref, advantages, mask = loss_inputs()
    keywords = {"loss_type": loss_type, "beta": 0.1, "max_completion_length": 5}
    expected = policy_loss(logps, old, ref, advantages, mask, **keywords)
    assert policy_loss(logps, old - 2 * mask, ref, advantages, mask, **keywords) != expected
    padded = policy_loss(logps + 1 - mask, old, ref + 2 * (1 - mask), advantages, mask, **keywords)
    assert torch.equal(padded, expected)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_micro_batches_add_up_to_the_whole(loss_type):
    """The scaled losses of a window's micro-batches are the loss of the window; under "bnpo" they are not."""
    logps, old, ref, advantages, mask = loss_inputs()
    keywords = {"loss_type": loss_type, "beta": 0.1, "max_completion_length": 5, "num_items": mask.sum()}
    whole = policy_loss(logps, old, ref, advantages, mask, **keywords)
    halves = zip(*(part.split(2) for part in (logps, old, ref, advantages, mask)), strict=True)
    parts = [policy_loss(*half, accumulation_steps=2, **keywords) for half in halves]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)


def test_clipping_removes_the_gradient_in_one_direction_only():
    """A ratio beyond the bound, in the direction that the advantage wants, gets no gradient; else it does."""
    log_ratio = torch.tensor([[0.5], [0.5], [-0.5], [-0.5]], requires_grad=True)
    advantages, zeros, mask = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.zeros(4, 1), torch.ones(4, 1)
    policy_loss(log_ratio, zeros, None, advantages, mask, epsilon=0.2).backward()
    assert (log_ratio.grad.flatten() != 0).tolist() == [False, True, True, False]
    metrics = loss_metrics(log_ratio.detach(), zeros, None, advantages, mask, zeros, epsilon=0.2)
    assert metrics["clip_ratio"] == 0.5
    policy_loss(high := log_ratio.detach().requires_grad_(), zeros, None, advantages, mask, epsilon=0.2,
                epsilon_high=0.7).backward()  # fmt: skip
    assert (high.grad.flatten() != 0).tolist() == [True, True, True, False]


def test_loss_zero_but_gradient_not():
    """Reported again and again as a bug: with fresh samples and no KL term the loss is 0, since every ratio
    is 1 and a group's advantages add up to 0. The gradient is what teaches."""
    logps = torch.full((4, 3), -1.0, requires_grad=True)
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    loss = policy_loss(logps, None, None, advantages, torch.ones(4, 3), loss_type="grpo")
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert logps.grad.abs().min() > 0.05


def test_the_bias_correction_changes_only_the_gradient_of_fresh_samples():
    logps, _, ref, advantages, mask = loss_inputs()
    gradients = []
    for corrected in (True, False):
        leaf = logps.clone().requires_grad_()
        loss = policy_loss(leaf, None, ref, advantages, mask, beta=0.5, use_bias_correction_kl=corrected)
        gradients.append((loss.item(), torch.autograd.grad(loss, leaf)[0]))
    assert gradients[0][0] == pytest.approx(gradients[1][0])
    assert relative(gradients[0][1], gradients[1][1]) > 0.01


def test_rows_left_out_keep_the_denominator():
    """Completions whose advantage is 0 add nothing: without them the loss is the same if `batch_size` is."""
    logps, old, _, advantages, mask = loss_inputs()
    advantages[2:] = 0
    for loss_type in ("grpo", "dr_grpo", "dapo"):
        keywords = {"loss_type": loss_type, "batch_size": 4, "num_items": mask.sum(),
                    "max_completion_length": 5}  # fmt: skip
        whole = policy_loss(logps, old, None, advantages, mask, **keywords)
        part = policy_loss(logps[:2], old[:2], None, advantages[:2], mask[:2], **keywords)
        assert part.item() == pytest.approx(whole.item(), rel=1e-6)


def test_metrics_do_not_hold_the_graph():
    logps, old, ref, advantages, mask = loss_inputs()
    logps.requires_grad_()
    metrics = loss_metrics(logps, old, ref, advantages, mask, torch.ones_like(old))
    assert set(metrics) == {"entropy", "kl", "clip_ratio"}
    assert not any(value.requires_grad for value in metrics.values())
    assert metrics["entropy"] == 1.0
    assert copy.copy(metrics)["kl"] >= 0
