"""A decoder layer of transformers' Llama, Mistral, Qwen2 and Qwen3 classes (`modeling_*.py`), played on a tape.

Forward, each line of theirs makes and drops what the real one does; with gradients on, `saved` holds what autograd
keeps. Backward, the nodes run in reverse, a saved tensor goes after its node, two gradients of one tensor are added in
place. PEFT's adapters and bitsandbytes' products are in :mod:`grpo_lab.formula.products`.
"""

from __future__ import annotations

from .products import Products
from .tape import Tensor


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Layer(Products):
    """A layer as a whole."""

    # ---- norms and rotary embeddings ----------------------------------------------------------------------------

    def norm(self, x: Tensor, width: int, size: int, saved: dict, name: str, heads: int = 1) -> Tensor:
        """RMSNorm computes in float32 and keeps its input, a root a row and, if its weight trains, what it scales."""
        tape, n = self.tape, self.n
        x32 = tape.keep(x) if size == 4 else self.activation("norm's float32 input", width, 4)
        squares = self.temporary("squares", n, width, 4)
        roots = self.activation("norm's roots", heads, 4)
        tape.drop(squares)
        y = self.temporary("normalized", n, width, 4)
        c = tape.keep(y) if size == 4 else self.activation("norm's normalized input", width, size)
        out = self.activation("norm's result", width, max(size, self.s.w))
        self.save(saved, name + ".x", x32)
        self.save(saved, name + ".roots", roots)
        if not self.s.lora:
            self.save(saved, name + ".y", c)
        tape.drop(x32, roots, y, c)
        return out

    def rotated(self, x: Tensor, width: int, size: int) -> Tensor:
        """x * cos + rotate_half(x) * sin; cos and sin have the weights' dtype."""
        out_size = max(size, self.s.w)
        left = self.temporary("x * cos", self.n, width, out_size)
        half = self.temporary("-x2", self.n, width // 2, size)
        turned = self.temporary("rotate_half(x)", self.n, width, size)
        self.tape.drop(half)
        right = self.temporary("rotate_half(x) * sin", self.n, width, out_size)
        self.tape.drop(turned)
        out = self.activation("rotated", width, out_size)
        self.tape.drop(left, right)
        return self.replaced(x, out)

    # ---- attention ----------------------------------------------------------------------------------------------

    def attention(self, x: Tensor, saved: dict, cache: tuple[Tensor | None, Tensor | None] | None = None) -> Tensor:
        s, tape = self.s, self.tape
        q, k, v = (self.linear(name, x, s.w, saved) for name in ("q_proj", "k_proj", "v_proj"))
        if s.arch.qk_norm:
            q = self.replaced(q, self.norm(q, s.q, self.o, saved, "q_norm", s.heads))
            k = self.replaced(k, self.norm(k, s.kv, self.o, saved, "k_norm", s.kv // s.D))
        norm_size = max(self.o, s.w) if s.arch.qk_norm else self.o
        q, k = self.rotated(q, s.q, norm_size), self.rotated(k, s.kv, norm_size)
        keys, size_k = self.length + self.past, max(norm_size, s.w)
        if cache is not None:  # the layer's keys and values are made anew, one token longer
            for index, (new, size) in enumerate(((k, size_k), (v, self.o))):
                made = tape.make("KV cache", "a layer's, made anew", self.rows, keys, s.kv, size)
                tape.drop(cache[index], new)
                k, v = (k, tape.keep(made)) if index else (tape.keep(made), v)
        if s.eager:
            out = self._eager(q, k, v, size_k, keys, saved)
        else:
            out = self._sdpa(q, k, v, size_k, keys, saved)
        result = self.linear("o_proj", out, s.a, saved)
        tape.drop(out)
        return result

    def _repeated(self, x: Tensor, keys: int, size: int) -> Tensor:
        if self.s.kv == self.s.q:
            return self.tape.keep(x)
        return self.tape.make("activations", "keys or values, repeated", self.rows, keys, self.s.q, size)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, size_k: int, keys: int, saved: dict) -> Tensor:
        """The memory-efficient kernel with a mask, flash attention without: both keep their inputs and a sum a query.
        """
        s, tape, rows, a = self.s, self.tape, self.rows, self.s.a
        repeats = self.masked and self.length > 1
        width = s.q if repeats else s.kv
        given = [("q", tape.keep(q), size_k, self.length, s.q)]
        for name, x, size in (("k", k, size_k), ("v", v, self.o)):
            given.append((name, self._repeated(x, keys, size) if repeats else tape.keep(x), size, keys, width))
        used = []
        for name, x, size, count, wide in given:
            if size != a:
                x = tape.make("activations", "16-bit queries, keys or values", rows, count, wide, a)
            used.append((name, x))
        cast = [x for (_, x), (_, before, *_) in zip(used, given, strict=True) if x is not before]
        if self.masked:
            used.append(("mask", tape.make("activations", "mask as numbers", rows, self.length, up(keys, 8), a)))
        out = self.activation("attention's output", s.q, a)
        sums = tape.make("activations", "logsumexp of the scores", rows, s.heads, up(self.length, 32), 4)
        used.append(("lse", sums))
        for name, x in used:
            self.save(saved, name, x)
        self.save(saved, "out", out)
        tape.drop(*(x for _, x in used[3:]), *cast, *(before for _, before, *_ in given), q, k, v)
        return out

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, size_k: int, keys: int, saved: dict) -> Tensor:
        """Scores in full, their softmax in float32."""
        s, tape, a = self.s, self.tape, self.s.a
        grid = (self.rows, s.heads, self.length, keys)
        key, value = self._repeated(k, keys, size_k), self._repeated(v, keys, self.o)
        q_, k_ = (x if size_k == a else tape.make("activations", "16-bit queries or keys", self.rows, count, s.q, a)
                  for x, count in ((q, self.length), (key, keys)))  # fmt: skip
        tape.keep(q_), tape.keep(k_)
        scores = self.temporary("scores", *grid, a)
        self.save(saved, "q", q_)
        self.save(saved, "k", k_)
        tape.drop(q_, k_)
        if size_k != a:
            tape.drop(q_, k_)
        scores = self.replaced(scores, self.temporary("scores, scaled", *grid, a))
        scores = self.replaced(scores, self.temporary("scores, masked", *grid, max(a, s.w)))
        wide = None
        if max(a, s.w) == 2 and s.recipe.dtype == "bfloat16":
            wide = self.temporary("scores in float32", *grid, 4)
        soft = tape.make("activations", "softmax of the scores in float32", *grid, 4)
        tape.drop(wide)
        self.save(saved, "softmax", soft)
        weights = tape.keep(soft)
        if max(size_k, s.w) != 4:
            weights = self.replaced(weights, tape.make("activations", "softmax in 16 bits", *grid, 2))
        tape.drop(scores, soft)
        w_ = tape.keep(weights) if max(size_k, s.w) == a else tape.make("activations", "softmax in 16 bits", *grid, a)
        v_ = tape.keep(value) if self.o == a else tape.make("activations", "16-bit values", self.rows, keys, s.q, a)
        out = self.activation("attention's output", s.q, a)
        self.save(saved, "weights", w_)
        self.save(saved, "v", v_)
        turned = self.activation("attention's output", s.q, a)  # transpose(1, 2).contiguous()
        tape.drop(out, w_, v_, weights, key, value, q, k, v)
        return turned

    def attention_backward(self, g: Tensor, saved: dict) -> Tensor:
        """From the gradient of the attention's result to that of its input."""
        s, tape = self.s, self.tape
        g = self.linear_backward("o_proj", g, s.a, saved)
        gq, gk, gv = self._eager_backward(g, saved) if s.eager else self._sdpa_backward(g, saved)
        gx = None
        for name, gradient in (("v_proj", gv), ("k_proj", gk), ("q_proj", gq)):
            if name != "v_proj" and s.arch.qk_norm:
                for part in (".x", ".roots", ".y"):
                    tape.drop(saved.pop(name[0] + "_norm" + part, None))
            more = self.linear_backward(name, gradient, s.w, saved)
            tape.drop(gx)
            gx = more
        return gx

    def _narrow(self, wide: Tensor, size: int) -> Tensor:
        """Gradients of repeated keys or values are summed over the heads that share them."""
        if self.s.kv == self.s.q:
            return wide
        return self.replaced(wide, self.activation("gradient", self.s.kv, size))

    def _sdpa_backward(self, g: Tensor, saved: dict) -> tuple[Tensor, Tensor, Tensor]:
        s, tape, a = self.s, self.tape, self.s.a
        width = s.q if self.masked else s.kv
        gq, gk, gv = (self.activation("gradient", wide, a) for wide in (s.q, width, width))
        inside = self.temporary("attention's float32 sums", self.rows, s.heads, up(self.length, 128), s.D + 1, 4)
        tape.drop(inside, g, *(saved.pop(name, None) for name in ("q", "k", "v", "mask", "lse", "out")))
        if self.masked:
            gk, gv = self._narrow(gk, a), self._narrow(gv, a)
        return tuple(self.replaced(x, self.activation("gradient", wide, self.o)) if self.o != a else x
                     for x, wide in ((gq, s.q), (gk, s.kv), (gv, s.kv)))  # fmt: skip

    def _eager_backward(self, g: Tensor, saved: dict) -> tuple[Tensor, Tensor, Tensor]:
        s, tape, a = self.s, self.tape, self.s.a
        grid = (self.rows, s.heads, self.length, self.length)
        scores, gv = self.temporary("gradient of the softmax", *grid, a), self.activation("gradient", s.q, a)
        tape.drop(g, saved.pop("weights"), saved.pop("v"))
        gv = self._narrow(gv, a)
        if a == 2:
            scores = self.replaced(scores, self.temporary("gradient of the softmax in float32", *grid, 4))
        made, times = self.temporary("gradient of the scores", *grid, 4), self.temporary("grad * output", *grid, 4)
        tape.drop(times, scores, saved.pop("softmax"))
        if a == 2:
            made = self.replaced(made, self.temporary("gradient of the scores in 16 bits", *grid, 2))
        made = self.replaced(made, self.temporary("gradient of the scores, scaled", *grid, a))
        gq, gk = self.activation("gradient", s.q, a), self.activation("gradient", s.q, a)
        tape.drop(made, saved.pop("q"), saved.pop("k"))
        return gq, self._narrow(gk, a), gv

    # ---- the whole ------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, saved: dict, cache: tuple[Tensor | None, Tensor | None] | None = None) -> Tensor:
        """The layer's result; ``x`` stays the caller's."""
        s, tape, o = self.s, self.tape, self.o
        y = self.norm(x, s.h, s.w, saved, "input_norm")
        y = self.replaced(y, self.attention(y, saved, cache))
        middle = self.activation("residual", s.h, s.w)
        tape.drop(y)
        y = self.norm(middle, s.h, s.w, saved, "post_norm")
        gate = self.linear("gate_proj", y, s.w, saved)
        act = self.activation("silu(gate)", s.I, o)
        self.save(saved, "gate", gate)
        tape.drop(gate)
        up = self.linear("up_proj", y, s.w, saved)
        prod = self.activation("silu(gate) * up", s.I, o)
        self.save(saved, "act", act)
        self.save(saved, "up", up)
        tape.drop(act, up)
        down = self.linear("down_proj", prod, o, saved)
        tape.drop(prod, y)
        out = self.activation("layer's result", s.h, s.w)
        tape.drop(middle, down)
        return out

    def backward(self, g: Tensor, saved: dict) -> Tensor:
        """From the gradient of the layer's result to that of its input; ``saved`` is used up."""
        s, tape, o = self.s, self.tape, self.o
        inner = tape.keep(g) if o == s.w else self.activation("gradient", s.h, o)
        gp = self.linear_backward("down_proj", inner, o, saved)
        ga, gu = self.activation("gradient of silu(gate)", s.I, o), self.activation("gradient of up", s.I, o)
        tape.drop(gp, saved.pop("act"), saved.pop("up"))
        gx = self.linear_backward("up_proj", gu, s.w, saved)
        gg = self.activation("gradient of gate", s.I, o)
        tape.drop(ga, saved.pop("gate"))
        more = self.linear_backward("gate_proj", gg, s.w, saved)
        tape.drop(gx)
        g = self._norm_backward(g, more, saved, "post_norm")
        inner = tape.keep(g) if o == s.w else self.activation("gradient", s.h, o)
        gx = self.attention_backward(inner, saved)
        return self._norm_backward(g, gx, saved, "input_norm")

    def _norm_backward(self, residual: Tensor, g: Tensor, saved: dict, name: str) -> Tensor:
        """The norm's input's gradient is added to the residual's."""
        s, tape = self.s, self.tape
        if not s.lora:
            tape.drop(self.temporary("gradient of the norm's weight, row by row", self.n, s.h, s.w))
        scaled = self.activation("gradient", s.h, 4)
        tape.drop(g)
        of_x, of_root = self.temporary("gradient", self.n, s.h, 4), self.temporary("gradient", self.n, s.h, 4)
        tape.drop(scaled, of_root, saved.pop(name + ".y", None), saved.pop(name + ".roots"))
        squares = self.temporary("gradient", self.n, s.h, 4)
        tape.drop(squares, saved.pop(name + ".x"))
        if s.w != 4:
            of_x = self.replaced(of_x, self.temporary("gradient", self.n, s.h, s.w))
        tape.drop(of_x)
        return residual
