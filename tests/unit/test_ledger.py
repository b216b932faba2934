"""The ledger against PyTorch's own account of the same code, run without the ledger."""
import gc
from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
from llama import make_llama
from torch.profiler import ProfilerActivity, profile

from grpo_lab import Recipe, models, simulate, track
from grpo_lab.memory.ledger import Ledger
from grpo_lab.simulation import _steps


def profiled_peak(run) -> int:
    """The highest sum of the CPU allocator's own events while ``run`` runs; nothing of grpo_lab is on."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        run()
    events = sorted((e.start_ns(), e.nbytes()) for e in result.profiler.kineto_results.events() if e.name() == "[memory]")
    now = highest = 0
    for _, nbytes in events:
        now += nbytes
        highest = max(highest, now)
    return highest


SETTINGS = {
    "full": {},
    "large batch": {"per_device_train_batch_size": 64, "optim": "sgd"},         # the peak is the logits' backward
    "chunked": {"logits": "chunked", "logits_chunk_size": 64, "per_device_train_batch_size": 64, "optim": "sgd"},
    "checkpointing": {"activation_checkpointing": True, "per_device_train_batch_size": 64, "optim": "sgd"},
    "lora": {"lora_rank": 8, "per_device_train_batch_size": 32, "beta": 0.1},
    "accumulation": {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "optim": "sgd",
                     "num_iterations": 2, "loss_type": "dapo"},
}


def recipe_for(model: str, changes: dict) -> Recipe:
    return Recipe(**{"model": model, "dtype": "float32", "num_generations": 2, "per_device_train_batch_size": 2,
                     "max_prompt_length": 8, "max_completion_length": 6, **changes})


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("model", ["tiny", "llama"])
def test_a_real_step_as_the_cpu_allocator_saw_it_and_as_it_is_simulated(model, name, llama_folder):
    """A dispatch mode makes autograd copy where it would work in place (7 % too much with checkpointing, once): the
    ledger's peak must be that of a run with no ledger, within 1 %, and the simulated peak the ledger's, to the byte."""
    folder = "tiny" if model == "tiny" else llama_folder
    load = (lambda: models.load("tiny")[0]) if model == "tiny" else make_llama
    recipe = recipe_for(folder, SETTINGS[name])
    simulated = simulate(recipe, kernels="cpu", every_micro_batch=True)
    measured, exact = measured_peak(recipe, load)
    assert simulated.phases.loc[measured.phases.index, "peak_allocated"].to_dict() \
        == measured.phases["peak_allocated"].to_dict()
    assert simulated.peak_allocated == measured.peak_allocated

    trained, reference = load(), load().requires_grad_(False) if recipe.needs_reference else None
    resident = nbytes(trained) + (nbytes(reference) if reference is not None else 0)
    eager = resident + profiled_peak(lambda: _steps(recipe, trained, reference, nullcontext, None))
    assert exact == pytest.approx(eager, rel=0.01)


def measured_peak(recipe, load):
    """The ledger's report of a real run, and its peak before rounding to 512 bytes (a CPU rounds to 64)."""
    model, reference = load(), load().requires_grad_(False) if recipe.needs_reference else None
    with track(existing=False) as memory:
        memory.watch(model)
        if reference is not None:
            memory.watch(reference, "reference model")
        _steps(recipe, model, reference, memory.phase, None)
    sizes = [sign * record.requested for sign, record, _, _ in memory.ledger.events]
    return memory.report(), max(accumulate(sizes))


def nbytes(model) -> int:
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def test_the_short_rollout_peaks_like_the_one_with_every_token():
    """The simulated rollout leaves out all tokens but the first and the last."""
    recipe = recipe_for("tiny", {"max_completion_length": 40})
    short, whole = (simulate(recipe, kernels="cpu", every_micro_batch=every) for every in (False, True))
    more = whole.phases.loc["rollout", "peak_allocated"] - short.phases.loc["rollout", "peak_allocated"]
    assert 0 <= more <= 40 * 512        # the sampled tokens, a block of 512 bytes each, are kept until they are stacked


def test_views_and_in_place_ops_are_not_counted():
    with Ledger() as ledger:
        x = torch.zeros(1024)
        x.view(32, 32).t().add_(1)
    assert ledger.peak_allocated == 4096


def test_categories_are_told_apart():
    model = torch.nn.Linear(1000, 1000, bias=False)
    ledger = Ledger()
    ledger.adopt(model.parameters(), "parameters")
    ledger.watch(model)
    with ledger:
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(10, 1000)).pow(2).sum().backward()
        optimizer.step()
    live = {}
    for sign, record, _, _ in ledger.events:
        live[record.category] = live.get(record.category, 0) + sign * record.bytes
    square = round(1000 * 1000 * 4 / 512 + 0.5) * 512
    assert (live["parameters"], live["gradients"]) == (square, square)
    assert live["optimizer state"] == 2 * square        # exp_avg and exp_avg_sq; `step` is a lifted constant
