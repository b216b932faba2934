"""From the last layer to the log-probs and back: the head of `grpo/loss.py`, played on a tape."""

from __future__ import annotations

from .shape import Shape, stepping
from .tape import Tape, Tensor

ENTROPY_ROWS = 128  # grpo/loss.py
SORT_FROM = 3072  # tokens: above, the embedding's backward sorts (native/cuda/Embedding.cu)


class Head:
    """``trained``: with the entropy metric and a graph; without, it scores."""

    def __init__(self, s: Shape, tape: Tape) -> None:
        self.s, self.tape = s, tape
        self.size = 4 if s.recipe.autocast is not None else s.w  # loss.py: float32 under autocast
        self.rows = min(s.recipe.logits_chunk_size, s.B * s.C)
        self.chunked = s.recipe.logits == "chunked"

    def forward(self, saved: dict, trained: bool, copies: list[Tensor]) -> None:
        """The caller holds the final norm's result. ``copies`` of weights go where autocast ends."""
        if self.chunked:
            self.tape.drop(*copies)
            self._chunked(saved, trained)
        else:
            self._full(saved, trained, copies)

    def _copy_of_weight(self) -> Tensor | None:
        if not self.s.cast:
            return None
        return self.tape.make("activations", "16-bit copy of the head's weight", self.s.V, self.s.h, 2)

    def _full(self, saved: dict, trained: bool, copies: list[Tensor]) -> None:
        s, tape, size = self.s, self.tape, self.size
        weight = self._copy_of_weight()
        logits = tape.make("logits", "of C + 1 positions", s.B, s.C + 1, s.V, s.a)
        if trained and weight is not None:
            saved["head.weight"] = tape.keep(weight)
        tape.drop(weight, *copies)
        if s.a != size:
            logits16, logits = logits, tape.make("logits", "in float32", s.B, s.C + 1, s.V, size)
            tape.drop(logits16)
        divided = tape.make("logits", "divided by the temperature", s.B, s.C, s.V, size)
        tape.drop(logits)
        if size == 4:
            tape.drop(tape.make("logits", "exp of a row's", s.C, s.V, 4))  # logsumexp, row by row
            kept = tape.keep(divided)
        else:
            kept = tape.make("logits", "log_softmax of each row", s.B if trained else 1, s.C, s.V, size)
        if trained:
            self._entropy(min(ENTROPY_ROWS, s.B * s.C), size)
            saved["logits"] = tape.keep(kept)
        tape.drop(divided, kept)

    def _chunked(self, saved: dict, trained: bool) -> None:
        s, tape = self.s, self.tape
        hidden = tape.make("activations", "hidden states of the completions", s.B, s.C, s.h, s.w)
        weight = self._copy_of_weight()
        logits = tape.make("logits", "a chunk", self.rows, s.V, 4)
        if s.a != 4:
            half = tape.make("logits", "a chunk in 16 bits", self.rows, s.V, s.a)
            tape.drop(half)
        tape.drop(tape.make("logits", "a chunk's exp", self.rows, s.V, 4))
        if trained:
            self._entropy(min(ENTROPY_ROWS, self.rows), 4)
            saved["hidden"] = tape.keep(hidden)
        tape.drop(logits, weight, hidden)

    def _entropy(self, rows: int, size: int) -> None:
        made = self.tape.make("logits", "entropy's log-probs, exp, product", rows, self.s.V, size, count=3)
        self.tape.drop(made)

    def backward(self, saved: dict) -> tuple[Tensor, Tensor | None]:
        """The gradients of the final norm's result and of the head's weight (None in LoRA)."""
        return self._chunked_backward(saved) if self.chunked else self._full_backward(saved)

    def _weight_gradient(self) -> Tensor | None:
        """Under tied weights it waits for the embedding's (InputBuffer::add)."""
        return None if self.s.lora else self.tape.make("gradients", "of the head", *self.s.head_gradient)

    def _full_backward(self, saved: dict) -> tuple[Tensor, Tensor | None]:
        s, tape, size = self.s, self.tape, self.size
        kept = saved.pop("logits")
        if size == 4:  # LogsumexpBackward, row by row; the logits stay to its end
            rows = tape.make("logits", "gradients of the rows", s.C, s.V, size, count=max(1, s.B - 1))
            tape.drop(rows, tape.make("logits", "x - logsumexp, exp and their product", s.C, s.V, size,
                                      count=3 if s.B > 1 else 2))  # fmt: skip
            rows = tape.make("logits", "gradients of the rows", s.C, s.V, size, count=s.B)
        else:  # LogSoftmaxBackward: a row's log-probs go with it
            tape.drop(tape.make("logits", "a row's gradients", s.C, s.V, size, count=2), kept)
            kept, rows = None, tape.make("logits", "gradients of the rows", s.C, s.V, size, count=s.B)
        both = tape.make("logits", "gradient of all rows", s.B, s.C, s.V, size)
        tape.drop(rows, kept)
        divided = tape.make("logits", "gradient, by the temperature", s.B, s.C, s.V, size)
        tape.drop(both)
        whole = tape.make("logits", "gradient of C + 1 positions", s.B, s.C + 1, s.V, size)
        tape.drop(divided)
        if size != s.a:
            whole32, whole = whole, tape.make("logits", "gradient in 16 bits", s.B, s.C + 1, s.V, s.a)
            tape.drop(whole32)
        g = tape.make("activations", "gradient of the hidden states", s.B, s.T, s.h, s.w)
        weight = self._weight_gradient()
        tape.drop(whole, saved.pop("head.weight", None))
        return g, weight

    def _chunked_backward(self, saved: dict) -> tuple[Tensor, Tensor | None]:
        s, tape = self.s, self.tape
        copy = self._copy_of_weight()
        g = tape.make("activations", "gradient of the hidden states", s.B, s.C, s.h, s.w)
        weight = self._weight_gradient()
        logits = tape.make("logits", "a chunk's, then their gradient", self.rows, s.V, 4)
        if s.a != 4:
            half = tape.make("logits", "and in 16 bits", self.rows, s.V, s.a)
            tape.drop(logits)
            logits = half
        if s.cast and not s.lora:
            tape.drop(tape.make("temporaries", "a chunk's part of the head's gradient", s.V, s.h, 2))
        tape.drop(logits, copy, saved.pop("hidden"))
        whole = tape.make("activations", "gradient of the hidden states", s.B, s.T, s.h, s.w)
        tape.drop(g)
        return whole, weight


def embedding_backward(s: Shape, tape: Tape, head: Tensor | None) -> None:
    """A dense gradient of the embedding; above 3,072 tokens float32 sums of segments before."""
    n = s.B * s.T
    gradient = tape.make("gradients", "of the embedding", s.V, s.h, s.w)
    if n > SORT_FROM:
        tape.drop(tape.make("temporaries", "sums of segments", n // 10 + min(n, s.V), s.h, 4))
    # a product's gradient is a transposed view, into which nothing is added in place
    both = tape.make("gradients", "of embedding and head", s.V, s.h, s.w) if s.added_apart else None
    if both is not None:
        tape.drop(gradient, head)
        gradient = head = None
    elif s.arch.tie_word_embeddings:  # added into one
        tape.drop(head)
        head = None
    if s.master:
        tape.drop(tape.make("gradients", "of the embedding, in float32", s.V, s.h, 4))
    if s.recipe.optimizer_in_backward:
        for term in stepping(s)[1:]:
            tape.drop(tape.make(term.category, term.what, *term.factors, count=term.count))
    tape.drop(gradient, head, both)
