"""Where the files that ship with the package lie."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """Return the path of a bundled file or folder.

    >>> data_path("cards.csv").name
    'cards.csv'

    The folder `data/` lies beside the package in a checkout (and in an editable install), and inside
    the package in a wheel. The path is returned whether or not the file exists; a missing `data/`
    folder raises FileNotFoundError.
    """
    for folder in (_PACKAGE / "data", _PACKAGE.parent / "data"):
        if (folder / "architectures").is_dir():
            return folder.joinpath(*parts)
    raise FileNotFoundError(
        f"the data folder of grpo_lab is missing: looked in {_PACKAGE / 'data'} and "
        f"{_PACKAGE.parent / 'data'}; install the package again"
    )
