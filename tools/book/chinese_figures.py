"""Draw the figures of docs/ a second time, with the Chinese words of docs/zh/labels.json, into
docs/figures/zh/.
"""

import pickle
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib import font_manager, rcParams
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator

from tools.book.phrases import Phrases
from tools.records import ROOT

FIGURES = ROOT / "docs/figures/zh"
LABELS = ROOT / "docs/zh/labels.json"
FONT = "WenQuanYi Micro Hei"  # wqy-microhei.ttc


def save(fig, name, metadata):
    """Write a copy of a figure, with its words translated, to docs/figures/zh/NAME.

    Args:
        fig: matplotlib figure, already saved in English.
        name: name of the file.
        metadata: dict, of the file.

    Raises:
        PhraseError: the file lacks a word of the figure.
    """
    file = next(
        (path for path in font_manager.findSystemFonts() if Path(path).name == "wqy-microhei.ttc"),
        None,
    )
    if file is None:
        print(
            f"no Chinese figure: the font {FONT} is not installed: "
            "apt-get install fonts-wqy-microhei"
        )
        return
    # matplotlib's own list of fonts may be older than the font
    font_manager.fontManager.addfont(file)
    labels = Phrases(LABELS)
    fig = pickle.loads(pickle.dumps(fig))  # a notebook shows the English one after this
    axes = [axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)]
    fixed = [axis for axis in axes if isinstance(axis.get_major_locator(), FixedLocator)]
    ticks = [
        [labels.translate(text.get_text()) for text in axis.get_ticklabels()] for axis in fixed
    ]
    for artist in fig.findobj(Text):
        if artist.get_text().strip():
            artist.set_text(labels.translate(artist.get_text()))
    # an axis sets the words of its ticks when it draws
    for axis, names in zip(fixed, ticks, strict=True):
        axis.set_ticks(axis.get_majorticklocs(), names)
    for artist in fig.findobj(Text):
        artist.set_fontfamily([*rcParams["font.family"], FONT])
    FIGURES.mkdir(exist_ok=True)
    fig.savefig(FIGURES / name, metadata=metadata)
    plt.close(fig)
