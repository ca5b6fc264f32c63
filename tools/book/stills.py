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
SIZE = {"viewport": {"width": 880, "height": 800}, "device_scale_factor": 1.5}
# The code above the ranks. Without what a picture cannot do, and without times, which differ in
# each recording.
STYLE = """
header, h1, h2, #intro, #about, #scenes, #switches, #controls, #run, #fit, #scale { display: none }
.lane small { display: none }
#note, .lane .does { min-height: 0 }
#stage { grid-template-columns: minmax(0, 1fr) }
#code { max-height: none }
#scene { padding: 8px }
"""
WITHOUT_MAIN = """() => {
    const lines = [...document.querySelectorAll("#code li")];
    const main = lines.findIndex(line => line.textContent.startsWith("def main"));
    lines.slice(main - 2).forEach(line => line.remove());
}"""
# The texts of the elements that are larger than the frame around them
CUT = """() => [...document.querySelectorAll("#scene *")].filter(element => {
    const scrolls = getComputedStyle(element).overflow !== "visible";
    const wide = element.scrollWidth > element.clientWidth;
    const high = element.scrollHeight > element.clientHeight;
    const [here, scene] = [element, document.querySelector("#scene")].map(
        element => element.getBoundingClientRect());
    return (scrolls && (wide || high)) || here.right > scene.right;
}).map(element => element.textContent)"""


@contextlib.contextmanager
def browser(**options):
    """Yield an empty page of Chromium. The options are those of playwright's new_page()."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("stills.py: error: playwright is not installed: pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("stills.py: error: found no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running.new_page(**options)
        running.close()


def show(page, name, language):
    """Show the frame of a still. Returns its text, and the texts that it cuts."""
    page.goto(f"file://{ROOT}/docs/see/index.html#{STILLS[name]}/{language}")
    page.reload()  # a change of the part after # loads nothing
    page.add_style_tag(content=STYLE)
    page.evaluate(WITHOUT_MAIN)
    return page.inner_text("#scene"), page.evaluate(CUT)


def main():
    with browser(**SIZE) as page:
        for language, folder in LANGUAGES.items():
            for name in STILLS:
                text, cut = show(page, name, language)
                if cut:
                    sys.exit(f"stills.py: error: {name}: the picture cuts this: {cut}")
                picture = Image.open(io.BytesIO(page.locator("#scene").screenshot()))
                notes = PngImagePlugin.PngInfo()
                notes.add_itxt("Shows", text)
                few = picture.convert("RGB").quantize(64)  # a fifth of the size
                few.save(folder / f"{name}.png", pnginfo=notes, optimize=True)
                print(f"drew {(folder / name).relative_to(ROOT)}.png")


if __name__ == "__main__":
    main()
