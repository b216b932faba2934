"""One step: phases, micro-batches, references, adapters, checkpointing, precision, optimizers, no data."""

from __future__ import annotations

import copy
import itertools
import warnings
from contextlib import contextmanager

import pytest
import torch
from tiny_llama import make_batch, make_model
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_lab.grpo.loss import token_logps
from grpo_lab.grpo.rollout import decode, generation_mode, prefill, sample
from grpo_lab.grpo.optimizer import make_optimizer
from grpo_lab.grpo.setup import prepare
from grpo_lab.grpo.step import Samples, score, step, update, windows
from grpo_lab.recipe import Recipe


def without_data(model):
    """Fake weights in a model; PEFT can't wrap fake ones, so this comes after `prepare` on meta."""
    fakes = {}  # tied weights stay one

    def fake(weight):
        if id(weight) not in fakes:
            fakes[id(weight)] = torch.empty(weight.shape, dtype=weight.dtype)
        return fakes[id(weight)]

    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not isinstance(fake(weight), torch.nn.Parameter):
                fakes[id(weight)] = torch.nn.Parameter(fake(weight), requires_grad=weight.requires_grad)
            module._parameters[name] = fakes[id(weight)]
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = fake(buffer)
    return model


def recipe(**changes) -> Recipe:
    fields = dict(model="tiny", gpu="A100 80GB", dtype="float32", num_generations=4,
                  per_device_train_batch_size=8, max_prompt_length=8, max_completion_length=6, optim="sgd",
                  learning_rate=0.1)  # fmt: skip
    return Recipe(**fields | changes)


def samples(rows: int = 8, seed: int = 0, **keywords) -> Samples:
    advantages = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
    return Samples(*make_batch(rows, 8, 6, seed), advantages, **keywords)


def gradients_of(recipe, samples, model=None, reference=None, **keywords):
    """The first update's gradients, by an optimizer that keeps them. Clipping would hide a wrong scale."""
    keywords = {"max_grad_norm": float("inf"), **keywords}
    policy = prepare(make_model() if model is None else model, recipe)
    kept = {}

    class Keep(torch.optim.SGD):
        def step(self, closure=None):
            kept.update({n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad})

    optimizer = Keep([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    scored = score(policy, samples, recipe, reference)
    metrics = update(policy, optimizer, next(windows(scored, recipe)), recipe, **keywords)
    return kept, metrics


def assert_equal(ours: dict, theirs: dict, tolerance: float = 1e-5):
    assert ours.keys() == theirs.keys() and ours
    for name, expected in theirs.items():
        error = (ours[name].float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
        assert error <= tolerance, (name, error.item())


# -- phases and windows ----------------------------------------------------------------------------


def run_phases(recipe, **keywords) -> list[str]:
    names = []

    @contextmanager
    def phase(name):
        names.append(name)
        yield

    policy = prepare(make_model(), recipe)
    batch = samples(recipe.generation_batch_size)
    step(policy, make_optimizer(policy, recipe), batch, recipe, phase=phase, **keywords)
    return names


def test_phases_in_their_order():
    passes = ["forward", "backward"]
    assert run_phases(recipe()) == [*passes, "optimizer"]
    assert run_phases(recipe(gradient_accumulation_steps=2)) == [*passes, *passes, "optimizer"]
    assert run_phases(recipe(num_iterations=2)) == ["old log-probs", *[*passes, "optimizer"] * 2]
    expected = ["reference log-probs", *passes, "optimizer"]
    assert run_phases(recipe(beta=0.1), reference=make_model()) == expected
    assert run_phases(recipe(beta=0.1, lora_rank=2)) == expected


def test_windows_share_the_batch():
    two = recipe(steps_per_generation=4, gradient_accumulation_steps=2)
    assert [len(window) for window in windows(samples(32), two)] == [16, 16]
    sizes = [len(w) for w in windows(samples(10), recipe(steps_per_generation=4, num_iterations=2))]
    assert sizes == [3, 3, 3, 1] * 2, "rows that are left after flat groups went are shared out"
    with pytest.raises(ValueError, match="steps_per_generation=3.*gradient_accumulation_steps=2.*use 4"):
        list(windows(samples(24), recipe(steps_per_generation=3, gradient_accumulation_steps=2)))


def test_slices_keep_the_batchs_token_count():
    whole = samples(num_items=torch.tensor(40))
    part = whole[torch.tensor([3, 1])]
    assert len(part) == 2 and part.num_items == 40 and part.old_logps is None
    assert torch.equal(part.completion_ids[0], whole.completion_ids[3])


# -- the same update by other means ----------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_accumulation_gives_the_whole_batchs_gradient(loss_type):
    """Dividing each micro-batch by its own token count, as many loops did, weights short answers more."""
    whole, _ = gradients_of(recipe(loss_type=loss_type), samples())
    parts, metrics = gradients_of(recipe(loss_type=loss_type, per_device_train_batch_size=2,
                                         gradient_accumulation_steps=4), samples())  # fmt: skip
    assert_equal(parts, whole)


def test_bnpo_depends_on_the_micro_batches():
    whole, _ = gradients_of(recipe(loss_type="bnpo"), samples())
    parts, _ = gradients_of(recipe(loss_type="bnpo", per_device_train_batch_size=2,
                                   gradient_accumulation_steps=4), samples())  # fmt: skip
    with pytest.raises(AssertionError):
        assert_equal(parts, whole)


@pytest.mark.parametrize("changes", [
    {"activation_checkpointing": True}, {"logits": "chunked", "logits_chunk_size": 7},
    {"activation_checkpointing": True, "logits": "chunked", "beta": 0.1},
    {"activation_checkpointing": True, "lora_rank": 4, "beta": 0.1},
], ids=lambda changes: ",".join(changes))  # fmt: skip
def test_memory_savers_change_no_gradient(changes):
    plain = {name: value for name, value in changes.items() if name in ("lora_rank", "beta")}
    reference = make_model(seed=5) if changes.get("beta") and "lora_rank" not in changes else None
    results = []
    for fields in (plain, changes):
        torch.manual_seed(0)
        results.append(gradients_of(recipe(**fields), samples(), reference=reference)[0])
    assert_equal(results[1], results[0])


def test_rows_without_advantage_can_be_left_out():
    """The denominators are those of the whole batch, so the gradient is the same and the work less."""
    whole = samples()
    whole.advantages[2:6] = 0
    for loss_type in ("grpo", "dr_grpo", "dapo"):
        scored = score(None, whole, recipe(loss_type=loss_type))
        expected, _ = gradients_of(recipe(loss_type=loss_type), scored)
        got, _ = gradients_of(recipe(loss_type=loss_type), scored[scored.advantages != 0])
        assert_equal(got, expected)


def test_an_unscored_window_counts_its_own_tokens():
    policy = prepare(make_model(), recipe())
    optimizer = make_optimizer(policy, recipe())
    bare = update(copy.deepcopy(policy), optimizer, samples(), recipe())
    scored = update(policy, optimizer, score(policy, samples(), recipe()), recipe())
    assert bare["loss"] == scored["loss"]


# -- references and adapters -----------------------------------------------------------------------


def test_the_adapter_switched_off_is_the_reference():
    base = make_model()
    lora = recipe(lora_rank=4, beta=0.1)
    policy = prepare(copy.deepcopy(base), lora)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    scored = score(policy, samples(), lora)
    own = score(prepare(base, recipe()), samples(), recipe(beta=0.1), reference=base)
    torch.testing.assert_close(scored.ref_logps, own.ref_logps)
    ids = torch.cat([scored.prompt_ids, scored.completion_ids], 1)
    mask = torch.cat([scored.prompt_mask, scored.completion_mask], 1)
    assert (token_logps(policy, ids, mask, 6) - scored.ref_logps).abs().max() > 0.01, "the adapter stayed off"
    assert not scored.ref_logps.requires_grad


def test_a_missing_reference_is_said():
    with pytest.raises(ValueError, match="beta=0.1 needs a reference model.*reference=copy.deepcopy"):
        score(make_model(), samples(), recipe(beta=0.1))


def test_lora_trains_only_the_adapter():
    lora = recipe(lora_rank=2, optim="adamw_torch")
    policy = prepare(make_model(), lora)
    before = copy.deepcopy(policy.state_dict())
    step(policy, make_optimizer(policy, lora), samples(), lora)
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)
    layers = {name.split(".lora_")[0].split(".")[-1] for name in changed}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(("weights", "adapter"), itertools.product(["float32", "bfloat16"], repeat=2))
def test_lora_dtype_is_honoured(weights, adapter):
    """PEFT makes adapters over 16-bit weights in fp32 unless told otherwise; both are wanted, by name."""
    fields = recipe(lora_rank=2, lora_dtype=adapter, lora_targets=("q_proj", "v_proj"), dtype=weights)
    policy = prepare(make_model().to(getattr(torch, weights)), fields)
    dtypes = {p.requires_grad: p.dtype for p in policy.parameters()}
    assert dtypes == {True: getattr(torch, adapter), False: getattr(torch, weights)}
    assert {n.split(".lora_")[0].split(".")[-1] for n, p in policy.named_parameters() if p.requires_grad} == {
        "q_proj", "v_proj"}  # fmt: skip
    config = policy.peft_config["default"]
    assert (config.r, config.lora_alpha) == (2, 4)


def test_prepare_is_quiet():
    """transformers and PEFT both warn of names that the other still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(make_model(), recipe(activation_checkpointing=True))
        prepare(make_model(), recipe(activation_checkpointing=True, lora_rank=2))


def test_prepare_works_without_data():
    with torch.device("meta"):
        model = make_model()
    policy = prepare(model, recipe(lora_rank=2, lora_dtype="bfloat16", activation_checkpointing=True))
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.bfloat16}


# -- optimizers and precision ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adamw_8bit",
                                   "paged_adamw_8bit"])  # fmt: skip
def test_optimizers_take_a_step(optim):
    fields = recipe(optim=optim, learning_rate=1e-3)
    policy = prepare(make_model(), fields)
    before = copy.deepcopy(policy.state_dict())
    optimizer = make_optimizer(policy, fields, adam_beta2=0.99)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and optimizer.param_groups[0]["weight_decay"] == 0
    if "adamw" in optim:
        assert tuple(optimizer.param_groups[0]["betas"]) == (0.9, 0.99)
    step(policy, optimizer, samples(), fields)
    assert any(not torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("changes", [
    {"autocast": "bfloat16"}, {"autocast": "float16"}, {"dtype": "bfloat16"},
])  # fmt: skip
@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_sixteen_bits_are_near(changes, logits):
    fields = recipe(**changes, logits=logits, beta=0.1)
    reference = make_model(seed=5)
    expected, theirs = gradients_of(recipe(beta=0.1), samples(), reference=reference)
    dtype = getattr(torch, changes.get("dtype", "float32"))
    scaler = torch.amp.GradScaler("cpu") if changes.get("autocast") == "float16" else None
    got, ours = gradients_of(fields, samples(), make_model().to(dtype), copy.deepcopy(reference).to(dtype),
                             scaler=scaler)  # fmt: skip
    assert_equal(got, expected, tolerance=0.15)
    for name in ("loss", "kl", "entropy"):
        assert ours[name].item() == pytest.approx(theirs[name].item(), rel=0.05, abs=0.02)


def test_clipping_the_gradient():
    fields = recipe()
    kept, metrics = gradients_of(fields, samples(), max_grad_norm=1e-3)
    assert metrics["grad_norm"] > 1e-3
    norm = torch.stack([gradient.norm() for gradient in kept.values()]).norm().item()
    assert norm == pytest.approx(1e-3, rel=1e-2)


# -- fake tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"beta": 0.1, "num_iterations": 2},
    {"lora_rank": 2, "beta": 0.1, "activation_checkpointing": True, "gradient_accumulation_steps": 2},
    {"autocast": "bfloat16", "logits": "chunked", "steps_per_generation": 2},
], ids=lambda changes: ",".join(changes))  # fmt: skip
def test_a_step_runs_without_data(changes):
    """The simulator runs this code on fake tensors: reading a value anywhere would stop it."""
    fields = recipe(**changes, optim="adamw_torch")
    with torch.device("meta"):
        policy = prepare(make_model(), fields)
        reference = make_model() if fields.needs_reference else None
    with FakeTensorMode():
        policy, reference = without_data(policy), reference and without_data(reference)
        size = fields.generation_batch_size
        fake = Samples(torch.zeros(size, 8).long(), torch.ones(size, 8).long(), torch.zeros(size, 6).long(),
                       torch.ones(size, 6).long(), torch.zeros(size))  # fmt: skip
        metrics = step(policy, make_optimizer(policy, fields), fake, fields, reference)
        assert metrics["loss"].shape == metrics["grad_norm"].shape == ()
        with generation_mode(policy):
            logits, cache = prefill(policy, fake.prompt_ids, fake.prompt_mask)
            token = sample(logits, 1.0)
            mask = torch.cat([fake.prompt_mask, torch.ones(size, 1).long()], 1)
            assert decode(policy, token[:, None], mask, cache).shape == logits.shape
