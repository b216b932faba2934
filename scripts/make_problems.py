"""Write the problems of `grpo_lab.tasks` into data/problems/: `python scripts/make_problems.py`.

Seeded, so that the same files come out byte for byte. Two problems that a reader would call the same (3+4 and
4+3; the same countdown numbers in another order) never lie in different splits: a held-out problem is new in
either spelling.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "data" / "problems"
SEED = 42
OPERANDS = range(50)  # a+b with a, b in 0..49: 2,500 problems in all
ADDITION_HELD_OUT = 250  # in validation and in test; the other 2,000 train
COUNTDOWN_SIZES = {"train": 1000, "validation": 100, "test": 100}
COUNTDOWN_NUMBERS = range(1, 13)
COUNTDOWN_TARGETS = range(1, 100)


def addition(seed: int = SEED) -> dict[str, list[dict]]:
    """Every a+b over OPERANDS, split so that a+b and b+a stay together."""
    rng = random.Random(seed)
    twins = [[(a, b)] if a == b else [(a, b), (b, a)] for a in OPERANDS for b in OPERANDS if a <= b]
    rng.shuffle(twins)
    splits: dict[str, list[tuple[int, int]]] = {"train": [], "validation": [], "test": []}
    for pairs in twins:
        fits = [s for s in ("test", "validation") if len(splits[s]) + len(pairs) <= ADDITION_HELD_OUT]
        splits[fits[0] if fits else "train"] += pairs
    for pairs in splits.values():
        rng.shuffle(pairs)
    return {
        s: [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs] for s, pairs in splits.items()
    }


def countdown(seed: int = SEED) -> dict[str, list[dict]]:
    """Three numbers and a target that some expression over them reaches; `answer` is one such expression."""
    rng = random.Random(seed)
    seen: set[tuple] = set()
    rows: list[dict] = []
    while len(rows) < sum(COUNTDOWN_SIZES.values()):
        x, y, z = numbers = [rng.choice(COUNTDOWN_NUMBERS) for _ in range(3)]
        first, second = rng.choice("+-*"), rng.choice("+-*")
        # Parentheses only where they change the value, so that an answer reads as a person would write it.
        inner = f"({x}{first}{y})" if second == "*" and first != "*" else f"{x}{first}{y}"
        answer = f"{inner}{second}{z}"
        left = {"+": x + y, "-": x - y, "*": x * y}[first]
        target = {"+": left + z, "-": left - z, "*": left * z}[second]
        problem = (*sorted(numbers), target)
        if target not in COUNTDOWN_TARGETS or problem in seen:
            continue
        seen.add(problem)
        rng.shuffle(numbers)
        prompt = f"make {target} from {', '.join(map(str, numbers))}="
        rows.append({"prompt": prompt, "answer": answer, "numbers": numbers, "target": target})
    splits, start = {}, 0
    for split, size in COUNTDOWN_SIZES.items():
        splits[split], start = rows[start : start + size], start + size
    return splits


def as_jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def files() -> dict[str, str]:
    """Path below data/problems/ -> text of the file."""
    tasks = {"addition": addition(), "countdown": countdown()}
    return {
        f"{task}/{split}.jsonl": as_jsonl(rows)
        for task, splits in tasks.items()
        for split, rows in splits.items()
    }


def main() -> None:
    for name, text in files().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())  # bytes: the same file on every system, also where newlines differ
        print(f"{len(text.splitlines()):5d} problems  {path}")


if __name__ == "__main__":
    main()
