"""What CUDA kernels allocate inside, and the functions that ask for the device."""
import pytest
import torch
import torch.utils.checkpoint
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from grpo_lab import VirtualGPU
from grpo_lab.memory import cuda_kernels
from grpo_lab.memory.cuda_functions import FLOAT32, INTO_FLOAT32, NOT_HERE, also_in_backward, on_the_card
from grpo_lab.memory.cuda_kernels import TEMPORARIES, cublas_workspace, cublaslt_workspace, inside, takes_cublaslt

aten = torch.ops.aten
KiB, MiB = 2**10, 2**20
half = {"dtype": torch.bfloat16, "device": "meta"}


def attention(batch, heads, length, size, kv_heads=None, dtype=torch.bfloat16):
    q, k, v, out = (torch.empty(batch, length, n, size, dtype=dtype, device="meta").transpose(1, 2)
                    for n in (heads, kv_heads or heads, kv_heads or heads, heads))
    return out, q, k, v, out


def flash(*shape, **options):
    grad, q, k, v, out = attention(*shape, **options)
    args = (grad, q, k, v, out, None, None, None, shape[2], shape[2], 0.0, True, None, None)
    return dict(inside(aten._scaled_dot_product_flash_attention_backward.default, args, {}, (8, 0)))


def efficient(*shape, capability, dropout=0.0, **options):
    grad, q, k, v, out = attention(*shape, **options)
    args = (grad, q, k, v, None, out, None, None, None, dropout, [True, True, True, False], True)
    return dict(inside(aten._scaled_dot_product_efficient_attention_backward.default, args, {}, capability))


def test_flash_backward_has_a_float32_accumulator_and_expands_grouped_heads():
    """Qwen2.5-0.5B, 8 x 768 tokens: 14 query heads on 2 key heads of 64."""
    found = flash(8, 14, 768, 64, kv_heads=2)
    assert found == {"softmax_d": 8 * 14 * 768 * 4, "dq_accum": 8 * 768 * 14 * 64 * 4,
                     "dk_expanded": 8 * 768 * 14 * 64 * 2, "dv_expanded": 8 * 768 * 14 * 64 * 2}
    assert set(flash(8, 14, 768, 64)) == {"softmax_d", "dq_accum"}
    assert flash(1, 1, 129, 80)["dq_accum"] == 256 * 96 * 4                 # rows to 128, head size to 32
    assert flash(1, 1, 128, 160)["dq_accum"] == 128 * 192 * 4               # to 64 above 128


def test_a_gradient_in_another_layout_is_copied():
    grad, q, k, v, out = attention(2, 4, 64, 64)
    args = (grad.contiguous(), q, k, v, out, None, None, None, 64, 64, 0.0, True, None, None)
    found = dict(inside(aten._scaled_dot_product_flash_attention_backward.default, args, {}, (8, 0)))
    assert found["grad_out.contiguous()"] == 2 * 4 * 64 * 64 * 2


@pytest.mark.parametrize(("size", "capability", "blocks"), [
    (64, (7, 5), (64, 64, True)), (128, (7, 5), (128, 64, True)), (256, (7, 5), (128, 64, False)),
    (64, (8, 6), (64, 64, True)), (96, (8, 9), (128, 64, True)), (128, (8, 6), (64, 64, False)),
    (96, (8, 0), (128, 128, True)), (128, (8, 0), (128, 128, True)), (128, (12, 0), (64, 64, False)),
    (256, (8, 6), (128, 64, False))])
def test_the_efficient_backward_takes_the_first_kernel_that_fits(size, capability, blocks):
    """A 128 x 128 tile takes 130.5 KiB of shared memory: an A100 has it, a 3080 keeps dK and dV in memory instead."""
    assert cuda_kernels.efficient_kernel(size, True, False, capability) == blocks


def test_efficient_backward_workspace():
    assert efficient(8, 14, 768, 64, capability=(7, 5), dtype=torch.float16) == {
        "delta": 8 * 14 * 768 * 4, "workspace": 8 * 14 * 12 * (64 * 64 + 4) * 4}
    # a 3080, head size 128: 12 x 2 tiles for dq; two splits of dk and dv, as 200 // 96 allows
    assert efficient(6, 16, 768, 128, capability=(8, 6))["workspace"] == (
        6 * 16 * (12 * 2 * 4100 + 2 * 64 * (128 + 128)) * 4)
    assert efficient(1, 2, 64, 64, capability=(8, 0), dtype=torch.float32)["workspace"] == (
        2 * (4100 + 64 * (64 + 64)) * 4)


@given(tokens=st.integers(1, 20_000), width=st.sampled_from([64, 896]), vocabulary=st.sampled_from([1000, 151_936]))
def test_embedding_backward_sorts_above_3072_tokens(tokens, width, vocabulary):
    grad, ids = torch.empty(tokens, width, **half), torch.empty(tokens, dtype=torch.long, device="meta")
    found = dict(inside(aten.embedding_dense_backward.default, (grad, ids, vocabulary, -1, False), {}, (8, 0)))
    if tokens <= 3072:
        assert found == {}
    else:
        assert found["grad_weight_per_segment"] == (tokens // 10 + min(tokens, vocabulary)) * width * 4


def test_sorting_a_vocabulary():
    """Top-p sorts the logits of every sequence at once: 32 bytes a logit for 8 sequences, next to the sorted copy."""
    logits = torch.empty(8, 151_936, device="meta")
    for func, args, kwargs in [(aten.sort.default, (logits, -1, True), {}),
                               (aten.sort.stable, (logits,), {"stable": True, "dim": -1})]:
        assert sum(size for _, size in inside(func, args, kwargs, (8, 0))) == 8 * 151_936 * (16 + 4 + 12)
    assert sum(size for _, size in inside(aten.sort.default, (logits[:1],), {}, (8, 0))) == 151_936 * (8 + 12)
    assert inside(aten.sort.default, (logits[:, :4096],), {}, (8, 0)) == []


def test_smaller_rules():
    x, ids = torch.empty(4, 64, 32, device="meta"), torch.empty(100, dtype=torch.long, device="meta")
    total = lambda func, *args: sum(size for _, size in inside(func, args, {}, (8, 0)))         # noqa: E731
    assert total(aten._softmax.default, x, -1, False) == 0
    assert total(aten._softmax.default, x.transpose(0, 1), -1, False) == x.numel() * 4
    assert total(aten._safe_softmax.default, x, -1) == x.numel() * 5
    assert total(aten.multinomial.default, x[0], 1) == 64 * 32 * 4
    assert total(aten.multinomial.default, x[0], 2, True) == 0
    assert total(aten.index_put.default, x[0], [ids], x[0], True) == 100 * (4 * 8 + 16)
    assert total(aten.index_put.default, x[0], [ids], x[0], False) == 0
    assert total(aten._foreach_norm.Scalar, [torch.empty(65_537, device="meta"), x], 2) == 2 * 2 * 4
    assert total(aten.add.Tensor, x, x) == 0


def test_every_op_in_the_table_has_that_schema():
    """Rules read arguments by their place: a schema that changes must not go unnoticed."""
    names = {func: [argument.name for argument in func._schema.arguments] for func in TEMPORARIES}
    assert names[aten._scaled_dot_product_flash_attention_backward.default][:5] == [
        "grad_out", "query", "key", "value", "out"]
    efficient_names = names[aten._scaled_dot_product_efficient_attention_backward.default]
    assert efficient_names[:6] == ["grad_out_", "query", "key", "value", "attn_bias", "out"]
    assert efficient_names[9] == "dropout_p"
    assert names[aten.embedding_dense_backward.default] == [
        "grad_output", "indices", "num_weights", "padding_idx", "scale_grad_by_freq"]
    assert names[aten.sort.default][:2] == ["self", "dim"] and names[aten.multinomial.default][2] == "replacement"
    assert names[aten.index_put.default] == ["self", "indices", "values", "accumulate"]


def test_cublas_workspaces(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    assert cublas_workspace((8, 6)) == 8_519_680 and cublas_workspace((9, 0)) == 32 * MiB
    assert [cublas_workspace((12, 0), version) for version in ((2, 11), (2, 12))] == [8_519_680, 32 * MiB]
    assert cublaslt_workspace() == MiB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert (cublas_workspace((9, 0)), cublaslt_workspace()) == (128 * KiB, 4 * MiB)
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert cublaslt_workspace() == 0
    bias, x, weight = torch.empty(8, **half), torch.empty(4, 16, **half), torch.empty(16, 8, **half)
    assert takes_cublaslt((bias, x, weight), {})
    assert not takes_cublaslt((bias, x[:1], weight), {}) and not takes_cublaslt((bias, x, weight), {"beta": 0})


class Card(TorchFunctionMode):
    """What the virtual card does with a function, alone."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = on_the_card(func, args, kwargs or {}, (8, 6))
        return func(*args, **(kwargs or {})) if out is NOT_HERE else out


def test_dropout_keeps_one_byte_an_element():
    """LoRA's dropout: on a card the mask is bool; the CPU's is a tensor of the input's dtype, four times as large."""
    with VirtualGPU("A100 40GB"), Card():
        x = torch.empty(8, 768, 896, requires_grad=True)
        out = torch.nn.Dropout(0.05)(x)
        mask = out.grad_fn._saved_result1
        out.sum().backward()
    assert (mask.dtype, mask.shape, x.grad.shape) == (torch.bool, x.shape, x.shape)
    with Card():
        real = torch.ones(1000, requires_grad=True)
        out = F.dropout(real, 0.25)
        assert torch.equal(out, torch.where(out == 0, 0.0, torch.ones(1000) / 0.75)) and 0 < out.count_nonzero() < 1000
        assert torch.equal(F.dropout(real, 0.25, training=False), real)
        assert torch.equal(F.dropout(real, 1.0), torch.zeros(1000))


@pytest.mark.parametrize(("backward", "reentrant"), [
    (lambda y, x: y.sum().backward(), True), (lambda y, x: y.sum().backward(), False),
    (lambda y, x: torch.autograd.backward(y.sum()), True), (lambda y, x: torch.autograd.grad(y.sum(), x), False)])
def test_checkpointing_recomputes_with_the_cards_functions(backward, reentrant):
    """`loss.backward()` switches function modes off while it runs: the recomputed layers took the CPU's attention."""
    def attention(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    with VirtualGPU("A100 40GB") as gpu, Card() as card, also_in_backward(card):
        x = torch.empty(2, 8, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        backward(torch.utils.checkpoint.checkpoint(attention, x, use_reentrant=reentrant), x)
    forward = aten._scaled_dot_product_flash_attention.default
    outputs = [record for sign, record, *_ in gpu.ledger.events
               if sign > 0 and record.op is forward and record.requested == 2 * 8 * 64 * 64 * 2]
    assert len(outputs) == 2


def test_float16_softmax_makes_no_float32_copy_of_its_input():
    """Eager attention on a T4: softmax(scores, dtype=float32) counted a copy of the scores that CUDA never makes."""
    made = {}
    for dtype in (torch.float16, torch.bfloat16):
        with VirtualGPU("T4") as gpu, Card():
            scores = torch.empty(2, 8, 256, 256, dtype=dtype, requires_grad=True)
            out = F.softmax(scores, dim=-1, dtype=torch.float32)
            assert out.dtype is torch.float32
            made[dtype] = sum(sign > 0 and record.requested == scores.numel() * 4
                              for sign, record, *_ in gpu.ledger.events)
            out.sum().backward()
            assert scores.grad.dtype is dtype
    assert made == {torch.float16: 1, torch.bfloat16: 2}


@pytest.mark.parametrize("call", [
    lambda x: x.exp(), lambda x: torch.rsqrt(x), lambda x: x.pow(2), lambda x: x ** 2, lambda x: x.sum(-1),
    lambda x: x.cumsum(-1), lambda x: F.softmax(x, -1), lambda x: torch.log_softmax(x, -1), lambda x: x.logsumexp(-1),
    lambda x: F.layer_norm(x, (8,)), lambda x: torch.linalg.vector_norm(x),
    lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32_what_cuda_does(call, dtype):
    x = torch.rand(4, 8, dtype=dtype) + 1
    with torch.autocast("cpu", dtype=dtype), Card():
        assert call(x.to("meta")).dtype is torch.float32
        assert (x + x).dtype is dtype                               # not in the list
        if dtype is torch.bfloat16:                                 # a CPU has no float16 softmax into float32
            torch.testing.assert_close(call(x), call(x.float()))


def test_autocast_leaves_a_dtype_that_is_asked_for():
    x = torch.rand(4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), Card():
        assert x.sum(dtype=torch.bfloat16).dtype is torch.bfloat16
        assert F.softmax(x, -1, dtype=torch.bfloat16).dtype is torch.bfloat16
    with Card():
        assert x.exp().dtype is torch.bfloat16                      # no autocast, no cast


def test_autocasts_weight_cache_is_a_cards():
    """A trained float32 weight is cast once, the copy lives until autocast ends; a frozen one is cast every time."""
    def casts(trained):
        with VirtualGPU("A100 40GB") as gpu, Card():
            layer = torch.nn.Linear(512, 512, bias=False).requires_grad_(trained)
            x = torch.empty(4, 512, dtype=torch.bfloat16)
            before = gpu.ledger.allocated
            with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
                layer(x), layer(x)
                held = gpu.ledger.allocated - before - 8_519_680
            after = gpu.ledger.allocated - before - 8_519_680
            made = sum(sign > 0 and record.requested == 512 * 512 * 2 for sign, record, *_ in gpu.ledger.events)
        return made, held, after
    assert casts(trained=True) == (1, 512 * 512 * 2, 0)
    assert casts(trained=False) == (2, 0, 0)


def test_lists_hold_functions_and_methods():
    assert torch.Tensor.exp in FLOAT32 and torch.exp in FLOAT32 and F.layer_norm in FLOAT32
    assert torch.Tensor.sum in INTO_FLOAT32 and F.softmax in INTO_FLOAT32 and not FLOAT32 & INTO_FLOAT32
