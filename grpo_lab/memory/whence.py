"""Where a storage comes from: the module that was running, and the Python lines.

>>> import torch
>>> from grpo_lab.memory import VirtualGPU
>>> with VirtualGPU("T4") as gpu, Whence(gpu.ledger, stacks=True):
...     model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
...     y = model(torch.zeros(2, 4))
>>> record = gpu.ledger.events[-1][1]
>>> str(record.op), record.module, record.frames[0][1:]      # the line is the doctest's
('aten.gelu.default', '1', (3, '<module>'))

A new record asks the ledger's ``locate`` for (module, frames); :class:`Whence` answers. In a backward pass no module
runs and no line of the user's does: what is made there belongs to the module, and to the line, whose forward made the
autograd node that is running. Nodes are numbered in the order in which they are made (``sequence_nr``, ATen's
``core/SequenceNumber``), and an op's node is made just before the op itself reaches the ledger: so the number before
the next one to be given (``torch.autograd._get_sequence_nr() - 1``) names it, both ways.
"""
from __future__ import annotations

import os
import sys
import sysconfig
import threading
import weakref
from bisect import bisect_right
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

Frame = tuple[str, int, str]                # file name, line, function

_next_node, _running_node = torch.autograd._get_sequence_nr, torch._C._current_autograd_node
_in_backward = torch._C._current_graph_task_id
ACCUMULATES = 2**63                         # AccumulateGrad's number is UINT64_MAX: no forward made it

HIDDEN, LIBRARY, USER = 0, 1, 2
_HERE = Path(__file__).parent
# A line in these says nothing about where the bytes come from: the instrument itself, PyTorch, the standard library.
_HIDDEN = (str(_HERE) + os.sep, str(_HERE.parent / "magics.py"), str(Path(torch.__file__).parent) + os.sep)
_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_LIBRARIES = (*(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")), str(_HERE.parent) + os.sep)
_kinds: dict[str, int] = {}
_frames: dict[tuple[CodeType, int], Frame] = {}


class Whence:
    """``with Whence(ledger)``: records made inside know their module, and with ``stacks=True`` their Python lines.

    ``record.module`` is the name that ``named_modules`` of the outermost module called gives (that module itself goes
    by its class, one that is not registered anywhere by its caller's name and its class); where none runs, "". In a
    backward pass it is the module that made the running autograd node, or else the node's name ("DivBackward0").
    Parameters and buffers of a module that was called belong to it.

    ``record.frames``: (file, line, function), the innermost line outside PyTorch first, then the innermost line of
    the user's own code where that is another one (a library's line between a model and a notebook is of little use).
    """

    def __init__(self, ledger, modules: bool = True, stacks: bool = False):
        self.ledger, self.modules, self.stacks = ledger, modules, stacks
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._running: list[tuple[int, str]] = []           # (id, name) of the modules being called, outermost first
        self._root: weakref.ref | None = None               # the outermost of them
        self._starts: list[int] = [0]                       # from this node number on ...
        self._makers: list[str] = [""]                      # ... this module made the nodes
        self._lines: dict[int, tuple[Frame, ...]] = {}      # node number -> the forward's lines
        self._strays = False                                # whether another thread numbers nodes of its own

    def __enter__(self) -> Whence:
        self._thread, self._before = threading.get_ident(), self.ledger.locate
        self.ledger.locate = self
        self._hooks = [register_module_forward_pre_hook(self._called),
                       register_module_forward_hook(self._returned, always_call=True)] if self.modules else []
        return self

    def __exit__(self, *exc) -> None:
        for hook in self._hooks:
            hook.remove()
        self.ledger.locate = self._before
        for module in self._watched():                      # never called, yet their parameters have a name
            if self.modules and module not in self._names:
                self._index(module)
        self._running.clear()

    def __call__(self) -> tuple[str, tuple[Frame, ...]]:
        """(module, frames) of a storage that is made now."""
        if _in_backward() == -1 or self._running:           # a module that runs in a backward pass is recomputed
            frames = _here() if self.stacks else ()
            if frames and torch.is_grad_enabled() and self._thread == threading.get_ident():
                self._lines.setdefault(_next_node() - 1, frames)
            return self._running[-1][1] if self._running else "", frames
        node = _running_node()
        number = node._sequence_nr() if node is not None else ACCUMULATES
        known = number < ACCUMULATES and not (self._strays and self._thread != threading.get_ident())
        module = self._makers[bisect_right(self._starts, number) - 1] if known else ""
        if not module and node is not None and self.modules:
            module = node.name().removeprefix("torch::autograd::")
        frames = (self._lines.get(number) if known else None) or _here() if self.stacks else ()
        return module, frames

    # ---- which module runs --------------------------------------------------------------------------------------

    def _called(self, module: torch.nn.Module, args) -> None:
        if not self._running:
            self.ledger.meet(module)
        name = self._names.get(module) or self._name(module)
        self._running.append((id(module), name))
        self._mark(name)

    def _returned(self, module: torch.nn.Module, args, output) -> None:
        if self._running and self._running[-1][0] == id(module):
            self._running.pop()
            self._mark(self._running[-1][1] if self._running else "")

    def _mark(self, name: str) -> None:
        """From here on, ``name`` makes the nodes."""
        if self._thread != threading.get_ident():
            self._strays = True
        elif torch.is_grad_enabled():
            number = _next_node()
            if self._starts[-1] == number:
                self._makers[-1] = name
            elif self._makers[-1] != name:
                self._starts.append(number)
                self._makers.append(name)

    def _name(self, module: torch.nn.Module) -> str:
        """The name of a module met for the first time, or again under another root."""
        root = self._root() if self._running and self._root is not None else None
        if root is None:
            root = next((m for m in self._watched() if any(part is module for part in m.modules())), module)
            self._root = weakref.ref(root)
        self._index(root)
        if module not in self._names:
            self._names[module] = f"{self._running[-1][1]}.{type(module).__name__}"
        return self._names[module]

    def _watched(self) -> list[torch.nn.Module]:
        return list(self.ledger._modules)

    def _index(self, root: torch.nn.Module) -> None:
        for name, part in root.named_modules():
            self._names[part] = name = name or type(root).__name__
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                record = None if tensor is None else self.ledger._records.get(tensor.untyped_storage()._cdata)
                if record is not None and not record.module:
                    record.module = name


# ---- which lines run ----------------------------------------------------------------------------------------------

def _here() -> tuple[Frame, ...]:
    """The innermost line outside PyTorch and, where it is another, the innermost of the user's own."""
    frame, first = sys._getframe(2), None
    while frame is not None:
        kind = _kinds.get(frame.f_code.co_filename)
        if kind is None:
            kind = _kind(frame.f_code.co_filename)
        if kind is USER:
            return (_line(frame),) if first is None else (_line(first), _line(frame))
        if kind is LIBRARY and first is None:
            first = frame
        frame = frame.f_back
    return () if first is None else (_line(first),)


def _kind(filename: str) -> int:
    if filename.startswith(_HIDDEN) or filename.startswith(("<frozen", "<eval_with_key", "<__")):
        kind = HIDDEN
    elif filename.startswith(_LIBRARIES):
        kind = LIBRARY
    elif filename.startswith(_STDLIB):
        kind = HIDDEN
    else:
        kind = USER
    _kinds[filename] = kind
    return kind


def _line(frame: FrameType) -> Frame:
    key = frame.f_code, frame.f_lineno
    found = _frames.get(key)
    if found is None:
        code = frame.f_code
        found = _frames[key] = (_cell(code.co_filename), frame.f_lineno, code.co_qualname)
    return found


def _cell(filename: str) -> str:
    """A notebook cell goes by its number, as in IPython's tracebacks, not by the temporary file that stands for it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name = shell.compile.format_code_name(filename) if shell is not None else None
    return " ".join(name) if name else filename
