"""Linear layers with what PEFT and bitsandbytes do around them, played on a tape."""

from __future__ import annotations

from .shape import Shape
from .tape import Tape, Tensor

UNPACKED_FROM = 257  # rows: below, bitsandbytes multiplies by packed weights (memory/nf4.py)


class Products:
    """The products of a layer over ``rows`` sequences of ``length`` new tokens, on top of ``past`` cached ones.

    ``grad``: whether a graph is built. ``adapted``: whether adapters are on. ``frozen``: a reference model's.
    """

    def __init__(self, s: Shape, tape: Tape, rows: int, length: int, *, past: int = 0, grad: bool = False,
                 adapted: bool = True, frozen: bool = False) -> None:  # fmt: skip
        self.s, self.tape, self.rows, self.length, self.past, self.grad = s, tape, rows, length, past, grad
        self.n, self.masked = rows * length, s.masked
        # autocast keeps its copies of weights that train; those of frozen ones are made for each call
        self.copies = s.cast and (s.lora or frozen) and not s.nf4
        self.targets = s.targets if adapted else set()
        self.autocast = s.recipe.autocast is not None
        self.o = s.w if s.nf4 else s.a  # bytes of a linear layer's result: bitsandbytes returns its input's dtype
        self.product = s.a if self.autocast else s.t  # of an adapter's products

    def activation(self, what: str, width: int, size: int) -> Tensor:
        return self.tape.make("activations", what, self.n, width, size)

    def temporary(self, what: str, *factors: int) -> Tensor:
        return self.tape.make("temporaries", what, *factors)

    def save(self, saved: dict, name: str, tensor: Tensor) -> None:
        """For the backward, if there will be one."""
        if self.grad:
            saved[name] = self.tape.keep(tensor)

    def linear(self, name: str, x: Tensor, size: int, saved: dict) -> Tensor:
        """``x`` (``size`` bytes a number) times a weight, and what its adapter adds."""
        s, tape, (i, o) = self.s, self.tape, self.s.linears[name]
        source = tape.keep(x) if size == s.a else self.activation(f"16-bit input of {name}", i, s.a)
        weight = None
        if s.nf4:
            weight = self.temporary(f"{name} unpacked", i, o, s.a) if self.n >= UNPACKED_FROM else None
        elif self.copies:
            weight = tape.make("activations", "16-bit copies of weights", i, o, 2)
            self.save(saved, name + ".weight", weight)
        out = self.activation(f"result of {name}", o, s.a)
        tape.drop(weight)
        if self.o != s.a:
            out = self.replaced(out, self.activation(f"result of {name}", o, self.o))
        if not s.lora:
            self.save(saved, name, source)
        tape.drop(source)
        return self._adapter(name, x, size, out, saved) if name in self.targets else out

    def replaced(self, old: Tensor, new: Tensor) -> Tensor:
        self.tape.drop(old)
        return new

    def _adapter(self, name: str, x: Tensor, size: int, out: Tensor, saved: dict) -> Tensor:
        """peft/tuners/lora/layer.py and bnb.py: out + B(A(x)) * scaling."""
        s, tape, (i, o), p = self.s, self.tape, self.s.linears[name], self.product
        if s.nf4:
            out = self.replaced(out, self.activation("the result, cloned", o, self.o))
        given, given_size = tape.keep(x), size
        if size != s.t and not (s.nf4 and self.autocast):
            given, given_size = self.replaced(given, self.activation(f"input of {name}'s A", i, s.t)), s.t
        source = tape.keep(given) if given_size == p else self.activation(f"16-bit input of {name}'s A", i, p)
        between = self.activation("between A and B", s.rank, p)
        added = self.activation("B's result", o, p)
        self.save(saved, name + ".A", source)
        self.save(saved, name + ".B", between)
        tape.drop(source, between)
        added = self.replaced(added, self.activation("scaled", o, p))
        if s.nf4 and not self.autocast and p != self.o:
            added = self.replaced(added, self.activation("scaled", o, self.o))
            p = self.o
        both = self.activation("with the adapter", o, max(self.o, p))
        tape.drop(out, added)
        if max(self.o, p) != self.o:
            both = self.replaced(both, self.activation("with the adapter", o, self.o))
        tape.drop(given)
        return both

    def linear_backward(self, name: str, g: Tensor, size: int, saved: dict) -> Tensor:
        """From the gradient of the result to that of the input, of ``size`` bytes a number."""
        s, tape, (i, o) = self.s, self.tape, self.s.linears[name]
        through = None
        if name in self.targets:
            g, through = self._adapter_backward(name, g, size, saved)
        if self.o != s.a:
            g = self.replaced(g, self.activation("gradient", o, s.a))
        weight = self.temporary(f"{name} unpacked", i, o, s.a) if s.nf4 else None
        gx = self.activation("gradient", i, s.a)
        tape.drop(weight)
        if not s.lora:
            self._weight_gradient(name, i * o)
            tape.drop(saved.pop(name))
        tape.drop(saved.pop(name + ".weight", None), g)
        if size != s.a:
            gx = self.replaced(gx, self.activation("gradient", i, size))
        tape.drop(through)  # added in place
        return gx

    def _weight_gradient(self, name: str, numbers: int) -> None:
        """Under autocast of the 16-bit copy first. It stays, is added to the micro-batches' before, or leaves."""
        s, tape = self.s, self.tape
        half = tape.make("gradients", f"of {name}'s copy", numbers, 2) if s.cast else None
        gradient = tape.make("gradients", f"of {name}", numbers, s.w)
        tape.drop(half)
        if s.master:
            gradient = self.replaced(gradient, tape.make("gradients", f"of {name}, in float32", numbers, 4))
        if s.accumulates or s.leaving:
            tape.drop(gradient)

    def _adapter_backward(self, name: str, g: Tensor, size: int, saved: dict) -> tuple[Tensor, Tensor]:
        """The gradients of the base layer's result and of the adapter's input."""
        s, tape, (i, o), p = self.s, self.tape, self.s.linears[name], self.product
        sums = self.o if s.nf4 else max(self.o, p)
        if sums != self.o:
            g = self.replaced(g, self.activation("gradient", o, sums))
        branch = self.activation("gradient", o, p) if p != sums else tape.keep(g)
        branch = self.replaced(branch, self.activation("gradient, scaled", o, p))
        inner = self.activation("gradient", s.rank, p)
        tape.drop(branch, saved.pop(name + ".B"))
        gx = self.activation("gradient", i, p)
        tape.drop(inner, saved.pop(name + ".A"))
        if p != s.t and not s.nf4:
            gx = self.replaced(gx, self.activation("gradient", i, s.t))
        if size != (p if s.nf4 and self.autocast else s.t):
            gx = self.replaced(gx, self.activation("gradient", i, size))
        if sums != self.o:
            g = self.replaced(g, self.activation("gradient", o, self.o))
        return g, gx
