"""`simulate_trainer` against the same trainer's real `train()` on the tiny model; what a trainer is afterwards."""
import contextlib
import gc

import bitsandbytes
import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import VirtualGPU, models, track
from grpo_lab._data import data_path
from grpo_lab.memory import MemoryReport
from grpo_lab.memory.swap import on_card
from grpo_lab.trainer.fused_head import TILE, triton_head
from grpo_lab.trainer.no_weights import no_weights
from grpo_lab.trainer.phases import PhaseCallback, phases
from grpo_lab.trainer.twin import simulate_trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
PROMPTS = ["12+34=", "1+1=", "5+5=", "7+8="]       # all four in each generation batch of 8; the first is the longest
CARD, COMPLETION = "RTX 3080 Laptop 8GB", 8


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    """Trainers make their output folder; and collect garbage at each start, which takes longer than training here."""
    gc.freeze()
    with contextlib.chdir(tmp_path_factory.mktemp("trainer")):
        yield
    gc.unfreeze()


def reward(completions, **_):
    return [float(len(set(text))) for text in completions]


def make_args(**changes) -> GRPOConfig:
    fields = dict(output_dir="unused", use_cpu=True, bf16=False, report_to=[], max_steps=2, save_strategy="no",
                  logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=4, num_generations=2,
                  gradient_accumulation_steps=2, max_completion_length=COMPLETION, gradient_checkpointing=False,
                  shuffle_dataset=False, generation_kwargs={"min_new_tokens": COMPLETION}, learning_rate=1e-4)
    return GRPOConfig(**fields | changes)


def make(lora: bool = False, kind=GRPOTrainer, **changes) -> GRPOTrainer:
    extra = {name: changes.pop(name) for name in ("optimizers", "callbacks") if name in changes}
    config = LoraConfig(r=4, target_modules="all-linear") if lora else None
    return kind(str(data_path("tiny")), reward, args=make_args(**changes), peft_config=config,
                train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 4}), **extra)


def real(trainer) -> MemoryReport:
    with track(existing=False) as memory, phases(trainer, memory):
        memory.watch(trainer.model)
        if trainer.ref_model is not None:
            memory.watch(trainer.ref_model, "reference model")
        trainer.train()
    return memory.report()


CASES = {
    "full": {}, "reference model, top-p": {"beta": 0.1, "top_p": 0.9, "loss_type": "dr_grpo"},
    "adapter": {"lora": True, "beta": 0.1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "checkpointing, 4 micro-batches": {"gradient_checkpointing": True, "gradient_accumulation_steps": 4},
    "old log-probs, static cache": {"num_iterations": 2, "cache_implementation": "static"},
    "adapter, checkpointing, 16 bits": {"lora": True, "gradient_checkpointing": True, "beta": 0.1, "bf16": True},
    "adafactor": {"optim": "adafactor", "max_grad_norm": 0.0}, "several rollouts a step": {
        "steps_per_generation": 1, "per_device_train_batch_size": 8, "optim": "sgd"},
}


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_those_of_the_real_step(name):
    """Two optimizer steps from the start: allocated peaks of each phase, byte for byte."""
    trainer = make(**CASES[name])
    fake = simulate_trainer(trainer, gpu=CARD, kernels="cpu", steps=2)
    true = real(trainer)
    both = fake.phases["peak_allocated"].to_frame("simulated").join(true.phases["peak_allocated"], how="inner")
    assert {"rollout", "forward", "backward", "optimizer"} <= set(both.index)
    assert (both["simulated"] - both["peak_allocated"]).to_dict() == dict.fromkeys(both.index, 0)


def allocated(report: MemoryReport, *names: str) -> dict[str, int]:
    return {name: int(report.phases.loc[name, "peak_allocated"]) for name in names}


STEP = ("rollout", "forward", "backward", "optimizer")


def test_the_masks_of_trls_cuda_path_take_what_real_masks_take():
    """On a card TRL scores the completions' tokens only; here real masks pick them from real tensors."""
    trainer = make()
    with triton_head():
        fake = simulate_trainer(trainer, gpu=CARD, kernels="cpu", steps=2)
        true = real(trainer)
    assert allocated(fake, *STEP) == allocated(true, *STEP)


def test_the_fused_head_on_a_card_holds_one_tile_and_gradients_in_float32():
    """TRL's CPU path, taken for the card's, once said 7.6 GiB where a card needs 4.2."""
    shape = LlamaConfig(vocab_size=40_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                        num_attention_heads=2, max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    trainer = GRPOTrainer(model, reward, args=make_args(per_device_train_batch_size=8, max_completion_length=768),
                          processing_class=models.tokenizer("tiny"),
                          train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 4}))
    card, cpu = (simulate_trainer(trainer, gpu=CARD, prompt_length=64, kernels=kind) for kind in ("cuda", "cpu"))
    tile = 4096 * 32768 * 2
    assert card.timeline["logits"].max() >= tile
    head = card.timeline[card.timeline["phase"].isin(["forward", "backward"])]
    assert head["logits"].max() == tile
    assert head["temporaries"].max() >= 40_000 * 64 * 4              # the weight's gradient, in float32
    assert cpu.phases.loc["forward", "peak_allocated"] > card.phases.loc["forward", "peak_allocated"] + 4 * tile


def test_the_steady_state_is_the_second_step():
    trainer = make(beta=0.1)
    names = (*STEP, "reference log-probs")
    steady, two = (simulate_trainer(trainer, gpu=CARD, steps=steps) for steps in (None, 2))
    assert allocated(steady, *names) == pytest.approx(allocated(two, *names), rel=1e-3)    # the last batch's token ids


def test_two_micro_batches_stand_for_all():
    trainer = make(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    two, all_ = (simulate_trainer(trainer, gpu=CARD, every_micro_batch=every) for every in (False, True))
    assert allocated(two, *STEP) == allocated(all_, *STEP)
    assert len(two.timeline) < len(all_.timeline)


def test_the_trainer_is_as_it_was_and_still_trains():
    trainer = make(lora=True, beta=0.1, gradient_checkpointing=True, bf16=True)
    weights = {name: (p, p.detach().clone()) for name, p in trainer.model.named_parameters()}
    attributes = [(thing, dict(vars(thing))) for thing in (trainer, trainer.args, trainer.accelerator, trainer.state,
                                                            *trainer.model.modules())]
    shared = dict(trainer.accelerator.gradient_state._shared_state)
    simulate_trainer(trainer, gpu=CARD)
    for name, parameter in trainer.model.named_parameters():
        assert parameter is weights[name][0] and parameter.equal(weights[name][1])
    for thing, before in attributes:
        assert vars(thing).keys() == before.keys()
        assert all(vars(thing)[name] is value for name, value in before.items())
    assert trainer.accelerator.gradient_state._shared_state == shared
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not p.equal(weights[name][1]) for name, p in trainer.model.named_parameters() if p.requires_grad)


class Loss(GRPOTrainer):
    """A user's own loss: it makes a tensor of 4 MiB and keeps it, or fails."""

    kept, failing = None, False

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.failing:
            raise ArithmeticError("the user's own error")
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.kept = torch.zeros(2**20)
        return loss


def test_a_users_loss_is_run():
    mine, theirs = (simulate_trainer(make(kind=kind), gpu=CARD) for kind in (Loss, GRPOTrainer))
    assert (mine.phases - theirs.phases).loc["backward", "peak_allocated"] == 4 * 2**20


def test_after_an_error_the_trainer_is_as_it_was():
    trainer = make(kind=Loss)
    trainer.failing = True
    parameters, attributes = dict(trainer.model.named_parameters()), set(vars(trainer.model))
    with pytest.raises(ArithmeticError, match="own error"):
        simulate_trainer(trainer, gpu=CARD)
    assert all(p is parameters[name] for name, p in trainer.model.named_parameters())
    assert set(vars(trainer.model)) == attributes and "compute_loss" not in vars(trainer)
    trainer.failing = False
    assert torch.is_tensor(trainer.model(torch.ones(1, 3, dtype=torch.long)).logits)
    assert simulate_trainer(trainer, gpu=CARD).fits


def test_an_optimizer_that_is_handed_in_is_kept_and_its_like_is_simulated():
    model = AutoModelForCausalLM.from_pretrained(data_path("tiny"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = GRPOTrainer(model, reward, args=make_args(), processing_class=models.tokenizer("tiny"),
                          train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}), optimizers=(optimizer, None))
    report = simulate_trainer(trainer, gpu=CARD)
    assert trainer.optimizer is optimizer and not optimizer.state
    weights = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    assert report.timeline["optimizer state"].max() == weights


def test_a_trainer_that_has_trained_simulates_the_same():
    trainer = make(lora=True, bf16=True)
    before = simulate_trainer(trainer, gpu=CARD)
    trainer.train()
    assert allocated(simulate_trainer(trainer, gpu=CARD), *STEP) == allocated(before, *STEP)


class MustNotRun(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        raise AssertionError("a callback ran in a simulation")


def test_callbacks_and_rewards_are_left_out():
    trainer = make(callbacks=[MustNotRun()])
    trainer.reward_funcs = [None]
    assert simulate_trainer(trainer, gpu=CARD).fits


def test_prompts_are_as_long_as_the_longest_of_the_first_batch():
    trainer = make()
    length = len(trainer.processing_class(PROMPTS[0])["input_ids"])
    default, same, longer = (simulate_trainer(trainer, gpu=CARD, prompt_length=n) for n in (None, length, 4 * length))
    assert allocated(default, *STEP) == allocated(same, *STEP)
    assert longer.phases.loc["forward", "peak_allocated"] > same.phases.loc["forward", "peak_allocated"]


def make_for(name: str, **changes) -> GRPOTrainer:
    lora = LoraConfig(r=8, target_modules="all-linear") if changes.pop("lora", False) else None
    return GRPOTrainer(name, reward, args=make_args(**changes), peft_config=lora,
                       train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 4}))


def test_no_weights_and_weights_give_the_same():
    with no_weights():
        without = make_for(str(data_path("tiny")), beta=0.1)
    assert all(p.device.type == "meta" for p in (*without.model.parameters(), *without.ref_model.parameters()))
    with_weights = make_for(str(data_path("tiny")), beta=0.1)
    one, two = (simulate_trainer(trainer, gpu=CARD) for trainer in (without, with_weights))
    assert one.phases.equals(two.phases)
    assert one.categories.loc["reference model", "bytes"] == two.categories.loc["reference model", "bytes"] > 0


@pytest.fixture
def nf4():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                              bnb_4bit_compute_dtype=torch.bfloat16)


def test_a_4_bit_trainer_without_weights(nf4):
    """QLoRA as TRL does it: adapters in 16 bits, packed weights and their scales counted as parameters."""
    with no_weights():
        trainer = make_for(str(data_path("tiny")), lora=True, beta=0.1, gradient_checkpointing=True, bf16=True,
                           model_init_kwargs={"dtype": "bfloat16", "quantization_config": nf4})
    parameters = list(trainer.model.parameters())
    report = simulate_trainer(trainer, gpu=CARD)
    with VirtualGPU(CARD) as gpu:
        model = gpu.load("tiny", dtype="bfloat16", quantization="nf4_double")
    adapters = sum(p.numel() * 2 for p in parameters if p.requires_grad)
    assert gpu.ledger.allocated > 0 and model is not None
    assert report.categories.loc["parameters", "bytes"] == gpu.ledger.allocated + adapters
    assert all(now is then for now, then in zip(trainer.model.parameters(), parameters, strict=True))


def test_real_4_bit_layers_are_put_on_a_card_and_given_back():
    layer = bitsandbytes.nn.Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    weight, state, x = layer.weight, layer.weight.quant_state, torch.ones(2, 128)
    before = layer(x)
    with VirtualGPU(CARD) as gpu, on_card(gpu, layer):
        assert gpu.ledger.allocated >= 128 * 64 // 2 and layer(torch.ones(2, 128)).shape == (2, 64)
    assert layer.weight is weight and layer.weight.quant_state is state and layer(x).equal(before)


def test_a_tokenizer_that_is_not_here_asks_for_a_length():
    with no_weights():
        trainer = make_for("SmolLM2-135M")
    with pytest.raises(ValueError, match="prompt_length=None: the tokenizer of 'SmolLM2-135M'"):
        simulate_trainer(trainer, gpu=CARD)


@pytest.mark.parametrize("place, name, value, words", [
    ("args", "use_vllm", True, "use_vllm"), ("args", "use_liger_kernel", True, "use_liger_kernel"),
    ("trainer", "is_deepspeed_enabled", True, "DeepSpeed"), ("trainer", "is_fsdp_enabled", True, "FSDP"),
    ("trainer", "_is_vlm", True, "images"), ("trainer", "rollout_func", print, "rollout_func"),
    ("args", "use_transformers_continuous_batching", True, "continuous_batching"),
    ("args", "activation_checkpointing_kwargs", {"offload": True}, "offload")])
def test_what_cannot_be_simulated_is_said(tiny_trainer, monkeypatch, place, name, value, words):
    monkeypatch.setattr(tiny_trainer if place == "trainer" else tiny_trainer.args, name, value)
    with pytest.raises(NotImplementedError, match=words):
        simulate_trainer(tiny_trainer, gpu=CARD)


@pytest.fixture(scope="module")
def tiny_trainer():
    return make()


def test_a_private_name_that_is_gone_is_named(tiny_trainer, monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    with pytest.raises(RuntimeError, match="GRPOTrainer has no _calculate_rewards any more"):
        simulate_trainer(tiny_trainer, gpu=CARD)


def test_too_few_prompts_are_said(tiny_trainer, monkeypatch):
    monkeypatch.setattr(tiny_trainer, "train_dataset", datasets.Dataset.from_dict({"prompt": ["1+1="]}))
    with pytest.raises(ValueError, match="train_dataset is too small"):
        simulate_trainer(tiny_trainer, gpu=CARD)


def test_tile_is_trls():
    from trl.trainer import utils
    assert TILE == utils._CHUNKED_LOGPROB_CHUNK_SIZE


def test_a_callback_marks_two_phases_of_each_real_step():
    trainer = make()
    with track(existing=False) as memory:
        trainer.add_callback(PhaseCallback(memory))
        trainer.train()
    report = memory.report()
    assert list(report.phases.index) == ["rollout, forward, backward", "optimizer"]
    assert [entry["phase"] for entry in memory.ledger.phases] == ["rollout, forward, backward", "optimizer"] * 2
    inside = simulate_trainer(trainer, gpu=CARD, kernels="cpu", steps=2)
    before, optimizer = report.phases["peak_allocated"]
    assert before == max(allocated(inside, "rollout", "forward", "backward").values())
    assert 0 < optimizer <= inside.phases.loc["optimizer", "peak_allocated"]        # which has the clipping in it
