"""A `trl.GRPOTrainer` as it stands, on a card that isn't there: TRL's own step runs on fake tensors.

>>> trainer = GRPOTrainer(model, reward, args=GRPOConfig(...), train_dataset=dataset)        # doctest: +SKIP
>>> simulate_trainer(trainer, gpu="RTX 3080 Laptop 16GB").phases                             # doctest: +SKIP

and where the weights are too large to load, or not at hand:

>>> with no_weights():                                                                       # doctest: +SKIP
...     trainer = GRPOTrainer("Qwen3-8B", reward, args=GRPOConfig(...), train_dataset=dataset)

The trainer's own `train()` runs: its batches, `generate`, old and reference log-probs, `compute_loss` (a subclass's
too), accumulation, clipping and optimizer. Left out are callbacks, logging, saving, evaluation and the reward
functions: all rewards are 0, and the memory of reward models isn't counted.
"""
from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ..memory import MemoryReport, VirtualGPU
from ..memory.swap import on_card
from ..memory.values import ReadsOfValues
from .fused_head import TILE, need, triton_head
from .generate import few_tokens
from .no_weights import STAND_IN

PRIVATE = ("_generate", "_tokenize_prompts", "_calculate_rewards", "_get_per_token_logps_and_entropies",
           "_clip_grad_norm", "_buffered_inputs", "_step", "_metrics")
QUIET = {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
         "eval_on_start": False, "load_best_model_at_end": False, "push_to_hub": False, "torch_compile": False,
         "auto_find_batch_size": False, "dataloader_num_workers": 0, "dataloader_persistent_workers": False}


def simulate_trainer(trainer, *, gpu: str | int | None, prompt_length: int | None = None, steps: int | None = None,
                     every_micro_batch: bool = False, kernels: str = "cuda",
                     alloc_conf: str | None = None) -> MemoryReport:
    """What ``trainer.train()`` would do to a card, without the card; the trainer is afterwards as it was before.

    Completions all reach ``args.max_completion_length``. ``prompt_length`` None takes the dataset's first generation
    batch, whose longest prompt pads the others; a number takes that many tokens for each. ``steps`` None looks at a
    step of the steady state, the optimizer's states being there (but not the token ids of the batch before); a number
    runs that many optimizer steps from the start. Of many micro-batches two are run, and of a rollout the first and
    last tokens, unless ``every_micro_batch=True``. ``kernels="cpu"`` takes a CPU's choices, to compare with `track`.
    """
    if gpu is None:
        raise TypeError("simulate(trainer) needs gpu=: a card's name or a budget in bytes")
    if prompt_length is not None and (isinstance(prompt_length, bool) or not isinstance(prompt_length, int)
                                      or prompt_length < 1):
        raise ValueError(f"prompt_length={prompt_length!r}: takes a whole number of tokens from 1 on, or None for the "
                         "dataset's own")
    check(trainer)
    card = VirtualGPU(gpu, enforce=False, kernels=kernels, alloc_conf=alloc_conf)
    shared = trainer.accelerator.gradient_state._shared_state       # of all accelerators in the process
    with mock.patch.dict(shared, {name: copy.copy(v) for name, v in shared.items() if isinstance(v, list)}):
        with torch.random.fork_rng(devices=[]):
            twin, batch = _twin(trainer, steps or 1, every_micro_batch)
        return _run(trainer, twin, batch, card, prompt_length,
                    states=steps is None, every_token=every_micro_batch)


def _run(trainer, twin, batch, card: VirtualGPU, prompt_length, states: bool, every_token: bool) -> MemoryReport:
    """The twin's `train()` over the trainer's own model, whose weights are fake meanwhile."""
    optimizer, before = twin.optimizer, list(trainer.model.parameters())
    with card, ExitStack() as stack:
        with card.phase("load"):
            stack.enter_context(on_card(card, trainer.model))
            if trainer.ref_model is not None:
                stack.enter_context(on_card(card, trainer.ref_model, "reference model"))
        if optimizer is not None:
            moved = dict(zip(map(id, before), trainer.model.parameters(), strict=True))
            twin.optimizer = _same_optimizer(optimizer, moved)
        if card.kernels == "cuda":
            stack.enter_context(triton_head())
        card.ledger.vocabularies.add(TILE)                          # the fused head's tiles are logits
        _answer(twin, card.reads, prompt_length)
        lengths = {len(ids) for ids in twin._tokenize_prompts([row["prompt"] for row in batch])[0]}
        padded = prompt_length is not None or len(lengths) > 1
        stack.enter_context(few_tokens(trainer.model, padded=padded, every_token=every_token))
        stack.enter_context(_phases(twin, card, states))
        twin.train()
        return card.report()


def check(trainer) -> None:
    """Raises for what can't be simulated, in one sentence each."""
    args, accelerator = trainer.args, trainer.accelerator
    for is_so, what, way in (
            (args.use_vllm, "use_vllm=True", "vLLM's memory is its own; set it to False for TRL's own rollout"),
            (args.use_transformers_continuous_batching, "use_transformers_continuous_batching", "set it to False"),
            (accelerator.num_processes > 1, f"{accelerator.num_processes} processes", "start one process"),
            (trainer.is_deepspeed_enabled, "DeepSpeed", "leave it out of the Accelerate configuration"),
            (trainer.is_fsdp_enabled, "FSDP", "leave it out of the Accelerate configuration"),
            (args.use_liger_kernel, "use_liger_kernel=True", "set it to False"),
            (trainer._is_vlm, "a model with images", "use a text model"),
            (trainer.rollout_func is not None, "rollout_func", "leave it out: the trainer's own rollout is simulated"),
            (trainer.environment_factories is not None, "environment_factory", "leave it out"),
            (_offloads(args), "activation checkpointing with offload", "leave it out: TRL 1.16 itself fails with it")):
        if is_so:
            raise NotImplementedError(f"a trainer with {what} can't be simulated: {way}")
    for name in PRIVATE:
        need(trainer, name)


def _offloads(args) -> bool:
    settings = (getattr(args, f"{way}_checkpointing_kwargs", None) or {} for way in ("activation", "gradient"))
    return any(s.get("offload") for s in settings)


def _twin(trainer, steps: int, every_micro_batch: bool):
    """A second trainer object over the same model, whose doings don't show on the first; and its first batch."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
    twin = copy.copy(trainer)
    for name, value in vars(twin).items():
        if isinstance(value, (dict, list, set)):
            vars(twin)[name] = copy.copy(value)
    twin.args = copy.copy(trainer.args)
    for name, value in QUIET.items():
        need(twin.args, name)
        setattr(twin.args, name, value)
    twin.args.max_steps = steps
    twin.accelerator = copy.copy(trainer.accelerator)
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):
        setattr(twin.accelerator, name, [])
    if trainer.args.fp16:                                   # accelerate leaves float16 alone where it sees no card
        twin.accelerator.native_amp = True
    if trainer.accelerator.scaler is not None:              # a few bytes on the card, and reads of values
        twin.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    twin.state, twin.control = TrainerState(), TrainerControl()
    twin.callback_handler = CallbackHandler([DefaultFlowCallback()], twin.model, twin.processing_class, None, None)
    twin.log_completions, twin.log = False, lambda logs, start_time=None: None
    twin._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    twin._logs = copy.deepcopy(trainer._logs)
    twin._buffered_inputs, twin._step, twin.lr_scheduler = None, 0, None
    batch = next(iter(twin.get_train_dataloader()), None)
    if batch is None:
        raise ValueError(f"train_dataset is too small: a generation batch wants {twin.args.generation_batch_size} // "
                         f"{twin.num_generations} different prompts; give it more")
    accumulation = twin.args.gradient_accumulation_steps
    twin.get_train_dataloader = lambda: [batch] * (steps * accumulation)
    if not every_micro_batch:
        _skip_alike(twin, accumulation)
    return twin, batch


def _skip_alike(twin, accumulation: int) -> None:
    """Of an accumulation window only two micro-batches run: the first, and one that finds its gradients there. Where
    rollouts happen within a window, that is the one with the second rollout."""
    again = twin.args.steps_per_generation * twin.num_iterations
    second, run = again if again < accumulation else 1, twin.training_step

    def training_step(model, inputs, num_items_in_batch=None):
        if twin._step % accumulation in (0, second):
            return run(model, inputs, num_items_in_batch)
        twin._step += 1
        return torch.zeros(())

    twin.training_step = training_step


def _answer(twin, reads: ReadsOfValues, prompt_length: int | None) -> None:
    """Replaces what would call the user's code or look at values."""
    score = twin._get_per_token_logps_and_entropies

    def scoring(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        with reads.picking(logits_to_keep):
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def rewards(inputs, prompts, completions, completion_ids_list):
        return torch.zeros(len(prompts), len(twin.reward_funcs), device=twin.accelerator.device)

    twin._get_per_token_logps_and_entropies, twin._calculate_rewards = scoring, rewards
    if prompt_length is not None:
        twin._tokenize_prompts = lambda prompts: ([[1] * prompt_length for _ in prompts], None, {})
    elif hasattr(twin.processing_class, STAND_IN):
        missing = getattr(twin.processing_class, STAND_IN)
        raise ValueError(f"prompt_length=None: the tokenizer of {missing!r} is not on this machine, so the length of "
                         "the dataset's prompts isn't known; pass prompt_length=, in tokens")


@contextmanager
def _phases(twin, card: VirtualGPU, states: bool) -> Iterator[None]:
    from transformers import TrainerCallback

    from ..simulation import _make_states
    from .phases import phases

    class States(TrainerCallback):
        """Makes the optimizer's states before the first step, as a step before it would have."""

        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            _make_states(getattr(optimizer, "optimizer", optimizer), card.phase)

    if states:
        twin.add_callback(States())
    with phases(twin, card):
        yield


def _same_optimizer(optimizer, moved: dict[int, torch.Tensor]):
    """An optimizer of the same kind and settings over other parameters, without states."""
    optimizer = getattr(optimizer, "optimizer", optimizer)          # out of Accelerate's wrapper
    twin = object.__new__(type(optimizer))
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [moved[id(p)] for p in group["params"]]}
                         for group in optimizer.param_groups]
    return twin
