"""How long the explorer takes to redraw after a control moved: ``python scripts/bench_explore.py``.

Every control is moved through its options; the time is from the move to the last part's new text, in this process.
"""

from __future__ import annotations

import statistics
import time

from grpo_lab import Recipe, explore


def moves(made) -> list[float]:
    """Seconds of each move that drew anything."""
    times = []
    for control in made.controls.values():
        start = control.value
        if hasattr(control, "options"):
            options = [value for _, value in control.options]
        else:
            step = (control.max - control.min) // 20 // control.step * control.step
            options = range(control.min, control.max, max(control.step, step))
        for value in [*options, start]:
            before, began = control.value, time.perf_counter()
            control.value = value
            if control.value != before:
                times.append(time.perf_counter() - began)
    return times


def main() -> None:
    for preset in ("laptop_8gb", "baseline"):
        times = sorted(1e3 * seconds for seconds in moves(explore(Recipe.preset(preset))))
        print(f"redraw from {preset!r}: median {statistics.median(times):.0f} ms, 95 % below "
              f"{times[int(0.95 * len(times))]:.0f} ms, longest {times[-1]:.0f} ms ({len(times)} moves)")


if __name__ == "__main__":
    main()
