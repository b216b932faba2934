"""Attention inside a virtual card takes the card's kernel, with what that keeps for the backward pass."""
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_lab import VirtualGPU
from grpo_lab.memory import cuda_attention
from grpo_lab.memory.cuda_attention import choose, sdpa

FLASH, EFFICIENT, CUDNN, MATH = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                                 SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
T4, A100, RTX3080, H100, RTX5090 = (7, 5), (8, 0), (8, 6), (9, 0), (12, 0)


def qkv(batch=2, heads=8, length=48, size=64, kv_heads=None, dtype=torch.float16, grad=True):
    """As transformers makes them: (batch, length, heads, size) in memory."""
    made = [torch.empty(batch, length, n, size, dtype=dtype).transpose(1, 2)
            for n in (heads, kv_heads or heads, kv_heads or heads)]
    return [t.requires_grad_(grad) for t in made]


@pytest.mark.parametrize(("made", "call", "card", "kernel"), [
    ({}, {"is_causal": True}, A100, FLASH),
    ({}, {"is_causal": True}, T4, EFFICIENT),
    ({"dtype": torch.bfloat16}, {"is_causal": True}, T4, MATH),                 # no bfloat16 kernel before Ampere
    ({"dtype": torch.bfloat16}, {"is_causal": True}, RTX5090, FLASH),
    ({"dtype": torch.float32}, {"is_causal": True}, RTX3080, EFFICIENT),
    ({}, {"attn_mask": torch.ones(2, 1, 48, 48, dtype=torch.bool)}, RTX3080, EFFICIENT),
    ({"kv_heads": 2}, {"is_causal": True, "enable_gqa": True}, RTX3080, FLASH),
    ({"kv_heads": 2}, {"is_causal": True, "enable_gqa": True}, T4, MATH),       # 2.10 to 2.13
    ({"size": 60, "dtype": torch.float32}, {"is_causal": True}, T4, EFFICIENT),
    ({"size": 60}, {"is_causal": True}, T4, MATH),                              # not a multiple of 8
    ({"size": 60}, {"is_causal": True}, RTX3080, FLASH),                        # padded by flash
    ({"size": 208}, {"is_causal": True}, RTX3080, EFFICIENT),                   # flash can't train this on 99 KiB
    ({"size": 208, "grad": False}, {"is_causal": True}, RTX3080, FLASH),
    ({"size": 208}, {"is_causal": True}, A100, FLASH),
    ({"size": 320}, {"is_causal": True}, A100, EFFICIENT),
    ({"dtype": torch.float64}, {"is_causal": True}, A100, MATH),
])
def test_the_kernel_that_cuda_takes(made, call, card, kernel):
    if made.get("kv_heads") and card == T4 and cuda_attention.EFFICIENT_TAKES_GROUPED_QUERIES:
        kernel = EFFICIENT
    assert choose(*qkv(**made), **call, capability=card) == kernel


def test_hopper_takes_cudnn_first_from_2_11_on(monkeypatch):
    monkeypatch.setattr(cuda_attention, "VERSION", (2, 10))
    assert choose(*qkv(), is_causal=True, capability=H100) == FLASH
    monkeypatch.setattr(cuda_attention, "VERSION", (2, 11))
    assert choose(*qkv(), is_causal=True, capability=H100) == CUDNN
    assert choose(*qkv(), is_causal=True, capability=RTX5090) == FLASH          # GeForce Blackwell isn't asked


def test_the_users_choice_counts():
    with sdpa_kernel(MATH):
        assert choose(*qkv(), is_causal=True, capability=A100) == MATH
    with sdpa_kernel([CUDNN, FLASH]):
        assert choose(*qkv(), is_causal=True, capability=A100) == FLASH
    with sdpa_kernel([CUDNN, FLASH], set_priority=True):
        assert choose(*qkv(), is_causal=True, capability=A100) == CUDNN


@pytest.mark.filterwarnings("ignore:.*kernel not used because")
def test_a_kernel_that_cannot_run_raises_in_pytorchs_words():
    with sdpa_kernel(FLASH), pytest.warns(UserWarning, match=r"range \[sm80, sm121\]. Attempting to run on a sm 7.5"):
        with pytest.raises(RuntimeError, match="No available kernel. Aborting execution."):
            sdpa(*qkv(), is_causal=True, capability=T4)
    with pytest.raises(RuntimeError, match="same dtype, but got query.dtype: torch.float16 key.dtype: torch.float32"):
        q, k, v = qkv()
        sdpa(q, k.float(), v, capability=T4)


@pytest.mark.parametrize(("card", "made", "call", "saved"), [
    ("A100 40GB", {"dtype": torch.bfloat16}, {"is_causal": True}, {"logsumexp": ((2, 8, 48), torch.float32),
                                                                   "rng_state": ((2,), torch.uint64)}),
    ("T4", {}, {"is_causal": True}, {"log_sumexp": ((2, 8, 64), torch.float32),          # 48 rows padded to 64
                                     "philox_seed": ((), torch.int64)}),
    ("T4", {"grad": False}, {"is_causal": True}, {}),
])
def test_saved_tensors_and_backward(card, made, call, saved):
    with VirtualGPU(card) as gpu:
        q, k, v = qkv(**made)
        out = sdpa(q, k, v, **call, capability=gpu.card.compute_capability)
        assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
        for name, (shape, dtype) in saved.items():
            tensor = getattr(out.grad_fn, f"_saved_{name}")
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        if saved:
            out.sum().backward()
            assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]


def test_a_boolean_mask_costs_a_bias_in_every_layer():
    """Left-padded batches bring a mask: each call makes a bias of its own from it, in rows of 8, and keeps it."""
    with VirtualGPU("RTX 3080 Laptop 16GB") as gpu:
        q, k, v = qkv(length=41, dtype=torch.bfloat16)
        mask = torch.ones(2, 1, 41, 41, dtype=torch.bool)
        before = gpu.ledger.allocated
        out = sdpa(q, k, v, mask, capability=(8, 6))
        bias = out.grad_fn._saved_attn_bias
        assert (bias.shape, bias.stride(), bias.dtype) == ((2, 8, 41, 41), (41 * 48, 0, 48, 1), torch.bfloat16)
        kept = [out.untyped_storage(), bias.untyped_storage(), out.grad_fn._saved_log_sumexp.untyped_storage()]
        held = sum(-(-s.nbytes() // 512) * 512 for s in kept)           # seed and offset lie on the host
        assert gpu.ledger.allocated - before == held


def test_math_makes_scores_in_float32_and_adds_the_mask_in_place():
    """Inside a dispatch mode PyTorch's own function adds the mask out of place: one copy of the scores too many."""
    with VirtualGPU("T4") as gpu:
        q, k, v = qkv(length=512, kv_heads=2, grad=False)
        out = sdpa(q, k, v, is_causal=True, enable_gqa=True, capability=(7, 5))
        assert out.dtype is torch.float16
    scores = 2 * 8 * 512 * 512 * 4
    made = [str(record.op) for sign, record, *_ in gpu.ledger.events
            if sign > 0 and record.requested == scores and not isinstance(record.op, str)]
    assert made == ["aten.bmm.default", "aten._safe_softmax.default"]


def test_autocast_casts_what_goes_in():
    with VirtualGPU("A100 40GB"), torch.autocast("cuda", dtype=torch.bfloat16):
        out = sdpa(*qkv(dtype=torch.float32), is_causal=True, capability=(8, 0))
    assert out.dtype is torch.bfloat16 and out.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"


@settings(max_examples=25, deadline=None)
@given(heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]), lengths=st.sampled_from([(5, 5), (3, 7), (1, 9)]),
       scale=st.sampled_from([None, 0.3, -0.3]), masked=st.sampled_from(["no", "bool", "float", "causal"]),
       dtype=st.sampled_from([torch.float32, torch.float16]))
def test_math_computes_what_pytorch_computes(heads, lengths, scale, masked, dtype):
    """The law: our spelled-out path equals PyTorch's own, on real numbers."""
    torch.manual_seed(0)
    q = torch.randn(2, heads[0], lengths[0], 8, dtype=dtype)
    k, v = (torch.randn(2, heads[1], lengths[1], 8, dtype=dtype) for _ in range(2))
    mask = {"bool": torch.rand(lengths) > 0.3, "float": torch.randn(lengths, dtype=dtype)}.get(masked)
    call = dict(is_causal=masked == "causal", scale=scale, enable_gqa=heads[0] != heads[1])
    with sdpa_kernel(MATH):
        expected = F.scaled_dot_product_attention(q, k, v, mask, **call)
        actual = sdpa(q, k, v, mask, **call, capability=T4)
    torch.testing.assert_close(actual, expected)


def test_head_padding_of_flash_is_sliced_back():
    with VirtualGPU("A100 40GB"):
        q, k, v = qkv(size=60, dtype=torch.bfloat16)
        out = sdpa(q, k, v, is_causal=True, capability=(8, 0))
        assert out.shape[-1] == 60 and out.stride(-2) % 64 == 0
        flash = out.grad_fn.next_functions[0][0]
        assert flash._saved_query.shape[-1] == 64
        assert math.isclose(flash._saved_scale, 60 ** -0.5)                # of the size before padding
        out.sum().backward()
        assert q.grad.shape[-1] == 60


def test_pytorch_still_has_what_we_stand_on():
    """Private names: a PyTorch without them needs a new look at sdp_utils.cpp."""
    assert sorted(torch._C._get_sdp_priority_order()) == [0, 1, 2, 3, 4]
    assert list(torch._C._get_sdp_priority_order()) == cuda_attention.DEFAULT_ORDER
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
