"""Which tests are skipped where they cannot run, each with its reason."""

import os
import shutil

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The browser for the browser tests: $CHROMIUM, or the first of the usual names on the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = ", ".join(CHROMIUM)
    missing = {}
    if "network" not in config.option.markexpr:
        missing["network"] = "needs a network: ask for it with -m network"
    if not chromium():
        missing["browser"] = f"no Chromium found: set CHROMIUM to one, or install one of {names}"
    if not _has_cuda(items):
        missing["gpu"] = "needs CUDA"
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda(items: list[pytest.Item]) -> bool:
    if not any(item.get_closest_marker("gpu") for item in items):
        return True  # nobody asks: spare the import
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def chromium_path() -> str | None:
    return chromium()
