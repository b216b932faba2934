"""What holds for every test, also for the doctests in grpo_lab/ and for the notebooks."""

import os

# Offline, so that no test passes thanks to a hub. Set before a library reads them, and inherited by kernels.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# Progress bars would be stored in notebooks' outputs and compared.
os.environ.setdefault("TQDM_DISABLE", "1")
# Two threads beside a busy core are slower than one, and rounding then depends on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
