"""``%load_ext grpo_lab`` brings ``%%vram`` and ``%vram``: what does this cell, or this line, do with memory?

    %%vram --gpu "RTX 3080 Laptop 8GB" -o report
    model = Net()
    with vram.phase("forward"):
        loss = model(torch.zeros(8, 512)).sum()
    with vram.phase("backward"):
        loss.backward()

The report is shown below the cell, also where the cell raises; the error is then shown as it would have been.
"""
from __future__ import annotations

import ast
import re
from contextlib import contextmanager
from types import CodeType, TracebackType

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand, output_can_be_silenced
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"']|["'])+""")       # blanks inside quotes belong to the word


@magics_class
class VramMagics(Magics):
    """The magics that ``%load_ext grpo_lab`` registers."""

    @magic_arguments()
    @argument("-h", "--help", action="store_true", help="show this text")
    @argument("--gpu", metavar="CARD", help="run on this virtual card instead of on this machine: a name, or a budget "
              "such as 8GB. Nothing is computed, no values can be read, and the names that the cell binds are gone "
              "after it: the card was never there.")
    @argument("-o", "--output", metavar="NAME", help="store the report under this name")
    @argument("--phases", action="store_true", help="show the table of phases, too")
    @argument("--top", metavar="N", type=int, help="show the N largest owners of the peak, with module, op and line")
    @argument("--plot", action="store_true", help="show the timeline, too")
    @argument("code", nargs="...", help="line magic: the statement to run")
    @output_can_be_silenced
    @no_var_expand                              # braces in a statement are Python's
    @line_cell_magic
    def vram(self, line: str, cell: str | None = None):
        """Report what a cell (%%vram) or a statement (%vram) does with memory.

        Without --gpu it runs on this machine, as it is, and every tensor is followed. With --gpu it runs on a card
        that isn't there, and runs out of memory where that card would. Inside, `vram` is the instrument: name parts
        of the cell by `with vram.phase("forward"):`. The report is shown also if the cell raises.
        """
        parser = VramMagics.vram.parser
        if cell is not None:
            line = self.shell.var_expand(line)          # --gpu $card
        words = list(_WORD.finditer(line))
        options = parser.parse_args([_unquoted(word[0]) for word in words])
        if options.help:
            print(parser.format_help())
            return None
        code = cell if cell is not None else line[words[-len(options.code)].start():] if options.code else ""
        _check(options, cell, code)
        return self._run(options, code, first_line=1 if cell is None else 2)

    def _run(self, options, code: str, first_line: int):
        body, last, filename = self._compile(code, first_line)
        instrument = _instrument(options.gpu, stacks=options.top is not None)
        names = dict(self.shell.user_ns) if options.gpu else self.shell.user_ns
        value = error = None
        try:
            with instrument, _named(names, "vram", instrument):
                exec(body, names)
                value = eval(last, names) if last is not None else None
        except BaseException as caught:
            error = caught
        self._show(options, instrument.report())
        if error is None:
            return value
        try:
            raise self._as_if_alone(error, filename)
        finally:
            del error                               # or this frame and the error would keep each other

    def _compile(self, code: str, first_line: int) -> tuple[CodeType, CodeType | None, str]:
        """The code but for a last expression, that expression, and the file name by which tracebacks find the cell."""
        compiler = self.shell.compile
        source = "\n" * (first_line - 1) + self.shell.transform_cell(code)      # lines count from the magic's own
        number = len(self.shell.history_manager.input_hist_parsed) - 1          # of the cell that is running
        filename = compiler.cache(source, number, raw_code=source)
        tree = self.shell.transform_ast(compiler.ast_parse(source, filename=filename))
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = compiler(ast.Expression(tree.body.pop().value), filename, "eval")
        return compiler(tree, filename, "exec"), last, filename

    def _show(self, options, report) -> None:
        if options.output:
            self.shell.user_ns[options.output] = report
        display(report)
        if options.phases:
            display(report.phases)
        if options.top is not None:
            display(report.top(options.top))
        if options.plot:
            display(report.plot())

    def _as_if_alone(self, error: BaseException, filename: str) -> BaseException:
        """The error, to be shown from the cell's own lines on: IPython asks it for its traceback's text."""
        trace: TracebackType | None = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != filename:
            trace = trace.tb_next
        shown_otherwise = not isinstance(error, Exception) or isinstance(error, (UsageError, BaseExceptionGroup))
        if trace is not None and not shown_otherwise:
            text = self.shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
            self.shell.InteractiveTB.tb = None
            error._render_traceback_ = lambda: text
        return error.with_traceback(trace) if trace is not None else error


def _check(options, cell: str | None, code: str) -> None:
    magic = "%vram" if cell is None else "%%vram"
    if cell is not None and options.code:
        raise UsageError(f"{magic}: {' '.join(options.code)!r} is no option; the code goes below, a card's name with "
                         'blanks into quotes: --gpu "RTX 3080 Laptop 8GB"')
    if not code.strip():
        raise UsageError(f"{magic}: there is nothing to run; write the code behind the options, or {magic} -h")
    if options.output is not None and not options.output.isidentifier():
        raise UsageError(f"{magic}: -o {options.output} is no name of a variable")
    if options.top is not None and options.top < 1:
        raise UsageError(f"{magic}: --top {options.top}: takes a number from 1 on")


def _instrument(card: str | None, stacks: bool):
    from .memory import VirtualGPU, track
    try:
        return track(stacks=stacks) if card is None else VirtualGPU(int(card) if card.isdigit() else card, stacks=stacks)
    except ValueError as error:                     # an unknown card: its sentence is enough
        raise UsageError(f"%%vram: {error}") from None


@contextmanager
def _named(names: dict, name: str, value):
    """Inside, ``name`` means ``value``."""
    before = {name: names[name]} if name in names else {}
    names[name] = value
    try:
        yield
    finally:
        if names.get(name) is value:
            del names[name]
            names.update(before)


def _unquoted(word: str) -> str:
    """
    >>> _unquoted('"RTX 3080 Laptop 8GB"'), _unquoted("--gpu='RTX 3090'")
    ('RTX 3080 Laptop 8GB', '--gpu=RTX 3090')
    """
    return re.sub(r"""^(--\w+=)?(["'])(.*)\2$""", r"\1\3", word)


def load_ipython_extension(shell) -> None:
    """What ``%load_ext grpo_lab`` calls."""
    shell.register_magics(VramMagics)
