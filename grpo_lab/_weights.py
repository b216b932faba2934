"""Real weights: from this package, a package index, a folder, or a hub.

safetensors only, and no code that comes with a model runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import models, smollm2
from ._data import data_path
from ._names import did_you_mean

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

OFFLINE = ("tiny", "SmolLM2-135M")
_SMOLLM2 = {"smollm2-135m", "smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load(name: Any, dtype: Any, attn_implementation: str, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    torch_dtype, source = _dtype(dtype), where(name)
    if kwargs.get("trust_remote_code"):
        raise ValueError(
            f"model={name!r}: trust_remote_code is refused; use a model whose class is part of transformers"
        )
    if source.is_folder:
        check_weights(Path(source.location))
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            source.location,
            dtype=torch_dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"model={str(name)!r} cannot be loaded: {_first_sentence(error)}") from None
    if loading["missing_keys"]:  # transformers would go on with random weights there
        first, count = sorted(loading["missing_keys"])[0], len(loading["missing_keys"])
        raise ValueError(
            f"model={str(name)!r} lacks {count} of its weights ({first}, ...); copy or save it again"
        )
    model.eval()
    return model, _tokenizer(name, source)


def tokenizer(name: Any) -> PreTrainedTokenizerBase:
    return _tokenizer(name, where(name))


class Source:
    """Where a model's files are: a folder, or the id of a repository that the hub library finds."""

    def __init__(self, location: str, is_folder: bool) -> None:
        self.location, self.is_folder = location, is_folder


def where(name: Any) -> Source:
    """Find a model's files, fetching SmolLM2 if need be; one clear sentence where they can't be had."""
    name = models.check_name(name)
    if name == "tiny":
        folder = data_path("tiny")
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"the tiny model is missing from {folder}; install the package again")
        return Source(str(folder), True)
    folder = Path(name).expanduser()
    if folder.is_dir():
        models.read_config(folder)
        return Source(str(folder), True)
    if name.lower() in _SMOLLM2:
        return Source(str(smollm2.fetch()), True)
    hub_id = models.hub_id(name)
    check_hub(name, hub_id)
    return Source(hub_id, False)


def check_hub(name: str, hub_id: str) -> None:
    """Fetch a repository's config.json first: its failures are clear, and it tells whether code would run."""
    from huggingface_hub import errors, hf_hub_download

    offline = (
        f"offline, load has {' and '.join(map(repr, OFFLINE))} and local folders, and simulate needs no "
        "weights for any of models.names()"
    )
    try:
        path = hf_hub_download(hub_id, "config.json")
    except errors.GatedRepoError:
        raise PermissionError(
            f"model={name!r}: {hub_id} asks you to accept its licence on the hub and to log in first "
            "(hf auth login)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"model={name!r}: the hub has no {hub_id!r}, or it is private; "
            f"{did_you_mean(name, models.names())}"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise ConnectionError(
            f"model={name!r}: {hub_id} is not in the hub's cache and the hub cannot be reached; {offline}"
        ) from None
    except errors.EntryNotFoundError:
        raise FileNotFoundError(
            f"model={name!r}: {hub_id} has no config.json, so it is not a transformers model"
        ) from None
    except (OSError, errors.HfHubHTTPError) as error:
        raise ConnectionError(
            f"model={name!r}: {hub_id} cannot be fetched ({_first_sentence(error)}); {offline}"
        ) from None
    models.read_config(Path(path).parent)


def check_weights(folder: Path) -> None:
    """Refuse a folder without whole safetensors files before torch sees it."""
    files = _weight_files(folder)
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(
                f"model folder {str(folder)!r} lacks {path.name}, which its index lists; copy it again"
            )
        _check_safetensors(path, folder)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"model folder {str(folder)!r}: {index.name} cannot be read ({error}); copy it again"
            ) from None
        return [folder / name for name in sorted(names)]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickled:
        raise ValueError(
            f"model folder {str(folder)!r} holds pickled weights ({pickled[0]}), which may run code when "
            "opened, and no safetensors; convert it where you trust it: model.save_pretrained(folder) writes "
            "safetensors"
        )
    raise FileNotFoundError(
        f"model folder {str(folder)!r} has a config.json but no weights (model.safetensors)"
    )


def _check_safetensors(path: Path, folder: Path) -> None:
    """Open the file, which checks that the header fits the file's length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"model folder {str(folder)!r}: {path.name} is damaged or incomplete "
            f"({path.stat().st_size:,} bytes: {_first_sentence(error)}); copy or download it again"
        ) from None


def _tokenizer(name: Any, source: Source) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        result = AutoTokenizer.from_pretrained(source.location)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(
            f"model={str(name)!r} has no tokenizer that can be read ({_first_sentence(error)}); save one "
            "beside the weights with tokenizer.save_pretrained(folder)"
        ) from None
    result.padding_side = "left"  # generation continues at the right end
    if result.pad_token_id is None:
        result.pad_token = result.eos_token
    return result


def _dtype(dtype: Any) -> torch.dtype:
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r} is not one of float32, bfloat16, float16")
    return getattr(torch, name)


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text.split(". ")[0] if text else type(error).__name__).rstrip(".")
