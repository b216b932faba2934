"""A GRPO step of a recipe, phase by phase, as `simulate` runs it in the steady state: :func:`play`.

>>> from grpo_lab.recipe import Recipe
>>> list(play(Recipe(model="SmolLM2-135M")).peaks)
['load', 'optimizer states', 'rollout', 'forward', 'backward', 'optimizer']
"""

from __future__ import annotations

from . import shape
from .head import Head, embedding_backward
from .layer import Layer
from .shape import Shape
from .tape import Tape, Tensor, Term


def play(recipe) -> Tape:
    """All layers are alike: one is played, beside what the others keep."""
    s, tape = Shape(recipe), Tape()
    with tape.phase("load"):
        _put(tape, shape.weights(s))
        if s.nf4:
            tape.drop(tape.make("temporaries", "a weight before it is packed", s.h, s.I, s.w))
        reference = _put(tape, shape.reference(s))
    if recipe.reference_offload:
        tape.drop(*reference)
        _put(tape, [term for term in shape.reference(s) if term.count < s.L])
    _put(tape, shape.adapters(s))
    with tape.phase("optimizer states"):
        _put(tape, shape.workspaces(s))
        _put(tape, shape.copies(s))
        _put(tape, shape.states(s))
        tape.drop(*([] if recipe.optimizer_in_backward else _optimizer(s, tape)))
    with tape.phase("rollout"):
        _rollout(s, tape)
    if recipe.needs_old_logps:
        with tape.phase("old log-probs"):
            _score(s, tape)
    if recipe.beta != 0.0:
        with tape.phase("reference log-probs"):
            _score(s, tape, reference=True)
    earlier = _put(tape, shape.gradients(s)) if s.accumulates else []
    before = _input_and_gradient(s, tape) if s.accumulates else []
    saved = _forward(s, tape)
    tape.drop(*before)
    with tape.phase("backward"):
        _backward(s, tape, saved)
    tape.drop(*earlier)
    kept = _input_and_gradient(s, tape)
    with tape.phase("optimizer"):
        tape.drop(*kept, *([] if recipe.optimizer_in_backward else _optimizer(s, tape)))
    return tape


def _put(tape: Tape, terms: list[Term]) -> list[Tensor]:
    return [tape.make(term.category, term.what, *term.factors, count=term.count) for term in terms]


def _optimizer(s: Shape, tape: Tape) -> list[Tensor]:
    return _put(tape, shape.gradients(s)) + _put(tape, shape.stepping(s))


def _input_and_gradient(s: Shape, tape: Tape) -> list[Tensor]:
    """Under checkpointed adapters the embedding's result is a leaf with a gradient; the last loss holds both."""
    if not (s.lora and s.recipe.activation_checkpointing):
        return []
    return [tape.make("activations", "embedding's result and its gradient", s.B * s.T, s.h, s.w, count=2)]


def _copies(s: Shape, tape: Tape, frozen: bool = False) -> list[Tensor]:
    """Autocast's 16-bit copies of the float32 weights that train, kept to its end."""
    if s.lora and s.recipe.autocast is not None and s.t != s.a and not frozen:
        return [tape.make("activations", "16-bit copies of adapters", 2, count=s.trained)]
    if not s.cast or s.lora or frozen:
        return []
    return [tape.make("activations", f"16-bit copy of {name}'s weight", *size, 2, count=s.L)
            for name, size in s.linears.items()]  # fmt: skip


# ---- generation (grpo/rollout.py) ---------------------------------------------------------------------------------


def _rollout(s: Shape, tape: Tape) -> None:
    recipe, rows = s.recipe, s.recipe.rollout_batch
    group = recipe.num_generations if rows % recipe.num_generations == 0 else 1
    copies = _copies(s, tape)
    if copies and not s.lora:
        copies.append(tape.make("activations", "16-bit copy of the head's weight", s.V, s.h, 2))
    _generate(s, tape, rows // group, s.P, 0)
    logits = tape.make("logits", "of the last token", rows, s.V, s.a)
    if s.C > 1:
        _generate(s, tape, rows, 1, s.T - 2)
    cache = [tape.make("KV cache", "keys and values", rows, max(1, s.T - 1), s.kv, size, count=s.L)
             for size in s.cached]  # fmt: skip
    _sample(s, tape, rows)
    tape.drop(logits, *cache, *copies)


def _generate(s: Shape, tape: Tape, rows: int, length: int, past: int) -> None:
    """The last layer of a forward pass, beside the caches of the others."""
    others = [tape.make("KV cache", "keys and values", rows, length + past, s.kv, size, count=s.L - 1)
              for size in s.cached]  # fmt: skip
    own = tuple(tape.make("KV cache", "a layer's keys or values", rows, past, s.kv, size) if past else None
                for size in s.cached)  # fmt: skip
    layer = Layer(s, tape, rows, length, past=past)
    x = layer.activation("hidden states", s.h, s.w)
    before = len(tape.events)
    out = layer.forward(x, {}, own)
    made = [tensor for tensor in tape.since(before) if tensor is not out]
    tape.drop(x, out)
    copy = tape.make("temporaries", "16-bit copy of the head's weight", s.V, s.h, 2) if s.cast and s.lora else None
    tape.drop(tape.make("logits", "of the last token", rows, s.V, s.a), copy, *made, *others)


def _sample(s: Shape, tape: Tape, rows: int) -> None:
    """softmax(logits.float() / temperature), then a random number for each logit."""
    numbers = [tape.make("logits", what, rows, s.V, 4) for what in ("float or divided", "probabilities")]
    tape.drop(*numbers)


# ---- log-probs without gradients ----------------------------------------------------------------------------------


def _score(s: Shape, tape: Tape, reference: bool = False) -> None:
    copies = _copies(s, tape, frozen=reference)
    streamed = [tape.make("reference model", f"{name}'s weight, streamed", *size, s.w) for name, size in s.linears.items()
                ] if reference and s.recipe.reference_offload else []  # fmt: skip
    layer = Layer(s, tape, s.B, s.T, adapted=not reference, frozen=reference)
    x = layer.activation("hidden states", s.h, s.w)
    out = layer.forward(x, {})
    tape.drop(x, *streamed)
    hidden = layer.norm(out, s.h, s.w, {}, "norm")
    tape.drop(out)
    Head(s, tape).forward({}, False, copies)
    tape.drop(hidden)


# ---- forward and backward ------------------------------------------------------------------------------------------


def _forward(s: Shape, tape: Tape) -> dict:
    """What the graph keeps: of each layer, or each layer's input; of the final norm and of the head."""
    checkpointed = s.recipe.activation_checkpointing
    with tape.phase("forward"):
        copies = _copies(s, tape)
        layer = Layer(s, tape, s.B, s.T, grad=not checkpointed)
        saved: dict = {"others": [], "copies": [] if checkpointed else [tape.keep(copy) for copy in copies]}
        if s.recipe.activation_offload:
            pass  # they go to the host as the layers run
        elif checkpointed:
            saved["others"] = [tape.make("activations", "layers' inputs", layer.n, s.h, s.w, count=s.L - 1)]
        else:
            scratch: dict = {}
            trial = Layer(s, Tape(), s.B, s.T, grad=True)
            trial.forward(trial.activation("hidden states", s.h, s.w), scratch)
            saved["others"] = [tape.make(t.category, t.what, *t.factors, count=s.L - 1)
                               for t in {id(t): t for t in scratch.values()}.values()]  # fmt: skip
        x = layer.activation("layers' inputs" if checkpointed else "hidden states", s.h, s.w)
        saved["layer"] = {}
        out = layer.forward(x, saved["layer"])
        if checkpointed:
            saved["x"] = tape.keep(x)
        tape.drop(x)
        layer.grad = True
        hidden = layer.norm(out, s.h, s.w, saved, "norm")
        tape.drop(out)
        if not s.lora and s.recipe.logits == "full":
            saved["head's input"] = tape.keep(hidden)
        Head(s, tape).forward(saved, True, copies)
        tape.drop(hidden)
    return saved


def _backward(s: Shape, tape: Tape, saved: dict) -> None:
    """The head; the last layer, where all activations are; the embedding, where all gradients are."""
    g, head = Head(s, tape).backward(saved)
    tape.drop(saved.pop("head's input", None))
    if head is not None and not s.arch.tie_word_embeddings and (s.accumulates or s.leaving):
        tape.drop(head)
        head = None
    layer = Layer(s, tape, s.B, s.T, grad=True)
    g = layer._norm_backward(g, layer.activation("gradient", s.h, s.w), saved, "norm")
    # From the last layer to the first, graphs go and gradients come: the fullest moment is in one of the two.
    if s.recipe.activation_offload:
        saved["others"] = [layer.activation("the next layer's input, fetched", s.h, s.w)]
    gradients = [] if s.lora or s.accumulates else [t for t in shape.gradients(s) if t.factors[0] != s.V]
    first = sum(t.blocks for t in gradients) > sum(t.bytes for t in saved["others"] + saved["copies"])
    if first:
        tape.drop(*saved["others"], *saved["copies"])
        saved["copies"] = [tape.make(t.category, t.what, *t.factors) for t in saved["copies"]]
        others = _put(tape, [t._replace(count=t.count - t.count // s.L) for t in gradients])
    if s.recipe.activation_checkpointing:
        copies = [] if not s.cast or s.lora else [
            tape.make("activations", f"16-bit copy of {name}'s weight", *size, 2)
            for name, size in s.linears.items()]  # fmt: skip
        tape.drop(layer.forward(saved["x"], saved["layer"]))
        tape.drop(*copies)
    before = len(tape.events)
    g = layer.backward(g, saved["layer"])
    own = [tensor for tensor in tape.since(before) if tensor is not g]
    tape.drop(saved.pop("x", None), *saved["copies"], *own, *(others if first else saved["others"]))
    if not s.lora:
        layers = _put(tape, gradients)
        embedding_backward(s, tape, head)
        tape.drop(*layers)
    tape.drop(g)
