"""The Chinese edition: that it is in step with the English one, and that the check notices when it
is not.
"""

import ast
import json
import re

import matplotlib.pyplot as plt
import pytest
from columns import columns
from needs import need
from PIL import Image
from processes import ROOT

from tools.book import chinese, chinese_figures, comments
from tools.book.pages import chinese_page, pages
from tools.book.phrases import PhraseError, Phrases

ENGLISH = """\
# Ranks

A rank is one of 3 numbers. See [the ring](concepts.md#the-ring-all-reduce-and-what-it-costs) \
and `--lr`.

- **First**, this.
- Then that.

| flag | use |
| --- | --- |
| `--lr` | learning rate |

```sh
python 01_snsc.py
```

```python
move()  # moves the weights
save()  # writes a file
```
"""
RING = chinese.slugs(chinese_page(ROOT / "docs/concepts.md"))[5]
CHINESE = f"""\
# 编号

rank 是编号，这里有 3 个进程。见 [环](concepts.md#{RING}) 和 `--lr`。

- **首先**，这样。
- 然后那样。

| 参数 | 用途 |
| --- | --- |
| `--lr` | 学习率 |

```sh
python 01_snsc.py
```

```python
move()  # 更新权重
save()  # writes a file
```
"""


@pytest.fixture
def edition(monkeypatch, tmp_path):
    """A function (English, Chinese) -> problems, for two pages whose translation was looked at in
    the form above.
    """
    page = ROOT / "docs/01_snsc.md"
    there = chinese_page(ROOT / "docs/01_snsc.md")
    hashes = {
        str(there.relative_to(ROOT)): [
            chinese.digest(p) for p in chinese.passages(ENGLISH) if chinese.is_prose(p)
        ]
    }
    read = chinese.read
    monkeypatch.setattr(comments, "load", lambda: {"moves the weights": "更新权重"})

    def problems(english=ENGLISH, translation=CHINESE):
        texts = {page: english, there: translation}
        monkeypatch.setattr(
            chinese, "read", lambda path: texts[path] if path in texts else read(path)
        )
        return chinese.check(page, hashes)

    return problems


def test_the_edition_is_in_step():
    hashes = chinese.load_hashes()
    assert not [line for page in chinese.english_pages() for line in chinese.check(page, hashes)]
    assert not chinese.unknown_comments()


def test_pages_that_agree_have_no_problem(edition):
    assert edition() == []


def test_a_changed_english_sentence_names_its_chinese_passage(edition):
    changed = ENGLISH.replace("Then that.", "Then something else.")
    first, hint = edition(english=changed)
    assert first == "docs/zh/01_snsc.md:6: is stale: docs/01_snsc.md:6: 'Then something else.'"
    assert hint.endswith("python tools/book/chinese.py --done docs/zh/01_snsc.md")


def test_a_new_english_passage_names_where_it_stands(edition):
    lines = edition(english=ENGLISH.replace("- Then that.", "- Then that.\n- At last this."))
    assert any(
        "has before it a passage that is not translated: docs/01_snsc.md:7: 'At last this.'" in line
        for line in lines
    ), lines
    assert any("expected ul/li/p as at docs/01_snsc.md:7" in line for line in lines), lines


def test_a_removed_english_passage_names_the_translation_left(edition):
    """A removed english passage names the translation that is left."""
    lines = edition(english=ENGLISH.replace("- Then that.\n", ""))
    assert any(
        re.match(r"docs/zh/01_snsc.md:6: its English passage was removed", line) for line in lines
    ), lines


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("`--lr`。", "`--lrate`。", "code: without --lr, with --lrate"),
        (f"#{RING}", "", "links: without docs/zh/concepts.md heading 5"),
        ("python 01_snsc.py", "python 02_snmc_dp.py", "its code or comment differs"),
        ("move()", "moved()", "differs: expected 'move()  # 更新权重'"),
        ("更新权重", "改变权重", "differs: expected 'move()  # 更新权重'"),
        ("更新权重", "moves the weights", "differs: expected 'move()  # 更新权重'"),
        ("writes a file", "写入文件", "differs: expected 'save()  # writes a file'"),
        ("**首先**", "首先", "bold: without words"),
        ("3 个进程", "4 个进程", "numbers: without 3, with 4"),
        ("## ", "# ", None),
        ("- 然后那样。\n", "", "expected ul/li/p"),
        ("| `--lr` | 学习率 |\n", "", "expected tr"),
    ],
)
def test_a_translation_that_lost_something_is_named(edition, old, new, expected):
    if expected is None:
        assert edition(translation=CHINESE.replace("# 编号", "## 编号"))
        return
    assert old in CHINESE
    lines = edition(translation=CHINESE.replace(old, new, 1))
    assert any(expected in line for line in lines), lines


def test_a_changed_english_comment_names_its_chinese_block(edition):
    lines = edition(english=ENGLISH.replace("moves the weights", "moves all weights"))
    assert any("differs: expected 'move()  # moves all weights'" in line for line in lines), lines


def test_a_translation_of_a_comment_that_no_code_has_is_named(monkeypatch):
    shown = "prints and keeps time, nothing else"
    monkeypatch.setattr(comments, "load", lambda: {shown: "只计时", "counts sheep": "数羊"})
    (line,) = chinese.unknown_comments()
    assert "docs/zh/comments.json: no code of the book has the comment 'counts sheep'" in line


CODE = '''\
def answer():
    """Return the answer.

    It is the answer
    to everything:

        answer()  # of this function
    """
    # A comment of
    # two lines.
    text = "# no comment"  # a string
    return len(text)  # no translation
'''
CODE_IN_CHINESE = '''\
def answer():
    """返回答案。

    万事万物的
    答案：

        answer()  # 本函数的
    """
    # 一行注释。
    text = "# no comment"  # 字符串
    return len(text)  # no translation
'''


def test_comments_and_docstrings_are_translated_and_code_is_not(monkeypatch):
    words = {
        "Return the answer.": "返回答案。",
        "It is the answer to everything:": "万事万物的\n答案：",
        "of this function": "本函数的",
        "A comment of two lines.": "一行注释。",
        "no comment": "没有注释",
        "a string": "字符串",
    }
    monkeypatch.setattr(comments, "load", lambda: words)
    assert comments.translate("python", CODE) == CODE_IN_CHINESE
    assert comments.translate("sh", "ls a#b  # a string\n") == "ls a#b  # 字符串\n"
    assert comments.translate("text", "ls  # a string\n") == "ls  # a string\n"


@pytest.mark.parametrize("path", chinese.quoted_files(), ids=lambda path: path.name)
def test_a_file_with_translated_comments_is_the_same_program(path):
    lines = comments.read(path)
    assert lines != path.read_text().splitlines(), "nothing is translated"
    assert program("\n".join(lines)) == program(path.read_text())
    assert not [line for line in lines if columns(line) > 100]


def program(code):
    """Return the syntax tree of code without its docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return ast.dump(tree)


def test_done_notes_the_passages_and_shows_the_new_ones(monkeypatch, tmp_path, capsys):
    page = ROOT / "docs/zh/template.md"
    monkeypatch.setattr(chinese, "HASHES", tmp_path / "in_step.json")
    chinese.done(page)
    noted = json.loads((tmp_path / "in_step.json").read_text())
    assert noted == {"docs/zh/template.md": chinese.load_hashes()["docs/zh/template.md"]}
    shown = capsys.readouterr().out
    assert "docs/zh/template.md:1" in shown and "The template" in shown and "模板" in shown
    chinese.done(page)
    assert capsys.readouterr().out == ""


def test_no_english_sentence_was_left_in_a_chinese_page():
    for page in map(chinese_page, pages()):
        for passage in chinese.passages(page.read_text()):
            if chinese.is_prose(passage) and not passage.kind.startswith("h"):
                plain = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]+>", "", passage.text)
                assert not re.search(r"(\b[a-z]+\b[ ,]+){8}", plain), (
                    f"{page.name}:{passage.line}: {plain}"
                )


def test_words_without_a_translation_are_named(tmp_path):
    file = ROOT / "docs/zh/tables.json"
    assert (
        Phrases(file).translate("`--lr`") == "`--lr`"
        and Phrases(file).translate("1.5 (1.0 to 2.0)") == "1.5（1.0 至 2.0）"
    )
    with pytest.raises(
        PhraseError, match=r"no Chinese for 'a new heading': add it to docs/zh/tables\.json"
    ):
        Phrases(file).translate("a new heading")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/figures").glob("*.png")), ids=lambda path: path.stem
)
def test_a_chinese_figure_is_drawn_from_the_same_as_the_english(path):
    """A chinese figure is drawn from what the english one is drawn from."""
    source = chinese_figures.source(Image.open(path).text["Source"])
    there = Image.open(ROOT / "docs/figures/zh" / path.name).text["Source"]
    assert there == source, (
        f"docs/figures/zh/{path.name} is stale: make charts; python tools/book/pictures.py"
    )


def test_a_figure_stays_english_when_its_chinese_copy_is_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(chinese_figures, "FIGURES", tmp_path)
    fig, ax = plt.subplots()
    ax.barh([0], [1])
    ax.set(xlabel="machines", ylabel="epoch")
    ax.set_yticks([0], ["03, torchrun, 2 processes"])
    fig.savefig(tmp_path / "english.png")
    shown = plt.get_fignums()
    chinese_figures.save(fig, "copy", "0")
    need(None if (tmp_path / "copy.png").exists() else "not installed: the font of Chinese figures")
    assert (
        ax.get_xlabel() == "machines"
        and ax.get_yticklabels()[0].get_text() == "03, torchrun, 2 processes"
    )
    assert plt.get_fignums() == shown, "a notebook would show the copy"
    plt.close(fig)
