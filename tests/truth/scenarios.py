"""The published runs, rebuilt: each scenario takes a row of data/measurements.csv, runs on a virtual card, and returns it.

What a row says decides everything; nothing is fitted. Each function says what its source ran and where that differs from
what the installed libraries do today.
"""
from __future__ import annotations

import warnings
from unittest import mock

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

from grpo_lab import VirtualGPU

FOUR = ["q_proj", "k_proj", "v_proj", "o_proj"]


def run(row: dict) -> VirtualGPU:
    """The row's scenario on its card; past the card's end, for a report has to come in any case."""
    with warnings.catch_warnings(), VirtualGPU(row["card"] or 180 * 2**30, enforce=False) as gpu:
        warnings.simplefilter("ignore")
        SCENARIOS[row["scenario"]](gpu, row)
    return gpu


# ---- Anassbzdd/fitcheck (MIT), scripts/measure.py: LoRA on a T4, phase by phase -------------------------------------


def fitcheck(gpu, row) -> None:
    """float16 or NF4 (then `prepare_model_for_kbit_training`), LoRA in float32, checkpointing, torch.optim.AdamW.

    transformers 5.0 made weights in four threads while others were quantized; how far they got ahead was a race, which
    moved what is reserved by several percent between runs of one and the same row. Here the loader is today's.

    `out`, and so the logits, lives until the step returns. Its sdpa runs were pinned to the memory-efficient kernel,
    with keys and values repeated for grouped queries.
    """
    attention = "eager" if row["attention"] == "eager" else "sdpa"
    model = gpu.load(row["model"], dtype="float16", attn_implementation=attention,
                     quantization=row["quantization"] or None)
    model.config.use_cache = False
    if row["quantization"]:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    rank = int(row["lora_rank"])
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=FOUR))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    gpu.resident = gpu.ledger.allocated
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.zeros(int(row["micro_batch"]), int(row["completion_tokens"]), dtype=torch.long)

    def step(prefix=""):
        optimizer.zero_grad(set_to_none=True)
        with gpu.phase(prefix + "forward"):
            out = model(input_ids=ids, labels=ids)
        with gpu.phase(prefix + "backward"):
            out.loss.backward()
        with gpu.phase(prefix + "optimizer"):
            optimizer.step()

    with mock.patch.object(F, "scaled_dot_product_attention", efficient(F.scaled_dot_product_attention)):
        step("warm-up ")
        step()


def efficient(sdpa):
    """As fitcheck patched it: keys and values repeated, the memory-efficient kernel alone allowed."""
    def attention(query, key, value, *args, enable_gqa=False, **kwargs):
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            return sdpa(query, key, value, *args, **kwargs)
    return attention


# ---- jsboige/CoursIA: TRL's GRPOTrainer on laptops, NF4 with double quantization ------------------------------------


def trl_grpo(gpu, row, targets="all-linear") -> None:
    """One optimizer step as TRL 1.9 to 1.12 made it: bfloat16 autocast, checkpointing, LoRA r 8 in bfloat16, beta 0.

    accelerate turns the logits into float32; TRL up to 1.9.2 divides them by the temperature in place on a view, from
    1.10 on out of place. The rollout stays far below the training peak and is left out.
    """
    model = gpu.load(row["model"], dtype="bfloat16", quantization="nf4_double")
    model.config.use_cache = False
    gpu.resident = gpu.ledger.allocated
    rank = int(row["lora_rank"])
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=16, lora_dropout=0.05, target_modules=targets,
                                             task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = {} if row["torch"].startswith(("2.6", "2.7")) else {"fused": True}
    optimizer = torch.optim.AdamW(trained, lr=1e-6, **fused)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(min(2, int(row["grad_accum"]))):
            _trl_micro_batch(gpu, model, row)
        with gpu.phase("optimizer"):
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()


def _trl_micro_batch(gpu, model, row) -> None:
    rows, completion = int(row["micro_batch"]), int(row["completion_tokens"])
    ids = torch.zeros(rows, int(row["prompt_tokens"]) + completion, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0                                                  # prompts of unequal length, padded on the left
    advantages, completion_mask = torch.zeros(rows), torch.ones(rows, completion, dtype=torch.long)
    with gpu.phase("forward"):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=completion + 1, use_cache=False).logits
        logits = logits.float()                                     # accelerate's convert_outputs_to_fp32
        logits = logits[:, :-1, :][:, -completion:, :]
        if row["trl"].startswith("1.12"):
            logits = logits / 1.0
        else:
            logits.div_(1.0)
        index = ids[:, -completion:]
        chosen = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
        logps = chosen - torch.stack([torch.logsumexp(part, dim=-1) for part in logits])
        with torch.no_grad():
            _entropies(logits)
        ratio = torch.exp(logps - logps.detach())
        loss = -torch.min(ratio * advantages[:, None], torch.clamp(ratio, 0.8, 1.2) * advantages[:, None])
        loss = (loss * completion_mask).sum() / completion_mask.sum()
        del logits, chosen
    with gpu.phase("backward"):
        loss.backward()


def _entropies(logits, chunk=128):
    for part in logits.reshape(-1, logits.shape[-1]).split(chunk):
        logps = F.log_softmax(part, dim=-1)
        -(torch.exp(logps) * logps).sum(-1)


def trl_attention_only(gpu, row) -> None:
    trl_grpo(gpu, row, targets=FOUR)


# ---- linkedin/Liger-Kernel (BSD-2-Clause): a head and a loss ----------------------------------------------------------


def liger_cross_entropy(gpu, row) -> None:
    """Cross entropy over float32 logits; gradients are never zeroed, so the second pass holds the first one's."""
    rows, vocabulary = int(row["micro_batch"]) * int(row["completion_tokens"]), int(row["model"].split("V=")[1].split()[0])
    logits, target = torch.empty(rows, vocabulary, requires_grad=True), torch.zeros(rows, dtype=torch.long)
    for _ in range(2):
        with gpu.phase("whole"):
            F.cross_entropy(logits, target).backward()


def liger_linear_cross_entropy(gpu, row) -> None:
    """A bfloat16 head and cross entropy; the other implementation's head lies beside it."""
    rows, hidden, vocabulary = int(row["completion_tokens"]), 4096, 128256
    heads = [torch.nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long)
    for _ in range(2):
        with gpu.phase("whole"):
            F.cross_entropy(heads[0](x), target).backward()


def liger_grpo(gpu, row) -> None:
    """The GRPO loss of its plain-PyTorch baseline: policy and reference heads of both implementations are resident."""
    rows, tokens, hidden, vocabulary = int(row["micro_batch"]), int(row["completion_tokens"]), 4096, 128256
    heads = [torch.nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16) for _ in range(4)]
    x = torch.empty(rows, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    reference = torch.empty(rows, tokens, hidden, dtype=torch.bfloat16)
    ids, mask = torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, tokens)
    advantages = torch.zeros(rows)

    def loss_of(x, head, reference_head):
        logits = head(x)                                    # named, and so alive while the reference runs
        logps = F.log_softmax(logits.float(), dim=-1)
        chosen = logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = reference_head(reference)
            reference_logps = F.log_softmax(reference_logits.float(), dim=-1)
            expected = reference_logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(chosen - chosen.detach())
        loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        loss = loss + 0.1 * (torch.exp(expected - chosen) - (expected - chosen) - 1)
        return (loss * mask).sum() / mask.sum()

    for _ in range(2):
        with gpu.phase("whole"):
            loss_of(x, heads[0], heads[1]).backward()


SCENARIOS = {"fitcheck": fitcheck, "vram_wall": trl_grpo, "scale_up": trl_attention_only, "lg-ce": liger_cross_entropy,
             "lg-ce26": liger_cross_entropy, "lg-flce": liger_linear_cross_entropy, "lg-grpo": liger_grpo}
