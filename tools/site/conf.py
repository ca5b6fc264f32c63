"""Sphinx settings of the site.

make site builds it twice, in English into site/ and in Chinese into site/zh/. The sources are the
pages and notebooks as they stand in the repository.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes
from sphinx import addnodes
from sphinx.search.en import SearchEnglish
from sphinx.transforms.post_transforms import SphinxPostTransform

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEE = ROOT / "docs/see"
sys.path.insert(0, str(ROOT))

from tools.book.chinese import translate_notebook
from tools.book.pages import SEE_LINK, chinese_page, notebooks

CHINESE = os.environ["SITE_LANGUAGE"] == "zh"
OTHER_SITE = "../" if CHINESE else "zh/"  # seen from the root of this site
# Where the site is published, if known: a page for all wrong addresses cannot have relative links.
ADDRESS = os.environ.get("SITE_ADDRESS", "").rstrip("/") + ("/zh/" if CHINESE else "/")

project = "用多块 GPU 训练" if CHINESE else "Train on more than one GPU"
copyright = "the authors; MIT licence"
language = "zh_CN" if CHINESE else "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["notfound.extension", "sphinxext.opengraph"]
smartquotes = False  # -- is a flag
nb_execution_mode = "off"  # the notebooks are stored with their charts
nb_render_markdown_format = "myst"  # has tables
nb_code_prompt_show = "显示代码" if CHINESE else "Show the code"
nb_code_prompt_hide = "收起代码" if CHINESE else "Hide the code"
myst_heading_anchors = 6
# folders that are not searched for pages
exclude_patterns = [".*", "data", "site", "checkpoints", "results/.*"]
templates_path = ["_templates"]
html_additional_pages = {"index": "index.html"}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["figures.js", "pasted_error.js", "scene.js", "found_section.js"]
html_theme = "pydata_sphinx_theme"
html_title = project
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # a browser does not let a page from disk read another page
html_context = {"default_mode": "auto"}  # light or dark, as the browser asks
html_sidebars = {"**": ["contents"]}
html_theme_options = {
    "navbar_start": ["home"],
    "navbar_center": [],
    "navbar_end": ["language", "theme-switcher"],
    "article_header_start": [],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
autodoc_member_order = "bysource"
notfound_urls_prefix = urlsplit(ADDRESS).path
notfound_context = {"title": "404", "body": "<h1>Page not found · 没有此页</h1>"}
ogp_site_url = ADDRESS
ogp_image = "_images/step_in_time.gif"
ogp_social_cards = {"enable": False}

# The pages, in the order of docs/README.md
README, CONTENTS, CONTRIBUTING = (
    ROOT / name for name in ("README.md", "docs/README.md", "CONTRIBUTING.md")
)
API, RESULTS = ROOT / "tools/site/api.md", ROOT / "results/README.md"  # in English on both sites


def sections():
    """Return {(English heading, Chinese heading): pages} of the sections of docs/README.md."""
    found = {}
    texts = [page.read_text().split("\n## ")[1:] for page in (CONTENTS, chinese_page(CONTENTS))]
    for both in zip(*texts, strict=True):
        headings = tuple(text.partition("\n")[0] for text in both)
        names = dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)\)", both[0]))
        if names:
            first = [] if found else [CONTENTS]
            found[headings] = first + [CONTENTS.parent / name for name in names]
    return found


GROUPS = sections()
GROUPS[("Notebooks", "Notebook")] = notebooks()
GROUPS[("Reference", "参考")] = [API, RESULTS, CONTRIBUTING]
PAGES = [README, *(page for pages in GROUPS.values() for page in pages)]


def docname(page, chinese=CHINESE):
    """Return Sphinx's name of a page in a language: its path without the suffix."""
    if chinese and page.suffix == ".md" and page not in (API, RESULTS):
        page = chinese_page(page)
    return str(page.relative_to(ROOT).with_suffix(""))


root_doc = docname(README)
include_patterns = [f"{docname(page)}{page.suffix}" for page in PAGES]


def change_source(app, name, source):
    """Add the contents to the first page; translate notebooks, and fold their code."""
    # MyST would make a download of a link to the page of recorded runs. The site needs no clone.
    source[0] = SEE_LINK.sub(r'<a href="\2">\1</a>', source[0])
    source[0] = re.sub(r"\n---\n\n(.+\n)+\Z", "", source[0])  # before, next: the theme has its own
    if name == root_doc:
        for captions, pages in GROUPS.items():
            names = "\n".join(f"/{docname(page)}" for page in pages)
            names += "\ngenindex" if API in pages else ""
            source[0] += (
                f"\n```{{toctree}}\n:hidden:\n:caption: {captions[CHINESE]}\n{names}\n```\n"
            )
    if name.startswith("notebooks/"):
        text = translate_notebook(source[0], Path(name).name) if CHINESE else source[0]
        notebook = json.loads(text)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code" and name != "notebooks/kaggle":
                cell["metadata"]["tags"] = ["hide-input"]
        source[0] = json.dumps(notebook)


def add_language_switch(app, name, template, context, doctree):
    """Tell the templates the address of a page in the other language."""
    names = {docname(page): docname(page, not CHINESE) for page in PAGES}  # the search has one name
    context["other_language"] = f"{OTHER_SITE}{names.get(name, name)}.html"
    context["other_name"] = "English" if CHINESE else "中文"


class LinkOtherSite(SphinxPostTransform):
    """Lead a link to a page in the other language there. A link to a folder becomes text."""

    default_priority = 5  # before MyST resolves links

    def run(self):
        name = self.env.docname
        for node in list(self.document.findall(addnodes.pending_xref)):
            target = node["reftarget"]
            if node["refdomain"] == "doc" and target not in self.env.all_docs:
                address = f"{'../' * name.count('/')}{OTHER_SITE}{target}.html"
                node.replace_self(nodes.reference("", "", *node.children, refuri=address))
            elif node["reftype"] == "myst" and ((ROOT / name).parent / target).is_dir():
                node.replace_self(node.children)


class SearchPairs(SearchEnglish):
    """Search Chinese text by pairs of characters: the browser has no dictionary of words."""

    lang = "zh"
    js_splitter_code = (HERE / "split_query.js").read_text()

    def split(self, text):
        characters = r"[\u4e00-\u9fff]+"
        words = super().split(re.sub(characters, " ", text))
        for part in re.findall(characters, text):
            words += [part[k : k + 2] for k in range(max(1, len(part) - 1))]
        return words


def show_blocks(app, what, name, obj, options, lines):
    """Show the indented blocks of a module's docstring as they stand."""
    for k in range(len(lines) - 1, 0, -1) if what == "module" else ():
        if lines[k].startswith("    ") and not lines[k - 1]:
            lines[k:k] = ["::", ""]


def copy_recorded_runs(app, error):
    """Copy the page of recorded runs, which needs no Sphinx."""
    shutil.copytree(SEE, Path(app.outdir) / SEE.relative_to(ROOT), dirs_exist_ok=True)


def setup(app):
    app.connect("build-finished", copy_recorded_runs)
    app.add_post_transform(LinkOtherSite)
    app.connect("source-read", change_source)
    app.connect("html-page-context", add_language_switch)
    app.connect("autodoc-process-docstring", show_blocks)
    if CHINESE:
        app.add_search_language(SearchPairs)
