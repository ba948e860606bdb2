"""The style of figures: sizes, colours, lines and legends for papers.

Lines differ in colour, dash pattern and marker, so that people who are colour-blind can distinguish them, also in a
print without colours. Colours are those of Okabe and Ito (2008, "Color Universal Design"), with grey in place of
yellow, which is too light for a line on white.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

Columns: TypeAlias = Literal[1, 2]
"""The width of a figure: one or two columns of a paper."""

WIDTHS: dict[Columns, float] = {1: 3.5, 2: 7.16}
"""Inches, as in papers of IEEE; other publishers differ by a few per cent."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00", "#8C8C8C")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.8)), (0, (1.2, 1.2)), (0, (6, 1.6, 1.2, 1.6)), (0, (9, 2.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
THIN_MARKERS = ("P", "X")
"""Markers that need a larger size to be visible."""
DPI = 250
"""Of PNG files, and of text sizes while a figure is laid out."""
COMPRESSION = 4
"""Of PNG files. The default of the library, 6, takes twice as long for heat maps of many nodes."""
NEUTRAL = "#666666"
"""The colour of what belongs to all lines."""
MISSING = "#ffffff"
"""The colour of cells without a value."""
LABEL_LINES = 3
"""A longer label is shortened."""

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7.5,
    "legend.title_fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.35,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.2,
    "pdf.fonttype": 42,  # TrueType: embedded, and text can be selected; publishers reject Type 3
    "ps.fonttype": 42,
    "svg.hashsalt": "shoal",  # by default, the ids in a file are random
}


@dataclass(frozen=True)
class LineStyle:
    """How one line is drawn."""

    colour: str
    dash: Any
    marker: str

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for a line of matplotlib."""
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.4}
        size = STYLE["lines.markersize"] * (1.35 if self.marker in THIN_MARKERS else 1)
        return {"markersize": size, "color": self.colour, "linestyle": self.dash, "marker": self.marker, **edge}


def line_style(number: int) -> LineStyle:
    """Return the style of the line with this number. The first 360 styles differ."""
    return LineStyle(
        COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]
    )  # fmt: skip


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the style of Shoal's figures. The settings of the caller are restored afterwards."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(columns: Columns, height: float) -> Figure:
    """Return an empty figure of this width and height in inches.

    It does not belong to `pyplot`: it changes no backend and need not be closed. Notebooks display it.
    """
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=130)
            return picture.getvalue()

    figure = NotebookFigure(figsize=(WIDTHS[columns], height), dpi=DPI, layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.03, h_pad=0.03)  # type: ignore[call-arg]
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the ending of the name. The same figure gives the same file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    path.parent.mkdir(parents=True, exist_ok=True)
    with styled():
        if path.suffix in undated:
            figure.savefig(path, dpi=DPI, metadata=undated[path.suffix])
        else:
            # `savefig` would draw the figure twice: the first time for its layout.
            canvas: Any = FigureCanvasAgg(figure)
            canvas.print_png(path, pil_kwargs={"compress_level": COMPRESSION})


def plain_text(text: str) -> str:
    """Return text that matplotlib draws as it is: no mathematics, no control characters, never hidden."""
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return (f" {shown}" if shown.startswith("_") else shown).replace("$", r"\$")


def add_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], title: str | None = None) -> None:
    """Add a legend above all axes, with as few rows as fit. The figure grows by its height: it covers no data."""
    width = int((figure.get_figwidth() * 72 - 50) / (0.5 * STYLE["legend.fontsize"]))
    wrapped = [_wrapped(label, width) for label in labels]
    rows = 1
    while True:
        legend = _legend(figure, handles, wrapped, -(-len(handles) // rows), title)
        size = legend.get_window_extent()
        if rows == len(handles) or size.width <= 0.97 * figure.bbox.width:
            break
        legend.remove()
        rows += 1
    figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)


def _legend(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], columns: int, title: str | None
) -> Legend:
    return figure.legend(
        handles, labels, loc="outside upper center", ncols=columns, title=title, frameon=False, handlelength=2.8,
        columnspacing=1.4, handletextpad=0.6, labelspacing=0.35, borderpad=0.2, borderaxespad=0.2,
    )  # fmt: skip


def _wrapped(label: str, width: int) -> str:
    lines = textwrap.wrap(label, width) or [""]
    if len(lines) > LABEL_LINES:
        lines[LABEL_LINES - 1] = f"{lines[LABEL_LINES - 1][: width - 1]}…"
    return "\n".join(map(plain_text, lines[:LABEL_LINES]))
