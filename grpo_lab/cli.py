"""The command line: ``python -m grpo_lab`` or ``grpo-lab``.

    grpo-lab estimate --model Qwen2.5-1.5B --gpu "RTX 3080 Laptop 16GB"
    grpo-lab advise --model Qwen2.5-1.5B --gpu "RTX 3080 Laptop 16GB"
    grpo-lab diagnose error.txt --model Llama-3.2-1B
    grpo-lab train --preset tiny --max-steps 20 --out history.csv

Each field of a recipe is an option (``--max-completion-length 512``, or with underscores). A bare ``--model X`` stands
for the baseline with that model: what one writes first, everything in float32; ``--preset`` begins elsewhere. Exit code
0: it fits (or did what was asked); 1: it doesn't fit, or a text given to ``diagnose`` isn't about memory; 2: the question
can't be understood; 130: Ctrl-C. ``--json`` is for programs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import _rules, gpus, models
from ._names import nearest
from .estimation import estimate, human
from .recipe import PRESETS, TRAIN_KEYWORDS, Recipe

FITS, DOES_NOT_FIT, USAGE, INTERRUPTED = 0, 1, 2, 130
_FIELDS = [field.name for field in dataclasses.fields(Recipe)]
_NONE = ("none", "null", "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        options = _parser().parse_args(argv)
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's own last flush
        return FITS
    except KeyboardInterrupt:
        print("grpo-lab: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, TypeError, OSError, NotImplementedError, ImportError) as error:
        print(f"grpo-lab: {error}", file=sys.stderr)
        return USAGE


# ---- options --------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse's, but an error is one sentence, without the usage before it, and names the nearest option."""

    def error(self, message: str) -> NoReturn:
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        if message.startswith("unrecognized arguments: --"):
            given = message.split()[2].partition("=")[0]
            close = nearest(given, known, n=1)
            message = f"there is no option {given}" + (f"; did you mean {close[0]}?" if close else "")
        raise ValueError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):
        """Here, not at the top, for there the command's options aren't known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("grpo-lab", description=__doc__.split("\n\n", 1)[1], allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (run, text, takes_recipe) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON")
        if takes_recipe:
            _add_recipe(command)
        if name == "estimate":
            command.add_argument("--explain", action="store_true", help="print the sum with numbers in it")
        if name == "advise":
            command.add_argument("--no-verify", action="store_true", help="don't check the answer with the instrument")
        if name == "diagnose":
            command.add_argument("message", nargs="*", help="a file, or the text itself; without it, or with -, standard input")
        if name == "train":
            command.add_argument("--out", type=Path, help="write the history to this file, as CSV")
    return parser


def _add_recipe(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("the recipe")
    group.add_argument("--preset", choices=sorted(PRESETS), help="begin with this recipe")
    for name in _FIELDS:
        flags = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        choices = _rules.CHOICES.get(name)
        text = "one of " + ", ".join(str(value).lower() for value in choices) if choices else None
        group.add_argument(*flags, dest=name, default=argparse.SUPPRESS, metavar="VALUE", help=text)


def _recipe(options: argparse.Namespace, preset: str) -> Recipe:
    given = {name: _value(name, getattr(options, name)) for name in _FIELDS if hasattr(options, name)}
    return Recipe.preset(options.preset or preset, **given)


def _value(name: str, text: str) -> Any:
    """An option's text as the field's type; whether the value is allowed is the recipe's to say."""
    if name == "lora_targets":
        return text if text == "all-linear" else tuple(part.strip() for part in text.split(","))
    if name == "gpu":
        return int(text) if text.lstrip("-").isdigit() else text
    default = getattr(Recipe, name)
    if text.lower() in _NONE and (name in _rules.OPTIONAL or None in _rules.CHOICES.get(name, ())):
        return None
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError(f"--{name.replace('_', '-')} {text}: takes true or false")
        return text.lower() in ("true", "yes", "1")
    if name in _rules.WHOLE or isinstance(default, int):
        return _number(name, text, int)
    if name in _rules.NUMBERS or isinstance(default, float):
        return _number(name, text, float)
    return text


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text.replace("_", "").replace(",", ""))
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"--{name.replace('_', '-')} {text}: takes {what}") from None


# ---- commands -------------------------------------------------------------------------------------------------------


def _estimate(options: argparse.Namespace) -> int:
    found = estimate(_recipe(options, "baseline"))
    if options.json:
        return _print_json(_report(found), found.fits)
    print(found)
    _print_table(["phase", "allocated"], [[name, human(moment.bytes)] for name, moment in found.moments.items()])
    if options.explain:
        print("\n" + found.explain())
    return FITS if found.fits else DOES_NOT_FIT


def _simulate(options: argparse.Namespace) -> int:
    recipe = _recipe(options, "baseline")
    from .simulation import simulate

    found = simulate(recipe)
    if options.json:
        return _print_json(_report(found), found.fits)
    print(found)
    rows = [[name, human(row.peak_allocated), human(row.peak_reserved)] for name, row in found.phases.iterrows()]
    _print_table(["phase", "allocated", "reserved"], rows)
    return FITS if found.fits else DOES_NOT_FIT


def _report(found) -> dict[str, Any]:
    return {"fits": found.fits, "simulated": found.simulated, "card": found.card, "budget": found.budget,
            "peak_allocated": found.peak_allocated, "peak_reserved": found.peak_reserved,
            "phases": {name: int(size) for name, size in found.phases["peak_allocated"].items()},
            "categories": {name: int(size) for name, size in found.categories["bytes"].items()}}  # fmt: skip


def _advise(options: argparse.Namespace) -> int:
    recipe = _recipe(options, "baseline")
    from .advice import advise

    found = advise(recipe, verify=not options.no_verify)
    if options.json:
        changes = found.changes.to_dict("records")
        recipe_ = None if found.recipe is None else found.recipe.changes()
        return _print_json({"fits": found.fits, "recipe": recipe_, "changes": changes, "least": found.least,
                            "simulated": found.verified is not None}, found.fits)  # fmt: skip
    print(found.text)
    if found.recipe is not None:
        print(found.recipe)
    return FITS if found.fits else DOES_NOT_FIT


def _diagnose(options: argparse.Namespace) -> int:
    from .diagnosis import diagnose

    named = options.preset or any(hasattr(options, name) for name in _FIELDS)
    found = diagnose(_message(options.message), _recipe(options, "baseline") if named else None)
    understood = found.kind != "not an out-of-memory error"
    if options.json:
        return _print_json({"kind": found.kind, "numbers": found.numbers, "other_processes": found.others,
                            "candidates": [{"what": c.what, "factors": c.factors, "bytes": c.bytes}
                                           for c in found.candidates], "notes": found.notes,
                            "advice": found.advice}, understood)  # fmt: skip
    print(found)
    return FITS if understood else DOES_NOT_FIT


def _message(given: list[str]) -> str:
    if given in ([], ["-"]):
        if sys.stdin.isatty():
            print("paste the message, then press Ctrl-D (Ctrl-Z and Enter on Windows):", file=sys.stderr)
        return sys.stdin.read()
    text = " ".join(given)
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # too long for a name, or no name at all
        is_file = False
    if not is_file and len(given) == 1 and text and not any(letter.isspace() for letter in text):
        raise ValueError(f"there is no file {text!r}; a message has more than one word")
    return path.read_text(encoding="utf-8", errors="replace") if is_file else text


def _cards(options: argparse.Namespace) -> int:
    cards = [gpus.get(name) for name in gpus.names()]
    if options.json:
        return _print_json([dataclasses.asdict(card) | {"budget": card.budget} for card in cards], True)
    _print_table(["card", "a program sees", "left for PyTorch", "capability"],
                 [[card.name, human(card.total_memory), human(card.budget), ".".join(map(str, card.compute_capability))]
                  for card in cards])  # fmt: skip
    return FITS


def _models(options: argparse.Namespace) -> int:
    known = [models.architecture(name) for name in models.names()]
    if options.json:
        return _print_json([{"name": arch.name, "hub_id": arch.hub_id, "parameters": arch.parameters,
                             "layers": arch.num_hidden_layers, "vocabulary": arch.vocab_size} for arch in known], True)  # fmt: skip
    _print_table(["model", "parameters", "layers", "vocabulary", "hub"],
                 [[arch.name, f"{arch.parameters:,}", str(arch.num_hidden_layers), f"{arch.vocab_size:,}", arch.hub_id or "-"]
                  for arch in known])  # fmt: skip
    return FITS


def _train(options: argparse.Namespace) -> int:
    recipe, out = _recipe(options, "tiny"), options.out
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out}: this is a folder; give a file's name")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    from .grpo.train import train

    keywords = TRAIN_KEYWORDS.get(options.preset or "tiny", {})
    with contextlib.redirect_stdout(sys.stderr):  # what it will cost, then the progress; the result alone is the output
        _, history = train(recipe, **keywords)
    if out is not None:
        _write(history, out)
    if options.json:
        last = {} if history.empty else {name: _finite(value) for name, value in history.iloc[-1].items()}
        return _print_json({"steps": len(history), "last": last}, True)
    print(history.tail(5).to_string(index=False))
    return FITS


def _write(history, out: Path) -> None:
    """The file is whole or as it was; what can't be moved into its place stays beside it."""
    aside = out.with_name(out.name + ".part")
    history.to_csv(aside, index=False)
    try:
        os.replace(aside, out)
    except OSError as error:
        raise OSError(f"--out {out}: {error.strerror or error}; the history is in {aside}") from error


def _finite(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


COMMANDS = {
    "estimate": (_estimate, "what a recipe would take, by arithmetic (a millisecond)", True),
    "simulate": (_simulate, "the same by running the real step on a virtual card (seconds)", True),
    "advise": (_advise, "what to change so that a recipe fits", True),
    "diagnose": (_diagnose, "what an out-of-memory message means", True),
    "cards": (_cards, "the cards that are known", False),
    "models": (_models, "the models that are known", False),
    "train": (_train, "train with GRPO (without options: the tiny model, in a minute)", True),
}


# ---- output ---------------------------------------------------------------------------------------------------------


def _print_json(value: Any, fits: bool) -> int:
    print(json.dumps(value, indent=2))
    return FITS if fits else DOES_NOT_FIT


def _print_table(names: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    for row in [names, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
