"""Loss and gradients of our step equal `trl.GRPOTrainer`'s own, to a relative 1e-5 in fp32.

TRL's trainer runs its whole `train()`: sampler, advantages, masks, old and reference log-probs,
micro-batches, accumulation. Only the sampling is replaced, by completions that the test draws, and an SGD
with a large learning rate is handed in, so that later updates see ratios far from 1, some of them clipped.
What TRL buffered for each generation batch then goes through our `score`, `windows` and `update`, with the
weights that TRL had at each update.
"""

from __future__ import annotations

import copy
import gc
import itertools

import datasets
import pytest
import torch
import transformers
import trl
from peft import LoraConfig
from tiny_llama import EOS, make_model, make_tokenizer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from grpo_lab.grpo.loss import group_advantages, token_logps
from grpo_lab.grpo.setup import prepare
from grpo_lab.grpo.step import Samples, score, update, windows
from grpo_lab.recipe import Recipe

TOLERANCE = 1e-5
LEARNING_RATE = 0.3
COMPLETION = 6
BATCHES = 2  # generation batches: the second starts from weights that have moved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_model(seed=1).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    gc.freeze()  # TRL's trainer collects garbage at each start, which takes longer than the training here
    yield path
    gc.unfreeze()


def reward(completion_ids, **_):
    """Anything that varies within a group; two of the four groups get equal rewards now and then."""
    return [float((sum(ids) // 3) % 3) for ids in completion_ids]


class Recorder(transformers.TrainerCallback):
    """What TRL did: weights and gradients at each optimizer step, losses, generation batches as buffered."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.metrics: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.batches: list[list[dict]] = []
        self.scored: list[dict] = []
        self.original_loss, trainer._compute_loss = trainer._compute_loss, self.compute_loss
        self.original_score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self.score
        trainer._generate = self.generate
        trainer.add_callback(self)
        self.random = torch.Generator().manual_seed(7)

    def generate(self, prompts):
        prompt_ids = self.trainer.processing_class(text=prompts)["input_ids"]
        completion_ids = []
        for _ in prompts:
            length = int(torch.randint(1, COMPLETION + 1, (), generator=self.random))
            ids = torch.randint(3, 40, (length,), generator=self.random).tolist()
            completion_ids.append(ids if length == COMPLETION else [*ids, EOS])  # the longest are cut off
        return prompt_ids, completion_ids, None, ["text"] * len(prompts), None, {}, None, []

    def score(self, inputs):
        self.scored.append(self.original_score(inputs))
        return dict(self.scored[-1])

    def compute_loss(self, model, inputs):
        if not self.batches or self.batches[-1] is not self.trainer._buffered_inputs:
            self.batches.append(self.trainer._buffered_inputs)
        loss = self.original_loss(model, inputs)
        self.losses.append(loss.item())
        return loss

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append(gradients(model))
        self.weights.append(copy.deepcopy(model.state_dict()))
        metrics = self.trainer._metrics["train"]
        self.metrics.append({name: values[-1] for name, values in metrics.items() if values})


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def run_trl(folder, recipe: Recipe, updates: int, max_grad_norm: float = 0.0) -> tuple[Recorder, GRPOTrainer]:
    lora = recipe.lora_rank and LoraConfig(r=recipe.lora_rank, lora_alpha=recipe.lora_alpha,
                                           target_modules="all-linear", task_type="CAUSAL_LM")  # fmt: skip
    same = ["per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
            "num_generations", "num_iterations", "beta", "loss_type", "scale_rewards", "epsilon",
            "epsilon_high", "temperature", "max_completion_length"]  # fmt: skip
    args = GRPOConfig(output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[],
                      max_steps=updates, save_strategy="no", logging_strategy="no", disable_tqdm=True,
                      gradient_checkpointing=False, max_grad_norm=max_grad_norm,
                      **{name: getattr(recipe, name) for name in same})  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = ["1+1=", "12+7=", "a", "what is 3*4:", "x=", "77-1=", "b c d", "9="]
    trainer = GRPOTrainer(model, reward, args, datasets.Dataset.from_dict({"prompt": prompts * 4}),
                          processing_class=make_tokenizer(), peft_config=lora or None)
    if lora:  # B starts at zero, which would hide every gradient of A
        torch.manual_seed(3)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    trainer.create_optimizer()
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, factor=1.0)
    recorder = Recorder(trainer)
    trainer.train()
    return recorder, trainer


class Optimizer(torch.optim.SGD):
    """SGD that keeps what it was given."""

    def __init__(self, model) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
        self.model, self.gradients = model, []

    def step(self, closure=None):
        self.gradients.append(gradients(self.model))
        return super().step(closure)


def run_ours(folder, recipe: Recipe, recorder: Recorder, max_grad_norm: float = float("inf")):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = copy.deepcopy(model) if recipe.needs_reference else None
    policy = prepare(model, recipe)
    optimizer, metrics, scored = Optimizer(policy), [], []
    weights = iter(recorder.weights)
    for micro_batches in recorder.batches:
        names = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"]
        samples = Samples(*(torch.cat([micro[name] for micro in micro_batches]) for name in names))
        policy.load_state_dict(recorder.weights[len(metrics)])
        samples = score(policy, samples, recipe, reference)
        scored.append(samples)
        for window in windows(samples, recipe):
            policy.load_state_dict(next(weights))  # rounding would be amplified from update to update
            metrics.append(update(policy, optimizer, window, recipe, max_grad_norm=max_grad_norm))
    return optimizer.gradients, metrics, scored


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def total_updates(recipe: Recipe) -> int:
    micro_batches = recipe.steps_per_generation or recipe.gradient_accumulation_steps
    return BATCHES * recipe.num_iterations * micro_batches // recipe.gradient_accumulation_steps


def check(folder, recipe: Recipe, max_grad_norm: float = 0.0, recorder: Recorder | None = None):
    if recorder is None:
        recorder, _ = run_trl(folder, recipe, total_updates(recipe), max_grad_norm)
    ours, metrics, scored = run_ours(folder, recipe, recorder, max_grad_norm or float("inf"))

    assert len(ours) == len(recorder.gradients) == total_updates(recipe)
    for mine, theirs in zip(ours, recorder.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        whole = max(gradient.norm() for gradient in theirs.values())
        assert whole > 1e-3, "TRL's gradient vanished: the comparison would prove nothing"
        for name in mine:
            error = (mine[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-3 * whole)
            assert error <= TOLERANCE, (name, error.item())
    window = recipe.gradient_accumulation_steps
    sums = [sum(recorder.losses[start : start + window]) for start in range(0, len(recorder.losses), window)]
    for row, theirs in zip(metrics, sums, strict=True):
        # The terms of a loss, of order 1 and of both signs, may cancel: the scale is theirs, not their sum's
        assert abs(row["loss"].item() - theirs) <= TOLERANCE * max(1.0, abs(theirs))
    for samples, micro in zip(scored, recorder.batches, strict=True):
        assert samples.num_items == micro[0]["num_items_in_batch"]
        for ours_, theirs in (("old_logps", "old_per_token_logps"), ("ref_logps", "ref_per_token_logps")):
            assert (getattr(samples, ours_) is None) == (theirs not in micro[0])
            if theirs in micro[0]:
                mask = samples.completion_mask
                both = getattr(samples, ours_) * mask, torch.cat([part[theirs] for part in micro]) * mask
                assert relative(*both) <= TOLERANCE
    return recorder, metrics


def base(**changes) -> Recipe:
    fields = dict(model="tiny", dtype="float32", num_generations=4, per_device_train_batch_size=8,
                  max_prompt_length=16, max_completion_length=COMPLETION)  # fmt: skip
    return Recipe(**fields | changes)


MATRIX = list(itertools.product(["grpo", "bnpo", "dr_grpo", "dapo"], [0.0, 0.1], [1, 2], [1, 4]))


@pytest.mark.parametrize(("loss_type", "beta", "num_iterations", "accumulation"), MATRIX)
def test_loss_and_gradients_equal_trl(folder, loss_type, beta, num_iterations, accumulation):
    check(folder, base(loss_type=loss_type, beta=beta, num_iterations=num_iterations,
                       gradient_accumulation_steps=accumulation,
                       per_device_train_batch_size=8 if accumulation == 1 else 4))  # fmt: skip


@pytest.mark.parametrize("changes", [
    {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1, "loss_type": "grpo", "logits": "chunked"},
    {"temperature": 0.7, "beta": 0.1, "num_iterations": 2},
    {"temperature": 0.7, "beta": 0.1, "num_iterations": 2, "logits": "chunked"},
    {"epsilon": 0.05, "epsilon_high": 0.4, "num_iterations": 2, "loss_type": "bnpo"},
    {"scale_rewards": "batch"}, {"scale_rewards": "none", "loss_type": "dr_grpo"},
    {"lora_rank": 4, "beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 4,
     "per_device_train_batch_size": 4},
    {"lora_rank": 4, "beta": 0.1, "num_iterations": 2, "logits": "chunked"},
    {"activation_checkpointing": True, "num_iterations": 2, "gradient_accumulation_steps": 2},
], ids=lambda changes: ",".join(changes))  # fmt: skip
def test_other_settings_equal_trl(folder, changes):
    """A window's share of the tokens under "dapo" differs from its own tokens once a generation batch feeds
    several updates; adapters take their reference from the policy with the adapter off."""
    check(folder, base(**changes, logits_chunk_size=7))


def test_clipped_gradients_and_metrics_equal_trl(folder):
    recipe = base(num_iterations=2, beta=0.1, epsilon=0.1)
    recorder, metrics = check(folder, recipe, max_grad_norm=0.05)
    norms = [torch.stack([g.norm() for g in step.values()]).norm().item() for step in recorder.gradients]
    assert all(norm <= 0.05 * (1 + TOLERANCE) for norm in norms)
    for ours, theirs in (("entropy", "entropy"), ("kl", "kl"), ("clip_ratio", "clip_ratio/region_mean")):
        values = [row[ours].item() for row in metrics]
        assert values == pytest.approx([row[theirs] for row in recorder.metrics], rel=1e-4, abs=1e-6)
    assert metrics[1]["clip_ratio"] > 0.02, "nothing was clipped: the test is too easy"


def test_advantages_equal_trl(folder):
    for scale in ("group", "batch", "none"):
        recorder, trainer = run_trl(folder, base(scale_rewards=scale, per_device_train_batch_size=16), 1)
        batch = recorder.scored[0]
        both = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        rewards = reward([row[mask.bool()].tolist() for row, mask in both])
        assert relative(group_advantages(torch.tensor(rewards), 4, scale), batch["advantages"]) <= TOLERANCE


def test_scored_log_probs_equal_trls_fused_head(folder):
    """TRL 1.16 never makes the logits; what it makes instead must be the same numbers, entropies too."""
    recorder, trainer = run_trl(folder, base(temperature=0.8), 1)
    batch = recorder.scored[0]
    completion = batch["completion_mask"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    inputs = trainer.model, ids, torch.cat([batch["prompt_mask"], completion], 1), completion.shape[1]
    with torch.no_grad():
        theirs = trainer._get_per_token_logps_and_entropies(*inputs, compute_entropy=True)[:2]
        for logits in ("full", "chunked"):
            ours = token_logps(*inputs, temperature=0.8, logits=logits, return_entropy=True)
            for mine, their in zip(ours, theirs, strict=True):
                assert relative(mine * completion, their * completion) <= TOLERANCE


def test_the_comparison_can_fail(folder):
    """A comparison that passes whatever is compared proves nothing: each of these changes must be noticed."""
    good = base(loss_type="dapo", num_iterations=2, beta=0.1, gradient_accumulation_steps=4,
                per_device_train_batch_size=4)  # fmt: skip
    recorder, _ = run_trl(folder, good, total_updates(good))
    check(folder, good, recorder=recorder)
    for change in ({"loss_type": "bnpo"}, {"beta": 0.05}, {"epsilon": 0.3}, {"temperature": 0.99}):
        with pytest.raises(AssertionError):
            check(folder, good.replace(**change), recorder=recorder)


def test_trl_is_the_version_that_was_read():
    """Private names of TRL's trainer are used above: another minor version must be looked at again."""
    assert trl.__version__.startswith("1.16.")
