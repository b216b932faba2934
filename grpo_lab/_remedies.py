"""What `diagnose` says: a headline for each kind, what else the numbers tell, and what to do, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ._suspects import Candidate, says_nothing
from .estimation import estimate, human
from .memory.cuda_words import SIZE
from .recipe import Recipe

Numbers = dict[str, int | None]
# The first sentence for which the message has all numbers; the last of each needs none.
HEADLINES = {
    "shortage": (
        "The card was full: {requested} were asked for, {allocated} were in use by tensors, {unallocated} were kept by "
        "PyTorch without being used, and {free} were free.",
        "The card was full: {requested} were asked for, {allocated} were in use by tensors.",
        "The card was full: {requested} were asked for, and {free} were free.",
        "The card was full: {requested} were asked for. (The message has no more numbers.)",
        "The card was full.",
    ),
    "fragmentation": ("There was room, but in pieces: {requested} were asked for while PyTorch kept {unallocated} of its "
                      "{reserved} unused.",),
    "another process": ("Something else has the card: other processes use {others} of {capacity}, and this one's tensors "
                        "{allocated}.", "Something else has the card: other processes use {others}."),
    "limit": ("A limit was reached, not the card's end: {requested} were asked for, and {allowed} are allowed in all.",
              "A limit was reached, not the card's end: {requested} were asked for, more than a memory fraction allows."),
    "refused": ("The driver refused {requested} although it calls {free} free: this is not a full card.",),
    "library": ("The driver or a library found no room beside what PyTorch keeps; its message has no numbers.",),
    "host memory": ("This was the computer's own memory, not a card's: {requested} were asked for.",
                    "This was the computer's own memory, not a card's; the message has no size."),
    "not an out-of-memory error": ("This is not an out-of-memory error: nothing in it says that memory ran out. Paste the "
                                   "whole message, from the line with 'out of memory' on.",),
}  # fmt: skip
EXPANDABLE = ("set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before torch is imported (before "
              "PyTorch 2.9: PYTORCH_CUDA_ALLOC_CONF); in a notebook, os.environ[...] in the first cell")  # fmt: skip
FIRST = {  # by kind
    "fragmentation": EXPANDABLE,
    "another process": "nvidia-smi lists the processes: end those you don't need (other notebooks' kernels, a serving "
                       "engine)",
    "limit": "raise torch.cuda.set_per_process_memory_fraction (on a Mac: PYTORCH_MPS_HIGH_WATERMARK_RATIO), or stay "
             "below it",
    "refused": "Windows and WSL give one program less than the card has, a container or a virtual card may, and another "
               "process may have given memory back since: close other programs, try again, restart what holds the card",
    "library": "cuBLAS and the driver take memory beside PyTorch's: leave them some hundred MiB "
               "(torch.cuda.set_per_process_memory_fraction), or make the step smaller",
    "host memory": "fewer DataLoader workers, or weights in 16 bits while they are loaded; a card's settings don't help",
}  # fmt: skip
ENGINE = ("a colocated engine takes its share beforehand: lower vllm_gpu_memory_utilization to leave room for training, "
          "raise it where the engine itself finds none")  # fmt: skip
REMEDY = {  # by a candidate's kind
    "logits": 'logits="chunked" (TRL 1.16 chunks them always), or a smaller per_device_train_batch_size',
    "scores": 'attn_implementation="sdpa": no score is kept',
    "cache": "rollout_batch_size: fewer sequences at once, and a smaller cache",
    "weights": "LoRA, or an optimizer with smaller states (adamw_8bit); every trained weight has a gradient and states",
    "activations": "a smaller per_device_train_batch_size with more accumulation, or activation checkpointing",
}
CHUNKED = ("a smaller logits_chunk_size; were these the whole logits, then what ran didn't chunk them as the recipe does "
           "(TRL 1.16 always does)")  # fmt: skip
WORTH_SAYING = 2**28  # bytes of other processes
KEPT = 0.05  # of what is reserved: less that lies unused is no matter
ANOTHER_CARD = 0.06  # of the recipe's: sizes nearer than that are one card's, with another driver


def notes(kind: str, numbers: Numbers, others: int, found: tuple[Candidate, ...], message: str,
          recipe: Recipe | None) -> Iterator[str]:  # fmt: skip
    """What else can be read in the numbers."""
    capacity, allocated, requested = (numbers.get(name) for name in ("capacity", "allocated", "requested"))
    if capacity is not None and requested is not None and requested > capacity:
        yield f"In one piece that is more than the whole card has ({human(capacity)})."
    if capacity is not None and allocated is not None and allocated > capacity:
        yield (f"PyTorch holds {human(allocated)}, more than the card has: a Windows driver (WSL's, too) lends it the "
               "computer's memory, which is slow; there, no error doesn't mean that it fits.")  # fmt: skip
    if others >= WORTH_SAYING and kind not in ("another process", "library"):
        yield f"Beside this run, {human(others)} of the card are taken by other processes or a desktop."
    if kind == "host memory" and re.search("(?i)kill|-9|signal 9", message):
        yield "The system ended the process without a word, most often for that reason: dmesg has a line of the OOM killer."
    if pools := re.search(rf"with {SIZE} allocated in private pools", message):
        yield f"{pools[1]} of what is in use belong to CUDA graphs (torch.compile, vLLM without enforce_eager)."
    asked = re.search(rf"[Tt]ried to allocate {SIZE}", message)
    if asked and says_nothing(asked[1]):
        what = "from 1 to 10 MiB" if asked[1].startswith("20") else "up to 1 MiB"
        owners = list(estimate(recipe).by_category().items())[:3] if recipe is not None else ()
        yield (f"{asked[1]} are what PyTorch asks the driver for on behalf of any tensor {what}: the last straw, not the "
               "load."
               + (" At the peak, the recipe's largest owners are " if owners else "")
               + ", ".join(f"{name} ({human(size)})" for name, size in owners) + ("." if owners else ""))  # fmt: skip


def advice(kind: str, numbers: Numbers, others: int, found: tuple[Candidate, ...], message: str,
           recipe: Recipe | None) -> Iterator[str]:  # fmt: skip
    """What to do, in order."""
    if "cache blocks" in message or "GPU memory utilization" in message:
        yield ENGINE
    elif kind in FIRST:
        yield FIRST[kind]
    if kind in ("host memory", "another process", "limit", "refused"):
        return
    chunked = recipe is not None and recipe.logits == "chunked"
    remedies = REMEDY | {"logits": CHUNKED} if chunked else REMEDY
    yield from dict.fromkeys(remedies[candidate.kind] for candidate in found)
    unallocated, requested = numbers.get("unallocated"), numbers.get("requested")
    kept = None not in (unallocated, requested) and unallocated >= max(requested, KEPT * numbers["reserved"])
    if kind == "shortage" and kept:
        yield f"{EXPANDABLE}; {human(unallocated)} were kept unused"
    yield from _plan(numbers, recipe) if recipe is not None else (
        "diagnose(message, recipe) says which tensor it was; advise(recipe) what to change",)


def _plan(numbers: Numbers, recipe: Recipe) -> Iterator[str]:
    """What `advise` would change, on the card that the message is from."""
    capacity, card = numbers.get("capacity"), recipe.card
    if capacity is not None and abs(capacity - card.total_memory) > ANOTHER_CARD * card.total_memory:
        yield (f"the message is from a card with {human(capacity)}, and the recipe names {card.name}: give the recipe that "
               "card")
        recipe = recipe.replace(gpu=max(2**26, capacity - card.typical_context))
    report = estimate(recipe)
    if report.fits:
        yield (f"the recipe itself should fit ({human(report.peak_reserved)} of {human(report.budget)}): compare it with "
               "what really ran: lengths, batches, precision, what else is on the card")  # fmt: skip
        return
    from .advice import advise

    plan = advise(recipe, verify=False)
    changes = ", ".join(taken.change.what for taken in plan.taken)
    yield f"to make the recipe fit: {changes}" if plan.fits else plan.text
