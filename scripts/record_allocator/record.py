"""Records what PyTorch's own caching allocator does, for tests/unit/test_allocator_recordings.py. See README.md.

    python scripts/record_allocator/record.py WHEELS [--check N]
"""
from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "tests/unit/allocator_recordings.json"
MiB = 2**20

COLUMNS = ["address", "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current",
           "reserved_bytes.all.peak", "requested_bytes.all.current", "active_bytes.all.current",
           "active_bytes.all.peak", "inactive_split_bytes.all.current", "inactive_split.all.current",
           "segment.all.current", "allocation.all.current", "active.all.current", "num_alloc_retries", "num_ooms",
           "num_oom_rejections", "num_device_alloc", "num_device_free", "num_sync_all_streams"]
FRACTION = "per_process_memory_fraction:"
EXPANDABLE = "expandable_segments:True"
SETTINGS = ["", EXPANDABLE, "max_split_size_mb:32", "max_split_size_mb:20,max_non_split_rounding_mb:40",
            "roundup_power2_divisions:[1:2,16:4,>:8]", "roundup_power2_divisions:4", "large_segment_size_mb:32",
            FRACTION + "0.6,garbage_collection_threshold:0.3", "throw_on_cudamalloc_oom:True",
            FRACTION + "0.9,garbage_collection_threshold:0.6,max_split_size_mb:40",
            EXPANDABLE + "," + FRACTION + "0.5",
            EXPANDABLE + ",max_split_size_mb:64", EXPANDABLE + ",large_segment_size_mb:40",
            FRACTION + "0.5,throw_on_cudamalloc_oom:True", EXPANDABLE + ",roundup_power2_divisions:8",
            EXPANDABLE + "," + FRACTION + "0.7,garbage_collection_threshold:0.4"]


def build(wheels: Path, folder: Path) -> tuple[Path, str]:
    """Unpacks, compiles, links. The program, and the version of PyTorch that it runs."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if re.match(
                r"torch/lib/libc10(_cuda)?\.so|torch/include/(c10|torch/headeronly)/|nvidia/cu\d+/include/", name)]
            archive.extractall(folder, wanted)
    version = next(wheels.glob("torch-*")).name.split("-")[1]
    headers = ["-I", str(next(folder.glob("nvidia/*/include"))), "-I", str(folder / "torch/include")]
    library = folder / "torch/lib/libc10_cuda.so"
    runtime = next(re.finditer(r"libcudart\.so\.\d+", run("readelf", "-d", library)))[0]
    asked = set(re.findall(r"U (cuda\w+)", run("nm", "-D", "--undefined-only", library)))
    run("g++", "-O1", "-fPIC", "-c", *headers, HERE / "stand_in.cpp", "-o", folder / "stand_in.o")
    rest = asked - set(re.findall(r"T (\w+)", run("nm", folder / "stand_in.o")))        # never called here
    (folder / "rest.c").write_text("void abort(void);\n" + "".join(
        f"void {name}(void) {{ abort(); }}\n" for name in rest))
    (folder / "version.map").write_text(f"{runtime} {{ global: *; }};\n")
    run("g++", "-shared", "-fPIC", folder / "stand_in.o", "-x", "c", folder / "rest.c", f"-Wl,-soname,{runtime}",
        f"-Wl,--version-script={folder / 'version.map'}", "-o", folder / runtime)
    (folder / "libnvidia-ml.so.1").symlink_to(runtime)      # looked up at run time; the same object, with one count
    run("g++", "-O1", "-std=c++20", *headers, HERE / "driver.cpp", f"-L{folder / 'torch/lib'}", "-lc10_cuda", "-lc10",
        folder / runtime,
        f"-Wl,-rpath,{folder / 'torch/lib'}:{folder}", "-o", folder / "driver")
    return folder / "driver", version


def run(*command) -> str:
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def steps(rng: random.Random, count: int) -> list[list]:
    """Requests of all sizes on four streams, and what is done with them."""
    live, made, serial, largest = [], [], 0, rng.choice([4, 20, 60, 200])
    sizes = [lambda: rng.randint(1, 4096), lambda: rng.randint(1, 2 * MiB), lambda: rng.randint(1, largest * MiB),
             lambda: rng.randint(1, largest) * MiB,
             lambda: rng.choice([MiB, MiB + 1, 10 * MiB - 1, 10 * MiB, 20 * MiB, 30 * MiB])]
    for _ in range(count):
        dice = rng.random()
        if live and dice < 0.45:
            made.append(["f", live.pop(rng.randrange(len(live)))])
        elif live and dice < 0.49:
            made.append(["r", rng.choice(live), rng.randrange(4)])
        elif dice < 0.51:
            made.append(["e"])
        else:
            serial += 1
            live.append(serial)
            made.append(["a", serial, rng.choice(sizes)(), 0 if rng.random() < 0.85 else rng.randrange(4)])
    return made


def record(driver: Path, settings: str, seed: int, count: int) -> dict:
    rng = random.Random(f"{settings} {seed}")
    budget = rng.choice([60, 100, 300]) * MiB + rng.choice([0, 12345])
    total = budget + rng.choice([0, 500 * MiB])
    made = steps(rng, count)
    environment = {**os.environ, "CARD_TOTAL": str(total), "CARD_BUDGET": str(budget),
                   "LD_LIBRARY_PATH": str(driver.parent), "PYTORCH_CUDA_ALLOC_CONF": settings}
    if not settings:
        del environment["PYTORCH_CUDA_ALLOC_CONF"]
    text = "\n".join(" ".join(map(str, step)) for step in made)
    told = subprocess.run([driver], input=text, env=environment, check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True).stdout
    figures, messages, segments = zip(*(line.split("|") for line in told.splitlines()), strict=True)
    return {"settings": settings, "budget": budget, "total_memory": total, "steps": made,
            "rows": [[int(value) for value in row.split()] for row in figures],
            "messages": {str(i): words.split(" If reserved")[0] for i, words in enumerate(messages) if words},
            "segments": segments[-1].split()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, help="folder with the three wheels that README.md names")
    parser.add_argument("--check", type=int, metavar="N",
                        help="compare N traces a setting with the replica; write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        driver, version = build(arguments.wheels.resolve(), Path(folder))
        if arguments.check:
            sys.path.insert(0, str(TARGET.parent))
            from test_allocator_recordings import compare
            for seed in range(1, arguments.check + 1):
                for settings in SETTINGS:
                    compare(record(driver, settings, seed, 300), COLUMNS)
            print(f"PyTorch {version}: {arguments.check * len(SETTINGS)} traces of 300 steps, no difference")
            return
        made = [record(driver, settings, 0, 60) for settings in SETTINGS]
    head = {"pytorch": version, "columns": COLUMNS}
    text = json.dumps(head)[:-1] + ', "recordings": [\n' + ",\n".join(
        json.dumps(recording, separators=(",", ":")) for recording in made) + "\n]}\n"
    TARGET.write_text(text)
    print(f"PyTorch {version}: {len(made)} recordings, {len(text) // 1024} KiB in {TARGET}")


if __name__ == "__main__":
    main()
