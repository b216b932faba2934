"""A figure that a notebook shows together with the words for it.

>>> picture = Picture(figsize=(2, 1))
>>> picture.alt = "an empty picture"
>>> data, metadata = picture._repr_mimebundle_()
>>> sorted(data), data["text/plain"], metadata["image/png"]["alt"]
(['image/png', 'text/html', 'text/plain'], 'an empty picture', 'an empty picture')
"""

from __future__ import annotations

import base64
import html
import io
from typing import Any

from matplotlib.figure import Figure

KiB, MiB, GiB = 2**10, 2**20, 2**30
INK, GREY, RED = "#222222", "#6E6E6E", "#B00020"
LINE = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.3}
SLANTED = {"color": INK, "fontsize": 9, "fontstyle": "italic"}
PAPER = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.2}  # behind words over a picture
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
}


class Picture(Figure):
    """A matplotlib `Figure` with `alt`, the sentence that says what it shows.

    As the last line of a cell, or through `show`, a notebook gets the picture with that text. All else is
    matplotlib's: `picture.savefig("name.png")`, `picture.axes`.
    """

    alt: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        return bundle(self, self.alt)


def show(picture: Figure, alt: str | None = None) -> None:
    """Display a figure with alternative text, anywhere in a cell.

    `alt` defaults to the picture's own; any other matplotlib figure needs one (ValueError without).
    """
    from IPython.display import display

    alt = alt or getattr(picture, "alt", "")
    if not alt:
        raise ValueError("this figure has no alternative text: pass show(figure, alt='what it shows')")
    data, metadata = bundle(picture, alt)
    display(data, metadata=metadata, raw=True)


def size(n: float) -> str:
    """Bytes as people read them.

    >>> size(5 * 2**30), size(3 * 2**19), size(512)
    ('5.00 GiB', '1.50 MiB', '512 B')
    """
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if n >= unit:
            return f"{n / unit:.2f} {name}"
    return f"{n:.0f} B"


def bundle(figure: Figure, alt_text: str, dpi: int = 144) -> tuple[dict, dict]:
    """Return display data and metadata: HTML, as JupyterLab drops a bare PNG's text, and the PNG."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    image = Image.open(raw).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(small, "png", optimize=True)  # a third of the bytes
    png = base64.b64encode(small.getvalue()).decode("ascii")
    width = image.width * 96 // dpi
    tag = f'<img alt="{html.escape(alt_text)}" width="{width}" src="data:image/png;base64,{png}">'
    metadata = {"image/png": {"alt": alt_text, "width": width}}
    return {"text/plain": alt_text, "image/png": png, "text/html": tag}, metadata
