"""Host memory: checkpoints, optimizer states and a reference model there change bytes on the card, and no number."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_llama import make_batch, make_model

from grpo_lab import Recipe, VirtualGPU, simulate
from grpo_lab.grpo.offload import stream_layers
from grpo_lab.grpo.optimizer import make_optimizer
from grpo_lab.grpo.setup import prepare
from grpo_lab.grpo.step import Samples, step
from grpo_lab.memory.report import MiB


def recipe(**changes) -> Recipe:
    fields = dict(model="tiny", gpu="A100 80GB", dtype="float32", num_generations=4, per_device_train_batch_size=4,
                  gradient_accumulation_steps=2, max_prompt_length=8, max_completion_length=6, learning_rate=1e-2,
                  optim="adamw_torch_fused")
    return Recipe(**fields | changes)


def trained(steps=3, **changes):
    """The weights after some steps from the same start, and the last step's metrics."""
    fields, torch_state = recipe(**changes), torch.get_rng_state()
    torch.manual_seed(0)                                    # for an adapter's first weights
    model = make_model().to(getattr(torch, fields.dtype))
    reference = make_model(seed=3).to(model.dtype).requires_grad_(False) if fields.needs_reference else None
    if fields.reference_offload:
        stream_layers(reference)
    policy = prepare(model, fields)
    torch.set_rng_state(torch_state)
    optimizer = make_optimizer(policy, fields)
    for seed in range(steps):
        advantages = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        metrics = step(policy, optimizer, Samples(*make_batch(8, 8, 6, seed), advantages), fields, reference)
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}, metrics


def assert_same(ours, theirs, tolerance=0.0):
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= tolerance * expected.abs().max(), name


@pytest.mark.parametrize("extra", [{}, {"lora_rank": 2}, {"beta": 0.1, "logits": "chunked", "logits_chunk_size": 8}])
def test_offloaded_checkpoints_change_no_bit(extra):
    plain, _ = trained(activation_checkpointing=True, **extra)
    moved, _ = trained(activation_checkpointing=True, activation_offload=True, **extra)
    assert_same(moved, plain)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adamw_8bit"])
def test_an_optimizer_on_the_host_is_the_same_optimizer(optim):
    """Also with clipping, which happens there, and with gradients of two micro-batches, which add up there."""
    plain, theirs = trained(optim=optim)
    moved, ours = trained(optim=optim, optimizer_offload=True)
    assert_same(moved, plain, 1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"].item(), rel=1e-5)


def test_an_adapter_s_optimizer_may_live_on_the_host_too():
    assert_same(trained(lora_rank=2, optimizer_offload=True)[0], trained(lora_rank=2)[0], 1e-6)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_stepping_in_the_backward_is_the_same_step_where_nothing_is_clipped(optim, monkeypatch):
    monkeypatch.setattr("grpo_lab.grpo.step.MAX_GRAD_NORM", float("inf"))
    one = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "optim": optim}
    no_clipping = dict(max_grad_norm=float("inf"))

    def run(**changes):
        fields, policy = recipe(**one, **changes), make_model()
        policy = prepare(policy, fields)
        optimizer = make_optimizer(policy, fields)
        for seed in range(3):
            advantages = torch.randn(8, generator=torch.Generator().manual_seed(seed))
            metrics = step(policy, optimizer, Samples(*make_batch(8, 8, 6, seed), advantages), fields, **no_clipping)
            assert all(p.grad is None for p in policy.parameters())
        return policy.state_dict(), metrics

    moved, metrics = run(optimizer_in_backward=True)
    assert_same(moved, run()[0], 1e-6)
    assert metrics["grad_norm"].isnan()                     # never all there at once, so nobody knows


def test_master_weights_keep_what_bfloat16_rounds_away():
    """An update of 1e-3 of a weight is lost in bfloat16, whose steps are 2^-8 apart: forever, without a copy."""
    start = make_model().to(torch.bfloat16).state_dict()
    lost, _ = trained(steps=3, dtype="bfloat16", learning_rate=1e-4)
    kept, _ = trained(steps=3, dtype="bfloat16", learning_rate=1e-4, master_weights=True)
    unchanged = {how: sum((run[name] == start[name]).sum().item() for name in start)
                 for how, run in [("lost", lost), ("kept", kept)]}
    assert unchanged["lost"] > 0 and lost.keys() == kept.keys()
    fields = recipe(dtype="bfloat16", master_weights=True, optim="sgd", learning_rate=1e-4)
    policy = prepare(make_model().to(torch.bfloat16), fields)
    optimizer = make_optimizer(policy, fields)
    copies = [p for group in optimizer.param_groups for p in group["params"]]
    before = [copy.detach().clone() for copy in copies]
    step(policy, optimizer, Samples(*make_batch(8, 8, 6), torch.ones(8)), fields)
    assert all(copy.dtype is torch.float32 for copy in copies)
    assert all((copy != old).any() for copy, old in zip(copies, before))
    for weight, copy in zip(policy.parameters(), copies):
        assert torch.equal(weight, copy.to(torch.bfloat16))


def test_a_reference_on_the_host_scores_the_same():
    reference = make_model(seed=3).requires_grad_(False)
    ids = make_batch(4, 8, 6)[2]
    expected = copy.deepcopy(reference)(ids).logits
    stream_layers(reference)
    assert torch.equal(reference(ids).logits, expected)
    assert_same(trained(beta=0.1, reference_offload=True)[0], trained(beta=0.1)[0])


# -- bytes on the card -----------------------------------------------------------------------------

LONG = dict(model="SmolLM2-135M", gpu="RTX 3080 Laptop 16GB", per_device_train_batch_size=2,
            gradient_accumulation_steps=4, max_prompt_length=256, max_completion_length=768, logits="chunked",
            logits_chunk_size=64, activation_checkpointing=True, rollout_batch_size=4, optim="adamw_torch_fused")


def test_two_layers_inputs_stay_on_the_card():
    """30 layers' inputs of 2 x 1,024 tokens x 576 numbers x 2 bytes go to the host."""
    here = simulate(Recipe(**LONG))
    there = simulate(Recipe(**LONG, activation_offload=True))
    one = 2 * 1024 * 576 * 2
    saved = here.phases.loc["forward", "peak_allocated"] - there.phases.loc["forward", "peak_allocated"]
    assert 27 * one <= saved <= 30 * one
    assert there.peak_host == 30 * one and here.peak_host == 0


def test_states_and_gradients_leave_the_card():
    """16 bytes a weight: copies, both states and a gradient in float32; and the largest gradient as it arrives."""
    report = simulate(Recipe(**LONG, optimizer_offload=True, master_weights=True))
    weights = 134_515_008
    assert 16 * weights <= report.peak_host <= 16 * weights + 6 * 49_152 * 576 + MiB
    assert report.phases.loc["optimizer", "peak_allocated"] == pytest.approx(2 * weights, rel=0.1)
    at_peak = report.timeline.loc[report.timeline["phase"] == "optimizer"]
    assert at_peak["optimizer state"].max() == 0 and at_peak["gradients"].max() < MiB


def test_gradients_are_gone_as_they_come():
    fields = LONG | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    kept = simulate(Recipe(**fields)).timeline
    freed = simulate(Recipe(**fields, optimizer_in_backward=True))
    assert freed.phases.loc["optimizer", "peak_allocated"] == pytest.approx(3 * 2 * 134_515_008, rel=0.05)
    assert 2 * 134_515_008 <= kept["gradients"].max() <= 2.2 * 134_515_008


# -- host memory in the instrument -----------------------------------------------------------------


def test_what_is_computed_from_host_tensors_stays_there():
    with VirtualGPU("T4") as gpu:
        x = torch.zeros(2**20)
        host = x.to("cpu")
        both = gpu.ledger.host.bytes
        more = (host * 2).to(torch.bfloat16)
        assert gpu.ledger.host.bytes - both == 2 * 2**20 and gpu.ledger.allocated == 4 * MiB
        back = more.to(x.device)                            # as `tensor.device` says, which is the card
        assert gpu.ledger.allocated == 6 * MiB and back.dtype is torch.bfloat16
        del host, more
        assert gpu.ledger.host.bytes == 0
        pinned = torch.empty(2**20, pin_memory=True).copy_(x, non_blocking=True)
        assert gpu.ledger.host.bytes == pinned.nbytes and gpu.ledger.allocated == 6 * MiB


def test_an_optimizer_of_host_weights_makes_nothing_on_the_card():
    with VirtualGPU("T4") as gpu:
        weight = torch.nn.Parameter(torch.empty(1000, device="cpu"))
        weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        optimizer.step()
        assert gpu.ledger.allocated == 0 and gpu.ledger.host.bytes == 4 * 4000 + 4      # and its count of steps


def test_pytorch_s_own_offload_is_seen():
    """A hook's pinned tensor is made inside another op, where only the dispatcher looks."""
    def pack(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)

    with VirtualGPU("T4") as gpu:
        x = torch.zeros(1024, 1024, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda host: host.to(x.device)):
            loss = x.exp().sum()
        assert gpu.ledger.host.bytes == 4 * MiB and gpu.ledger.allocated < 5 * MiB
        loss.backward()
    assert gpu.report().peak_host == 4 * MiB
