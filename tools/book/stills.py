"""Draw the stills in docs/figures/: frames of docs/see/ as a browser shows them.

    python tools/book/stills.py

Each still keeps the text that it shows, so that a test can tell when it is no longer the page's.
"""

import contextlib
import io
import shutil
import sys
from pathlib import Path

from PIL import Image, PngImagePlugin

ROOT = Path(__file__).resolve().parents[2]
STILLS = {"step": "step/ddp/8", "ring": "ring/ring/20", "fsdp": "fsdp/fsdp/11"}
LANGUAGES = {"en": ROOT / "docs/figures", "zh": ROOT / "docs/figures/zh"}
SIZE = {"viewport": {"width": 1000, "height": 800}, "device_scale_factor": 1.5}
# Without what a picture cannot do, and without times, which differ in each recording.
STYLE = """
header, h1, h2, #intro, #about, #scenes, #switches, #controls, #run, #fit, #scale { display: none }
.lane small { display: none }
#note { min-height: 0 }
#code { max-height: 27em; overflow: hidden }
#scene { padding: 8px }
"""


@contextlib.contextmanager
def browser(**options):
    """Yield an empty page of Chromium. The options are those of playwright's new_page()."""
    from playwright.sync_api import sync_playwright  # only in the environment that builds the site

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("stills.py: error: found no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running.new_page(**options)
        running.close()


def show(page, name, language):
    """Show the frame of a still. Returns its text."""
    page.goto(f"file://{ROOT}/docs/see/index.html#{STILLS[name]}/{language}")
    page.reload()  # a change of the part after # loads nothing
    page.add_style_tag(content=STYLE)
    return page.inner_text("#scene")


def main():
    with browser(**SIZE) as page:
        for language, folder in LANGUAGES.items():
            for name in STILLS:
                text = show(page, name, language)
                picture = Image.open(io.BytesIO(page.locator("#scene").screenshot()))
                notes = PngImagePlugin.PngInfo()
                notes.add_itxt("Shows", text)
                few = picture.convert("RGB").quantize(64)  # a fifth of the size
                few.save(folder / f"{name}.png", pnginfo=notes, optimize=True)
                print(f"drew {(folder / name).relative_to(ROOT)}.png")


if __name__ == "__main__":
    main()
