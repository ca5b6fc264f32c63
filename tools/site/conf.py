"""Sphinx settings of the site.

make site builds it twice, in English into site/ and in Chinese into site/zh/.

The sources are the pages and notebooks as they stand in the repository. This file adds what
Markdown does not say: the order of the pages, pages that show linked code, a search for Chinese
words, and the language switch.
"""

import html
import json
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.search.zh import SearchChinese
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.osutil import relative_uri

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tools.book.chinese import chinese_page, translate_notebook
from tools.book.pages import notebooks

CHINESE = os.environ["SITE_LANGUAGE"] == "zh"
OTHER_SITE = "../" if CHINESE else "zh/"  # seen from the root of this site

project = "用多块 GPU 训练" if CHINESE else "Train on more than one GPU"
copyright = "the authors; MIT licence"
language = "zh_CN" if CHINESE else "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
smartquotes = False  # -- is a flag
nb_execution_mode = "off"  # the notebooks are stored with their charts
nb_code_prompt_show = "显示代码" if CHINESE else "Show the code"
nb_code_prompt_hide = "收起代码" if CHINESE else "Hide the code"
myst_heading_anchors = 6
# folders that are not searched for pages
exclude_patterns = [".*", "data", "site", "checkpoints", "results/.*"]
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["figures.js"]
html_theme = "pydata_sphinx_theme"
html_title = project
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # a browser does not let a page from disk read another page
html_context = {"default_mode": "auto"}  # light or dark, as the browser asks
html_sidebars = {"**": ["contents"]}
html_theme_options = {
    "logo": {"text": project},
    "navbar_center": [],
    "navbar_end": ["language", "theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
autodoc_member_order = "bysource"


# The pages, in the order of docs/README.md

README, CONTENTS, CONTRIBUTING = (
    ROOT / name for name in ("README.md", "docs/README.md", "CONTRIBUTING.md")
)
API, RESULTS = ROOT / "tools/site/api.md", ROOT / "results/README.md"  # in English on both sites
linked = dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)\)", CONTENTS.read_text()))
GROUPS = {
    ("The book", "教程"): [CONTENTS, *(CONTENTS.parent / name for name in linked)],
    ("Notebooks", "Notebook"): notebooks(),
    ("Reference", "参考"): [API, RESULTS, CONTRIBUTING],
}
PAGES = [README, *(page for pages in GROUPS.values() for page in pages)]


def docname(page, chinese=CHINESE):
    """Return Sphinx's name of a page in a language: its path without the suffix."""
    if chinese and page.suffix == ".md" and page not in (API, RESULTS):
        page = chinese_page(page)
    return str(page.relative_to(ROOT).with_suffix(""))


root_doc = docname(README)
include_patterns = [f"{docname(page)}{page.suffix}" for page in PAGES]


def add_contents(app, name, source):
    """Give the first page the table of contents, and the notebooks of the Chinese site Chinese
    words and charts.
    """
    if name == root_doc:
        for captions, pages in GROUPS.items():
            names = "\n".join(
                [*(f"/{docname(page)}" for page in pages), *(["genindex"] if API in pages else [])]
            )
            source[0] += (
                f"\n```{{toctree}}\n:hidden:\n:caption: {captions[CHINESE]}\n{names}\n```\n"
            )
    if CHINESE and name.startswith("notebooks/"):
        source[0] = translate_notebook(source[0], Path(name).name)


def fold_code(app, name, source):
    """Fold the code of the notebooks that draw charts. A click unfolds it."""
    if name.startswith("notebooks/") and name != "notebooks/kaggle":
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["metadata"]["tags"] = ["hide-input"]
        source[0] = json.dumps(notebook)


# The language switch


def in_other_language(name):
    """Return the address of a page in the other language, from the root of this language's site."""
    page = next((page for page in PAGES if docname(page) == name), None)
    # pages of code, and the search, have the same name
    other = docname(page, not CHINESE) if page else name
    return f"{OTHER_SITE}{other}.html"


def language_switch(app, name, template, context, doctree):
    context["other_language"] = "../" * name.count("/") + in_other_language(name)
    context["other_name"] = "English" if CHINESE else "中文"


# Links to files that are not pages of this site


class LinkFiles(SphinxPostTransform):
    """Let a link to a file or a folder lead to a page that shows it, and a link to a page of the
    other site there.
    """

    default_priority = 5  # before Sphinx copies linked files and resolves links

    def run(self):
        name = self.env.docname
        for kind in (addnodes.download_reference, addnodes.pending_xref):
            for node in list(self.document.findall(kind)):
                target = node.get("reftarget", "")
                path = Path(os.path.normpath((ROOT / name).parent / target))
                if node.get("refdomain") == "doc" and target not in self.env.all_docs:
                    link = f"{'../' * name.count('/')}{OTHER_SITE}{target}.html"
                elif (
                    node.get("refdomain") != "doc"
                    and path.exists()
                    and path != ROOT
                    and path.suffix not in (".md", ".ipynb")
                ):
                    self.app.shown_files |= {path, *(files(path) if path.is_dir() else ())}
                    page = f"code/{path.relative_to(ROOT)}.html"
                    link = relative_uri(self.app.builder.get_target_uri(name), page)
                else:
                    continue
                node.replace_self(
                    nodes.reference("", "", *node.children, refuri=link, internal=True)
                )


def files(folder):
    return sorted(path for path in folder.iterdir() if path.is_file())


def show_files(app):
    """Yield a page for each linked file, and one that leads from the site's address to its first
    page.
    """
    yield "index", {"first": f"{root_doc}.html"}, "index.html"
    for path in sorted(app.shown_files):
        name = str(path.relative_to(ROOT))
        if path.is_dir():
            links = (
                f'<li><a href="{path.name}/{p.name}.html">{html.escape(p.name)}</a></li>'
                for p in files(path)
            )
            body = f"<ul>{''.join(links)}</ul>"
        else:
            language = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}.get(
                path.suffix, "text"
            )
            body = app.builder.highlighter.highlight_block(path.read_text(), language)
        yield (
            f"code/{name}",
            {"title": name, "body": f"<h1>{html.escape(name)}</h1>{body}"},
            "page.html",
        )


# Search


class IndexErrors(SphinxTransform):
    """List the error texts in the headings of the troubleshooting page in the index."""

    default_priority = 500

    def apply(self):
        if Path(self.env.docname).name != "troubleshooting":
            return
        for section in list(self.document.findall(nodes.section)):
            texts = [literal.astext() for literal in section[0].findall(nodes.literal)]
            entries = [
                ("single", text.replace(";", ","), section["ids"][0], "", None) for text in texts
            ]
            section.insert(1, addnodes.index(entries=entries))


class Chinese(SearchChinese):
    """Split Chinese text into words with jieba, and a query into words of the index.

    The browser has no dictionary. It takes, from the left, the longest word of the query that the
    index has.
    """

    # Of the stemmer that the browser runs; Sphinx 9 looks for one named Chinese, and has none.
    language_name = "English"
    js_splitter_code = (HERE / "split_query.js").read_text()


# The API page


def literal_blocks(app, what, name, obj, options, lines):
    """Show the indented blocks of a module's docstring as they stand."""
    for k in range(len(lines) - 1, 0, -1) if what == "module" else ():
        if lines[k].startswith("    ") and not lines[k - 1]:
            lines[k:k] = ["::", ""]


def setup(app):
    app.shown_files = set()
    app.add_transform(IndexErrors)
    app.add_post_transform(LinkFiles)
    app.connect("source-read", add_contents)
    app.connect("source-read", fold_code)
    app.connect("html-page-context", language_switch)
    app.connect("html-collect-pages", show_files)
    app.connect("autodoc-process-docstring", literal_blocks)
    if CHINESE:
        app.add_search_language(Chinese)
