"""The pages of the book, in both languages."""

import re

from tools.records import ROOT

# A generated block: <!-- KIND: ARGUMENT -->, what tools/book/book.py generates, <!-- end -->
BLOCK = re.compile(r"^(<!-- (?!only)(\w+): (.+?) -->\n)(.*?)^(<!-- end -->)$", re.M | re.S)
# What only the readers of a Chinese page need. It has no English passage.
ONLY_CHINESE = re.compile(r"^<!-- only: zh -->$.*?^<!-- end -->$", re.M | re.S)

# A link to docs/see/, and what stands behind it, since a code host shows the source of such a page
SEE_LINK = re.compile(
    r"\[([^]]+)\]\(([^\s)]*see/index\.html[^\s)]*)\)"
    r"(\s\(open\sit\sfrom\syour\sclone\)|（从克隆的仓库里打开）)?"
)


def pages():
    """Return the English pages."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def notebooks():
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def chinese_page(page):
    """Return the path of the translation of an English page, or of the text of a notebook."""
    if page.suffix == ".ipynb":
        return ROOT / f"docs/zh/notebooks/{page.stem}.md"
    return ROOT / "README.zh-CN.md" if page == ROOT / "README.md" else ROOT / "docs/zh" / page.name


def chinese_pages():
    """Return the Chinese pages, without the texts of the notebooks."""
    return [chinese_page(page) for page in pages()]
