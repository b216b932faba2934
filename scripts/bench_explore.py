"""How long the explorer takes to redraw after a control moved: ``python scripts/bench_explore.py``.

Every control is moved through its options; the time is from the move to the last part's new text, in this process.
"""

from __future__ import annotations

import statistics
import time

from grpo_lab import Recipe, explore


def main() -> None:
    made = explore(Recipe.preset("laptop_8gb"))
    times = []
    for control in made.controls.values():
        start = control.value
        options = [value for _, value in control.options] if hasattr(control, "options") else range(
            control.min, control.max, max(control.step, (control.max - control.min) // 20 // control.step * control.step))
        for value in [*options, start]:
            began = time.perf_counter()
            control.value = value
            times.append(time.perf_counter() - began)
    times = sorted(1e3 * seconds for seconds in times if seconds > 1e-4)
    print(f"redraw: median {statistics.median(times):.0f} ms, 95 % below {times[int(0.95 * len(times))]:.0f} ms "
          f"({len(times)} moves)")


if __name__ == "__main__":
    main()
