"""GRPO's arithmetic: advantages within a group, log-probs of the sampled tokens, the clipped loss.

Shapes: B completions of up to C tokens over a vocabulary of V; prompts of P tokens; hidden states of width H.
A mask is 1 on a completion's tokens and 0 on padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .rollout import autocast_context

ADVANTAGE_EPSILON = 1e-4  # added to the standard deviation; TRL's constant
ENTROPY_ROWS = 128  # rows whose softmax is held at once for the entropy metric; TRL's constant
SMALL = 2**20  # logits that aren't worth a loop
HEAD_SCALES = (  # what transformers calls factors that a model applies to its logits
    "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier",
)  # fmt: skip


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Each answer's reward relative to its group's, (B,) to (B,); groups are `num_generations` rows in a row.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), num_generations=4, scale_rewards="none")
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])

    `scale_rewards` divides by a standard deviation (n - 1 in its denominator) plus 1e-4: that of the "group",
    that of the whole "batch", or "none". NaN is an answer that nobody judged: it gets 0 and has no part in
    the rest.
    """
    groups = rewards.view(-1, num_generations)
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (nanstd(groups, dim=1, keepdim=True) + ADVANTAGE_EPSILON)
    elif scale_rewards == "batch":
        advantages = advantages / (nanstd(rewards, dim=0) + ADVANTAGE_EPSILON)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards={scale_rewards!r} is not known: use 'group', 'batch' or 'none'.")
    return advantages.reshape(-1).nan_to_num(nan=0.0)


def nanstd(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Standard deviation of what is not NaN, with n - 1 in the denominator.

    >>> nanstd(torch.tensor([1.0, float("nan"), 3.0]), dim=0)
    tensor(1.4142)
    """
    deviations = values - values.nanmean(dim=dim, keepdim=True)
    count = (~values.isnan()).sum(dim=dim, keepdim=keepdim)
    return (deviations.square().nansum(dim=dim, keepdim=keepdim) / (count - 1)).sqrt()


def selective_log_softmax(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log softmax(logits) of one token a position, (B, C, V) and (B, C) to (B, C), row by row to save memory.

    >>> selective_log_softmax(torch.zeros(1, 1, 4), torch.tensor([[2]]))           # log(1/4)
    tensor([[-1.3863]])
    """
    index = token_ids.unsqueeze(-1)
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, dim=-1, index=index).squeeze(-1)
        rows = max(1, SMALL // logits[0].numel())  # one, as in TRL, but for toys, where a loop is slow
        return chosen - torch.cat([torch.logsumexp(part, dim=-1) for part in logits.split(rows)])
    # logsumexp loses too much in 16 bits
    rows = [F.log_softmax(row, dim=-1).gather(-1, chosen) for row, chosen in zip(logits, index, strict=True)]
    return torch.stack(rows).squeeze(-1)


@torch.no_grad()
def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of each position's distribution: (..., V) to (...), 128 rows at a time.

    >>> entropy_from_logits(torch.zeros(1, 4))                                     # log(4)
    tensor([1.3863])
    """
    entropies = []
    for rows in logits.reshape(-1, logits.shape[-1]).split(ENTROPY_ROWS):
        logps = F.log_softmax(rows, dim=-1)
        entropies.append(-(logps.exp() * logps).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


def token_logps(
    model, input_ids: Tensor, attention_mask: Tensor, completion_length: int, *, temperature: float = 1.0,
    logits: str = "full", chunk_size: int = 1024, autocast: str | None = None, return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each of the last `completion_length` tokens of (B, P+C): (B, C).

    >>> logps = token_logps(model, input_ids, attention_mask, completion_length=8)           # doctest: +SKIP

    `logits="full"` holds (B, C+1, V) logits and copies of them; `"chunked"` holds those of `chunk_size`
    tokens at a time and computes them again in the backward. fp32 under `autocast` (None, "bfloat16",
    "float16"). `return_entropy` adds each position's entropy, (B, C), without gradient.
    """
    token_ids = input_ids[:, -completion_length:]
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if logits == "full":
        logps, entropy = _full_logps(model, inputs, token_ids, temperature, autocast, return_entropy)
    elif logits == "chunked":
        logps, entropy = _chunked_logps(
            model, inputs, token_ids, temperature, autocast, return_entropy, chunk_size
        )
    else:
        raise ValueError(f"logits={logits!r} is not known: use 'full' or 'chunked'.")
    return (logps, entropy) if return_entropy else logps


def _full_logps(model, inputs, token_ids, temperature, autocast, return_entropy):
    with autocast_context(model, autocast):
        logits = model(**inputs, logits_to_keep=token_ids.shape[1] + 1).logits
    if autocast is not None:
        logits = logits.float()
    logits = logits[:, :-1]  # the last position predicts a token that was not sampled
    logits = logits / temperature  # in place, on a slice, it would cost a copy more in the backward
    logps = selective_log_softmax(logits, token_ids)
    return logps, entropy_from_logits(logits) if return_entropy else None


def _chunked_logps(model, inputs, token_ids, temperature, autocast, return_entropy, chunk_size):
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside a PEFT wrapper
    head = causal_lm.get_output_embeddings()
    _check_plain_head(causal_lm.config, head)
    with autocast_context(model, autocast):
        hidden = causal_lm.get_decoder()(**inputs).last_hidden_state
    hidden = hidden[:, -token_ids.shape[1] - 1 : -1].flatten(0, 1)
    dtype = hidden.dtype if autocast is None else getattr(torch, autocast)
    logps, entropy = ChunkedLogps.apply(
        hidden, head.weight, head.bias, token_ids.flatten(), temperature, chunk_size, dtype, return_entropy
    )
    return logps.view(token_ids.shape), entropy.view(token_ids.shape) if return_entropy else None


def _check_plain_head(config, head) -> None:
    scaled = [name for name in HEAD_SCALES if getattr(config, name, None) not in (None, 1.0)]
    if scaled or type(head) is not torch.nn.Linear:
        what = f"the model's {scaled[0]}" if scaled else f"an output layer of type {type(head).__name__}"
        raise ValueError(f"logits='chunked' can't be used with {what}, for it multiplies hidden states by "
                         "the output layer's weight itself: use logits='full'.")  # fmt: skip


class ChunkedLogps(torch.autograd.Function):
    """Log-probs of N tokens from their hidden states, never holding more than `chunk_size` rows of logits.

    >>> states, weight = torch.zeros(3, 2), torch.zeros(4, 2)
    >>> ChunkedLogps.apply(states, weight, None, torch.tensor([0, 1, 2]), 1.0, 2, torch.float32, False)[0]
    tensor([-1.3863, -1.3863, -1.3863])

    The forward keeps the hidden states (N, H) and one logsumexp a token. The backward makes each chunk's
    logits again: d logp / d logits = onehot(token) - softmax(logits). It adds all chunks into one gradient of
    the weight, in place; recomputing through `torch.utils.checkpoint` would hold a second one, of vocabulary
    x hidden numbers.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, temperature, chunk_size, dtype, with_entropy):
        weight_, bias_ = weight.to(dtype), None if bias is None else bias.to(dtype)
        logps, logsumexps, entropies = [], [], []
        for rows, tokens in zip(hidden.split(chunk_size), token_ids.split(chunk_size), strict=True):
            logits = _chunk_logits(rows, weight_, bias_, temperature)
            logsumexp = torch.logsumexp(logits, dim=-1)
            logps.append(logits.gather(-1, tokens[:, None]).squeeze(-1) - logsumexp)
            logsumexps.append(logsumexp)
            if with_entropy:
                entropies.append(entropy_from_logits(logits))
            del logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, bias, token_ids, torch.cat(logsumexps))
        ctx.settings = temperature, chunk_size, dtype
        entropy = torch.cat(entropies) if with_entropy else None
        if with_entropy:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, bias, token_ids, logsumexps = ctx.saved_tensors
        temperature, chunk_size, dtype = ctx.settings
        weight_, bias_ = weight.to(dtype), None if bias is None else bias.to(dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            grad = _chunk_logits(hidden[chunk], weight_, bias_, temperature)
            grad = grad.sub_(logsumexps[chunk, None]).exp_().neg_()  # -softmax
            grad.scatter_add_(-1, token_ids[chunk, None], torch.ones_like(grad[:, :1]))
            grad = grad.mul_(grad_logps[chunk, None] / temperature).to(dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ weight_
            if grad_weight is not None:
                _add_matmul(grad_weight, grad.t(), hidden[chunk].to(dtype))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(weight.dtype), weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def policy_loss(
    logps: Tensor, old_logps: Tensor | None, ref_logps: Tensor | None, advantages: Tensor, mask: Tensor, *,
    loss_type: str = "dapo", epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0,
    accumulation_steps: int = 1, max_completion_length: int | None = None,
    num_items: Tensor | int | None = None, batch_size: int | None = None, use_bias_correction_kl: bool = True,
) -> Tensor:  # fmt: skip
    """The clipped loss of one micro-batch, scaled so that those of an accumulation window add up: a scalar.

    >>> logps = torch.tensor([[-1.0, -2.0]])
    >>> policy_loss(logps, logps, None, torch.tensor([1.0]), torch.ones(1, 2), loss_type="grpo")
    tensor(-1.)

    logps, old_logps, ref_logps, mask are (B, C), advantages (B,). `old_logps` None stands for the current
    ones: the ratio is 1 but has a gradient. `loss_type` is the denominator: "grpo" each completion's tokens,
    then the completions; "bnpo" the micro-batch's tokens; "dr_grpo" completions x `max_completion_length`;
    "dapo" `num_items`, the window's tokens (None: the mask's). `batch_size` counts the completions (None: B)
    where some that would add nothing were left out. `use_bias_correction_kl` multiplies the KL term by the
    ratio, TRL's default: even where the ratio is 1 that changes the gradient. The paper doesn't.
    """
    ratio = torch.exp(logps - (logps.detach() if old_logps is None else old_logps))
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    advantages = advantages.unsqueeze(1)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    if beta != 0.0:
        kl = kl_estimate(logps, ref_logps)
        per_token = per_token + beta * (kl * ratio if use_bias_correction_kl else kl)
    rows = len(per_token) if batch_size is None else batch_size
    if loss_type == "grpo":
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / rows / accumulation_steps
    if loss_type == "bnpo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0) / accumulation_steps
    if loss_type == "dr_grpo":
        length = mask.shape[1] if max_completion_length is None else max_completion_length
        return (per_token * mask).sum() / (rows * length) / accumulation_steps
    if loss_type == "dapo":
        items = mask.sum() if num_items is None else torch.as_tensor(num_items)
        return (per_token * mask).sum() / items.clamp(min=1.0)
    raise ValueError(f"loss_type={loss_type!r} is not known: use 'grpo', 'bnpo', 'dr_grpo' or 'dapo'.")


def kl_estimate(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Schulman's estimator of KL(policy || reference) for each token, exp(d) - d - 1 with d = ref - policy.

    >>> kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]))
    tensor([[0.]])
    """
    difference = ref_logps - logps
    return torch.exp(difference) - difference - 1


@torch.no_grad()
def loss_metrics(
    logps: Tensor, old_logps: Tensor | None, ref_logps: Tensor | None, advantages: Tensor, mask: Tensor,
    entropy: Tensor, *, epsilon: float = 0.2, epsilon_high: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Means over a micro-batch's tokens, scalar tensors: entropy, clip_ratio, and kl if there is a reference.

    `clip_ratio` is the share of tokens whose gradient the clipping took; `kl` is weighted by the ratio, as in
    TRL.
    """
    tokens = mask.sum().clamp(min=1.0)
    ratio = torch.exp(logps - (logps if old_logps is None else old_logps))
    advantages = advantages.unsqueeze(1)
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    metrics = {"entropy": (entropy * mask).sum() / tokens, "clip_ratio": (clipped * mask).sum() / tokens}
    if ref_logps is not None:
        metrics["kl"] = (kl_estimate(logps, ref_logps) * ratio * mask).sum() / tokens
    return metrics
