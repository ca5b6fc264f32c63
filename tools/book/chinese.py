"""Keep the Chinese edition in step with the English one.

    python tools/book/chinese.py                     name each stale Chinese passage
    python tools/book/chinese.py --done FILE         after you have looked: note those of a page
    python tools/book/chinese.py --done FILE:LINE    only the passage that begins there
    python tools/book/chinese.py --done FILE --same  also if the Chinese is that of the last commit

A passage is a heading, a paragraph, a list item or a row of a table. Each English passage has one
Chinese passage, in the same order, with the same code, numbers, links and pictures. Code blocks are
equal, with the comments that docs/zh/comments.json translates; generated blocks come from the same
source. A Chinese page may also hold blocks of its own, from <!-- only: zh --> to <!-- end -->.
docs/zh/in_step.json holds a hash of each English passage as it was when its translation was last
looked at. The words of generated tables and of pictures are in docs/zh/tables.json and labels.json.
docs/zh/terms.json holds words that the Chinese edition does not use, and what stands instead. A
label is joined to its explanation by a colon, and few reasons follow their result (see LIMITS).
"""

import base64
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.flags import Parser
from tools.book import comments
from tools.book.pages import BLOCK, ONLY_CHINESE, chinese_page, notebooks, pages
from tools.records import ROOT

HASHES, FIGURES = ROOT / "docs/zh/in_step.json", ROOT / "docs/figures"
TERMS = ROOT / "docs/zh/terms.json"
LIMITS = {"，因为": 5, "所以": 5}  # in 10,000 Chinese characters of a page; one more is no habit
LABEL = re.compile(r"(\*\*[^*]+\*\*[，。]|\[[^]]+\]\([^)]+\)，)")
CELL = "<!-- cell: {} -->"  # stands before the text of each Markdown cell of a notebook


def english_pages():
    return [*pages(), *notebooks()]


# Passages


class Passage(NamedTuple):
    """kind: the element and the lists it stands in, such as "li/p" or "h2"; line: its first line,
    from 1.
    """

    kind: str
    text: str
    line: int


@functools.cache
def passages(text):
    """Return the passages and code blocks of a page, without those that only Chinese readers need.

    A generated block counts as its first line.
    """

    def keep_lines(match):
        return match[1] + re.sub(r".+", "", match[4]) + match[5]

    text = ONLY_CHINESE.sub(lambda match: re.sub(r".+", "", match[0]), text)
    found = []
    around = []
    line = 0
    for token in MarkdownIt("commonmark").enable("table").parse(BLOCK.sub(keep_lines, text)):
        line = token.map[0] + 1 if token.map else line
        if token.nesting == 1:
            around.append(token.tag)
            if token.tag == "tr":
                found.append(Passage("tr", "", line))
        elif token.nesting == -1:
            around.pop()
        elif token.type == "inline" and found and found[-1].kind == "tr" and "tr" in around:
            found[-1] = found[-1]._replace(text=f"{found[-1].text} | {token.content}")
        elif token.type in ("inline", "fence", "code_block", "html_block"):
            kind = "/".join(around) if token.type == "inline" else token.type
            found.append(Passage(kind, f"{token.info}\n{token.content}".strip(), line))
    return found


def read(page):
    """Return the text of a page; of a notebook, its Markdown cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = [
        cell for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "markdown"
    ]
    return (
        "\n\n".join(f"{CELL.format(cell['id'])}\n\n{''.join(cell['source'])}" for cell in cells)
        + "\n"
    )


def is_prose(passage):
    return passage.kind not in ("fence", "code_block", "html_block") or "<summary>" in passage.text


def digest(passage):
    """Return a hash of the words of a passage. Line breaks do not count."""
    return hashlib.sha256(" ".join(passage.text.split()).encode()).hexdigest()[:8]


# What must be equal in both languages


def slugs(page):
    """Return the anchors that a code host makes of the headings of a page.

    Those of a block that only Chinese readers need come last, since they have no English heading.
    """
    text = read(page)
    headings = [passage.text for passage in passages(text) if re.fullmatch(r"h\d", passage.kind)]
    headings += re.findall(r"^#+ (.+)$", "\n".join(ONLY_CHINESE.findall(text)), re.M)
    found = []
    for heading in headings:
        heading = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def target(link, page):
    """Return the file to which a link on a page leads, and the number of the heading there, or
    None.
    """
    file, _, anchor = link.partition("#")
    path = Path(os.path.normpath(page.parent / file)) if file else page
    if path.suffix != ".md" or not anchor:
        return path, None
    return path, slugs(path).index(anchor) if path.exists() and anchor in slugs(path) else anchor


def translated_target(link, page):
    """Return where the translation of a link on an English page should lead: to a Chinese page or
    picture, if any.
    """
    path, heading = target(link, page)
    if path == chinese_page(page):
        return page, None  # a link to the translation leads back from there
    if path in pages():
        return chinese_page(path), heading
    return (path.parent / "zh" / path.name if path.parent == FIGURES else path), heading


def contents(passage, find_target, page):
    """Return what a translation keeps: {"code": names in backquotes, "links": where they lead,
    "numbers", "bold"}.

    Numbers of millions are left out: Chinese counts in ten thousands.
    """
    text = " ".join(passage.text.split())
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|TF32|[\d.]+ (million|万)", "", text)
    links = {
        link if "://" in link else find_target(link, page)
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
    }
    names = {link if isinstance(link, str) else name_of(*link) for link in links}
    return {
        "code": set(re.findall(r"`([^`]+)`", text)),
        "links": names,
        "numbers": set(re.findall(r"\d+(?:[.,]\d+)*", prose)),
        "bold": {"words"} if "**" in text else set(),
    }


def name_of(path, heading):
    return str(path.relative_to(ROOT)) + ("" if heading is None else f" heading {heading}")


def differences(english, chinese, page):
    """Return how the contents of a passage of an English page and of its translation differ, one
    line for each kind.
    """
    if not is_prose(english):
        expected = translated_code(english)
        return [] if expected == chinese.text else [first_difference(expected, chinese.text)]
    # the text of a notebook is shown in the notebook
    there = page if page.suffix == ".ipynb" else chinese_page(page)
    expected, given = contents(english, translated_target, page), contents(chinese, target, there)
    return [
        (
            f"{kind}: without {list_of(expected[kind] - given[kind])}, with "
            f"{list_of(given[kind] - expected[kind])}"
        )
        for kind in expected
        if expected[kind] != given[kind]
    ]


def translated_code(passage):
    """Return the text of a code block or an HTML comment in a translation."""
    language, _, code = passage.text.partition("\n")
    if passage.kind != "fence":
        return passage.text
    return f"{language}\n{comments.translate(language, code)}"


def first_difference(expected, given):
    lines = zip_longest(expected.splitlines(), given.splitlines(), fillvalue="nothing")
    line = next(line for line, other in lines if line != other)
    return f"its code or comment differs: expected {line.strip()!r}"


def list_of(names):
    return ", ".join(sorted(names)) or "nothing"


# The check


def check(page, hashes):
    """Return a line for each passage of an English page whose translation is missing, different or
    stale.

    Args:
        page: path of an English page or a notebook.
        hashes: {Chinese page: hashes of the English passages that were looked at}.
    """
    there = chinese_page(page)
    if not there.exists():
        return [f"{page.relative_to(ROOT)}: no Chinese page {there.relative_to(ROOT)}"]
    english, chinese = passages(read(page)), passages(read(there))
    return stale(page, english, hashes) + (
        structure(page, english, chinese)
        or [
            f"{place(there, b)}: {problem} ({place(page, a)})"
            for a, b in zip(english, chinese, strict=True)
            for problem in differences(a, b, page)
        ]
    )


def unknown_comments():
    """Return a line for each translation of a comment that no code of the book has."""
    known = set()
    for page in english_pages():
        text = read(page)
        for passage in passages(text):
            if passage.kind == "fence":
                language, _, code = passage.text.partition("\n")
                known |= {comment.text for comment in comments.find(language, code)}
    for file in quoted_files():
        known |= {comment.text for comment in comments.find("python", file.read_text())}
    return [
        f"docs/zh/comments.json: no code of the book has the comment {text!r}: remove or mend it"
        for text in comments.load()
        if text not in known
    ]


def unwanted_words():
    """Return a line for each place where the Chinese edition has a word of terms.json."""
    terms = json.loads(TERMS.read_text())
    files = [chinese_page(page) for page in english_pages()]
    files += [ROOT / f"docs/zh/{name}.json" for name in ("comments", "labels", "tables")]
    files += [ROOT / "exercises/chinese.json", *sorted(ROOT.glob("exercises/*/text.zh.md"))]
    return [
        f"{file.relative_to(ROOT)}:{number}: {word}: expected {instead}, as docs/zh/terms.json says"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        for word, instead in terms.items()
        if word in line
    ]


def style(there):
    """Return a line for each place of a Chinese page that reads as if it had been translated."""
    prose = [passage for passage in passages(read(there)) if is_prose(passage)]
    items = [passage for passage in prose if passage.kind.endswith("li/p")]
    found = [
        f"{place(there, item)}: expected a full-width colon after the label: {start_of(item)}"
        for item in items
        if LABEL.match(item.text)
    ]
    size = sum(len(re.findall(r"[一-鿿]", passage.text)) for passage in prose)
    for word, limit in LIMITS.items():
        places = [passage for passage in prose for _ in range(passage.text.count(word))]
        most = 1 + size * limit // 10_000
        if len(places) > most:
            reason = f"{word}: {len(places)} times, expected at most {most} ({limit} in 10,000)"
            advice = "state the ground first, with 由于 or 因此"
            found += [f"{place(there, passage)}: {reason}: {advice}" for passage in places]
    return found


def quoted_files():
    """Return the paths of the files whose code the generated blocks show."""
    blocks = [block for page in pages() for block in BLOCK.findall(page.read_text())]
    files = {argument.split()[0] for _, kind, argument, _, _ in blocks if kind == "code"}
    return [*ROOT.glob("0*.py"), *(ROOT / file for file in sorted(files))]


def place(page, passage):
    return f"{page.relative_to(ROOT)}:{passage.line}"


def start_of(passage):
    return repr(" ".join(passage.text.split())[:60])


def structure(page, english, chinese):
    """Return a line for the first passage that is of another kind than its translation.

    Empty if there is none.
    """
    end = Passage("end of the page", "", english[-1].line)
    for a, b in zip_longest(english, chinese, fillvalue=end):
        if a.kind != b.kind:
            expected = f"expected {a.kind} as at {place(page, a)}: {start_of(a)}"
            return [f"{place(chinese_page(page), b)}: {b.kind}, {expected}"]
    return []


def stale(page, english, hashes):
    """Return a line for each English passage that changed since its translation was looked at."""
    name = str(chinese_page(page).relative_to(ROOT))
    noted = hashes.get(name, [])
    prose = [passage for passage in english if is_prose(passage)]
    found = [
        f"{name} is stale: {place(page, passage)}: {start_of(passage)}"
        for passage in prose
        if digest(passage) not in noted
    ]
    if not found and [digest(passage) for passage in prose] != noted:
        found = [f"{name} is stale: passages of {page.relative_to(ROOT)} were moved or removed"]
    if found:
        found.append(f"{name}: translate this, then: python tools/book/chinese.py --done {name}")
    return found


def load_hashes():
    return json.loads(HASHES.read_text()) if HASHES.exists() else {}


def done(path, line=None, same=False):
    """Note that translations on a Chinese page were looked at, and print the new ones.

    Args:
        line: int, where a passage begins, or None for all.
        same: bool. False: refuse a translation that has not changed since the last commit, although
            its English has.
    """
    there = path.resolve()
    page = next((page for page in english_pages() if chinese_page(page) == there), None)
    if page is None:
        sys.exit(f"chinese.py: error: {path}: expected a Chinese page, such as docs/zh/01_snsc.md")
    english, chinese = passages(read(page)), passages(read(there))
    if problems := structure(page, english, chinese):
        sys.exit(f"chinese.py: error: {problems[0]}")
    hashes = load_hashes()
    name = str(there.relative_to(ROOT))
    noted = hashes.get(name, [])
    pairs = [pair for pair in zip(english, chinese, strict=True) if is_prose(pair[0])]
    new = [(a, b) for a, b in pairs if digest(a) not in noted and line in (None, b.line)]
    if line and not new:
        sys.exit(f"chinese.py: error: no stale passage begins at {path}:{line}")
    before = {passage.text for passage in passages(last_commit(name))}
    unchanged = [place(there, b) for _, b in new if b.text in before]
    if unchanged and not same:
        found = f"the English has changed, and the Chinese has not: {', '.join(unchanged)}"
        sys.exit(f"chinese.py: error: {found}; if it still says the same, add --same")
    for a, b in new:
        print(f"{place(there, b)}\n  {' '.join(a.text.split())}\n  {b.text}")
    known = {*noted, *(digest(a) for a, _ in new)}
    hashes[name] = [digest(a) for a, _ in pairs if digest(a) in known]
    # a hash per line: branches that change different passages of one page merge
    HASHES.write_text(json.dumps(hashes, indent=0, sort_keys=True) + "\n")


def last_commit(name):
    """Return the text of a file in the last commit, or "" if it is not there."""
    command = ["git", "show", f"HEAD:{name}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


# Notebooks


def translate_notebook(text, name):
    """Return the JSON of a notebook with the words of docs/zh/notebooks/NAME.md and Chinese charts.

    The code and the numbers stay.
    """
    parts = re.split(
        rf"^{CELL.format('(.+?)')}\n", read(ROOT / f"docs/zh/notebooks/{name}.md"), flags=re.M
    )[1:]
    words = dict(zip(parts[::2], parts[1::2], strict=True))
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = words[cell["id"]].strip()
            continue
        saved = re.search(r"figure: docs/figures/(\w+)", json.dumps(cell["outputs"]))
        for output in cell["outputs"]:
            if saved and "image/png" in output.get("data", {}):
                picture = (FIGURES / f"zh/{saved[1]}.png").read_bytes()
                output["data"]["image/png"] = base64.b64encode(picture).decode()
    return json.dumps(notebook)


def parse_args():
    parser = Parser(__doc__)
    text = "a Chinese page whose passages were looked at, or the place of one passage"
    parser.add_argument("--done", metavar="FILE[:LINE]", help=text)
    text = "the translation still says the same, though the English has changed"
    parser.add_argument("--same", action="store_true", help=text)
    return parser.parse_args()


def main(args):
    if args.done:
        file, _, line = args.done.partition(":")
        done(Path(file), int(line) if line.isdigit() else None, args.same)
        return 0
    hashes = load_hashes()
    found = [line for page in english_pages() for line in check(page, hashes)]
    found += [line for page in english_pages() for line in style(chinese_page(page))]
    found += unknown_comments() + unwanted_words()
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(parse_args()))
