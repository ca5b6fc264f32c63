"""The site: built by make site, and opened from disk in a browser."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import quote, unquote

import pytest
from columns import columns
from needs import need
from processes import ROOT

from tools.book.pages import chinese_page, notebooks, pages

pytestmark = pytest.mark.slow
WIDTHS = (1280, 390)  # pixels: a desktop and a phone


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a new site."""
    absent = [name for name in ("sphinx", "playwright") if importlib.util.find_spec(name) is None]
    need(f"not installed: {', '.join(absent)} (make .venv/ready-site)" if absent else None)
    need(None if shutil.which("chromium") else "not installed: chromium (apt-get install chromium)")
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"VIRTUAL_ENV": sys.prefix}
    end = subprocess.run(
        ["make", "site", f"SITE={folder}"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert end.returncode == 0 and "WARNING" not in end.stderr, end.stdout + end.stderr
    return folder


@pytest.fixture(scope="module")
def browser(site):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )


@pytest.fixture
def tab(browser):
    """A function width -> page, whose .problems are errors of the console and requests that fail or
    leave the disk.
    """
    contexts = []

    def opened(width=WIDTHS[0], **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.problems = []
        page.on(
            "console",
            lambda message: (
                message.type in ("error", "warning") and page.problems.append(message.text)
            ),
        )
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("requestfailed", lambda request: page.problems.append(f"failed: {request.url}"))
        page.on(
            "request",
            lambda request: leaves_disk(request.url) and page.problems.append(request.url),
        )
        return page

    yield opened
    for context in contexts:
        context.close()


def leaves_disk(address):
    return not address.startswith(("file:", "data:", "blob:"))


def built(page):
    """The file of a page of the book on the site, in the language of the page."""
    name = str(page.relative_to(ROOT).with_suffix(".html"))
    return f"zh/{name}" if page.suffix == ".md" and page not in pages() else name


def go(tab, site, name):
    tab.goto(f"file://{site}/{name}")
    tab.wait_for_function("document.documentElement.dataset.theme != 'auto'")


BOOK = [built(page) for english in pages() for page in (english, chinese_page(english))]
NOTEBOOKS = [
    f"{folder}notebooks/{path.stem}.html"
    for folder in ("", "zh/")
    for path in ROOT.glob("notebooks/*.ipynb")
]


# Every page


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_has_an_error_or_a_broken_picture(site, tab, width):
    """No page has an error a broken picture or sideways scrolling."""
    page = tab(width)
    found = []
    shown = [
        *BOOK,
        *NOTEBOOKS,
        "tools/site/api.html",
        "genindex.html",
        "code/06_imagenet.py.html",
        "code/launch.html",
    ]
    for name in shown:
        go(page, site, name)
        wide, broken, cut = page.evaluate("""() => [
            document.documentElement.scrollWidth - innerWidth,
            [...document.images].filter(image => image.complete && !image.naturalWidth)
                .map(image => image.src),
            [...document.querySelectorAll(
                "article pre, article table, article img, article p code"
            )].filter(box => {
                for (let parent = box; parent.tagName != "ARTICLE"; parent = parent.parentElement) {
                    const overflow = getComputedStyle(parent).overflowX;
                    if (["auto", "scroll"].includes(overflow)) return false;
                }
                const room = box.closest("article").getBoundingClientRect();
                return box.getBoundingClientRect().right > room.right + 1;
            }).map(box => box.textContent.slice(0, 40)),
        ]""")
        found += [
            f"{name}: {width} pixels: {what}"
            for what in (wide > 0 and f"{wide} too wide", broken, cut)
            if what
        ]
        found += [f"{name}: {problem}" for problem in page.problems]
        page.problems.clear()
    assert not found, "\n".join(found)


def test_code_of_100_columns_fits_beside_the_contents(site, tab):
    page = tab(1280)
    found = []
    for name in [*BOOK, "code/06_imagenet.py.html"]:
        go(page, site, name)
        cut = page.evaluate("""() => [...document.querySelectorAll("article pre")]
            .filter(box => box.scrollWidth > box.clientWidth)
            .map(box => box.textContent.split("\\n").map(line => line.trimEnd()))""")
        found += [f"{name}: {lines[0]}" for lines in cut if max(map(columns, lines)) <= 100]
        assert page.is_visible("nav.bd-links") or name.startswith("code/"), name
    assert not found, "\n".join(found)


class Links(HTMLParser):
    """The addresses in a page, and the names that links can lead to."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.names = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.addresses += [given[name] for name in ("href", "src") if given.get(name)]
        self.names.add(given.get("id"))


def test_every_link_of_the_site_leads_to_a_file_and_a_heading(site):
    shown = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    parsed = {path: Links(path.read_text()) for path in shown}
    found = []
    for path, links in parsed.items():
        for address in links.addresses:
            if re.match(r"https?:|data:|mailto:|javascript:", address):
                continue
            file, _, anchor = unquote(address).partition("#")
            there = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not there.is_file():
                found.append(f"{path.relative_to(site)}: {address}: no such file")
            elif anchor and there in parsed and anchor not in parsed[there].names:
                found.append(f"{path.relative_to(site)}: {address}: no such heading")
    assert not found, "\n".join(found)


def test_the_pages_of_the_ladder_follow_each_other(site):
    for folder, docs in (("", "docs"), ("zh/", "docs/zh")):
        chapters = sorted(path.stem for path in ROOT.glob("docs/0*.md"))
        names = [f"{name}.html" for name in ("README", "ddp-in-12-lines", *chapters)]
        for name, after in itertools.pairwise(names):
            text = (site / folder / docs / name).read_text()
            assert re.search(rf'class="right-next"\s+href="{after}"', text), f"{folder}{name}"


# Search


def results(page, site, folder, query):
    """The addresses that a search finds, best first."""
    page.goto(f"file://{site}/{folder}search.html?q={quote(query)}")
    page.wait_for_selector("#search-results .search-summary:not(:empty)")
    return [
        link.get_attribute("href")
        for link in page.query_selector_all("#search-results ul.search a")
    ]


def test_a_search_for_any_error_text_finds_troubleshooting(site, tab):
    texts = re.findall(r"^### .*?`([^`\n]+)`", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(texts) > 20
    page = tab()
    for folder, there in (
        ("", "docs/troubleshooting.html"),
        ("zh/", "docs/zh/troubleshooting.html"),
    ):
        for text in texts:
            assert any(link.startswith(there) for link in results(page, site, folder, text)), (
                f"{folder}: {text}"
            )


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("rank", "docs/concepts.html"),
        ("gradient accumulation", "docs/concepts.html"),
        ("requeue", "docs/slurm.html"),
        ("梯度累积", "docs/zh/concepts.html"),
        ("检查点", "docs/zh/elastic.html"),
        ("学习率", "docs/zh/concepts.html"),
        ("rank", "docs/zh/concepts.html"),
        ("节点由 Slurm 选择", "docs/zh/slurm.html"),
    ],
)
def test_a_search_for_a_term_finds_its_page(site, tab, query, expected):
    folder = "zh/" if "/zh/" in expected else ""
    found = results(tab(), site, folder, query)
    assert expected in [link.partition("#")[0] for link in found], found
    assert (site / folder / expected).is_file()


# Figures and notebooks


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["docs/syncbn.html", "zh/docs/zh/syncbn.html"])
def test_a_figure_opens_large_and_closes(site, tab, name, width):
    page = tab(width)
    go(page, site, name)
    figure, large = page.locator("button.enlarge").first, page.locator("dialog img")
    small = figure.locator("img").bounding_box()["width"]
    figure.click()
    assert large.bounding_box()["width"] > 1.3 * small
    assert large.get_attribute("src") == figure.locator("img").get_attribute("src")
    page.keyboard.press("Escape")
    large.wait_for(state="hidden")
    figure.press("Enter")
    large.wait_for(state="visible")
    large.click()
    large.wait_for(state="hidden")
    assert not page.problems


@pytest.mark.parametrize("folder", ["", "zh/"])
def test_the_code_of_a_chart_is_folded(site, tab, folder):
    page = tab()
    for path in notebooks():
        go(page, site, f"{folder}notebooks/{path.stem}.html")
        code = page.locator("div.cell_input pre")
        shown = [code.nth(k).is_visible() for k in range(code.count())]
        assert shown and set(shown) == {path.stem == "kaggle"}, path.stem
    page.click("summary >> nth=0")
    assert code.first.is_visible()


# Switches, keyboard, buttons


@pytest.mark.parametrize(
    "name", ["README", "docs/03_mnmc_ddp_launch", "docs/slurm", "CONTRIBUTING", "notebooks/speed"]
)
def test_the_language_switch_stays_on_the_page(site, tab, name):
    page = tab()
    go(page, site, f"{name}.html")
    page.click("header >> text=中文 >> visible=true")
    english = ROOT / f"{name}.md"
    assert unquote(page.url).endswith(
        f"/zh/{name}.html" if not english.exists() else built(chinese_page(english))
    )
    assert page.get_attribute("html", "lang") == "zh-CN"
    page.click("header >> text=English >> visible=true")
    assert page.url.endswith(f"{site}/{name}.html") and page.get_attribute("html", "lang") == "en"


def test_the_theme_switch_makes_the_page_dark(site, tab):
    """The theme switch makes the page dark and it stays dark on the next page."""
    page = tab(color_scheme="light")
    go(page, site, "docs/README.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.click("button.theme-switch-button >> visible=true")
    page.click("button[data-mode=dark] >> visible=true")
    page.wait_for_function("document.documentElement.dataset.theme == 'dark'")
    dark = page.evaluate(colour)
    assert dark != light
    go(page, site, "docs/concepts.html")
    assert page.evaluate(colour) == dark


def test_the_keyboard_alone_reaches_every_link_and_button(site, tab):
    page = tab()
    go(page, site, "docs/02_snmc_dp.html")
    wanted = page.evaluate("""() =>
        [...document.querySelectorAll("a[href], button, summary, input")]
            .filter(element => element.checkVisibility({visibilityProperty: true}))
            .filter(element => element.tabIndex >= 0)
            .map((element, k) => (element.dataset.number = k))""")
    reached = set()
    for _ in range(2 * len(wanted) + 50):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.number"))
    missing = [k for k in wanted if str(k) not in reached]
    shown = page.evaluate(
        "ks => ks.map(k => document.querySelector(`[data-number='${k}']`).outerHTML)", missing
    )
    assert not missing, shown


def test_a_search_needs_no_mouse(site, tab):
    page = tab()
    go(page, site, "docs/README.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("EADDRINUSE")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results ul.search a")
    assert "search.html?q=EADDRINUSE" in page.url


def test_a_copy_button_copies_a_command(site, tab):
    page = tab(permissions=["clipboard-read", "clipboard-write"])
    go(page, site, "docs/ddp-in-12-lines.html")
    block = page.locator("div.highlight-sh").first
    block.hover()
    block.locator("button.copybtn").click()
    page.wait_for_selector("button.copybtn.success")
    assert (
        page.evaluate("navigator.clipboard.readText()") == block.locator("pre").inner_text().strip()
    )


def test_the_site_shows_chinese_charts(site):
    text = (site / "zh/docs/zh/concepts.html").read_text()
    pictures = re.findall(r'src="([^"]+/ranks\d*\.png)"', text)
    assert pictures
    shown = (site / "zh/docs/zh" / pictures[0]).resolve().read_bytes()
    assert shown == (ROOT / "docs/figures/zh/ranks.png").read_bytes()


def test_the_notebooks_of_the_chinese_site_are_chinese(site):
    """The notebooks of the chinese site have chinese words and charts."""
    for path in notebooks():
        text = (site / f"zh/notebooks/{path.stem}.html").read_text()
        heading = re.search(r"^# (.+)$", chinese_page(path).read_text(), re.M)[1]
        assert f"<h1>{heading}" in text
        pictures = {
            (site / "zh/_images" / name).read_bytes()
            for name in re.findall(r'src="../_images/([^"]+)"', text)
        }
        names = re.findall(r'charts\.save\(fig, \\"(\w+)\\"\)', path.read_text())
        assert names or path.stem == "kaggle", "which draws what it records"
        assert pictures == {(ROOT / f"docs/figures/zh/{name}.png").read_bytes() for name in names}
