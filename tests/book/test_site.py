"""The site: make site builds it in both languages, and a browser opens it from disk."""

import os
import re
import subprocess
import sys
from urllib.parse import quote

import pytest
from needs import browser
from processes import ROOT

PAGES = [
    "index",
    "README",
    "docs/06_imagenet",
    "docs/concepts",
    "notebooks/speed",
    "tools/site/api",
    "zh/index",
    "zh/README.zh-CN",
    "zh/docs/zh/06_imagenet",
    "zh/docs/zh/concepts",
    "zh/notebooks/speed",
]
TROUBLE, TROUBLE_ZH = "docs/troubleshooting.html", "docs/zh/troubleshooting.html"
PASTED = {  # as users paste them, with numbers, hosts and paths that no page has, and the case
    "[rank3]:[E1202 11:06:57.640667771 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=184, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600071 milliseconds before timing out.": "1. ",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by"
    " peer [10.12.3.163]:45113": "17. ",
    "DistStoreError: wait timeout after 900000ms, keys: /none/torchelastic/role_info/0": "87. ",
    "ImportError: /opt/env7/lib/libtorch_cuda.so: undefined symbol: ncclCommResume": "undefined",
    "RuntimeError: Expected to mark a variable ready only once. Parameter at index 211 with name"
    " segmentation_head.bias has been marked as ready twice.": "72. ",
    "exitcode : -9 (pid: 81233) error_file: <N/A> Signal 9 (SIGKILL) received by PID 81233": "19. ",
    "[c10d] The server socket has failed to listen on any local network address. port: 29500,"
    " useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use": "6. ",
    "RuntimeError: DataLoader worker (pid 4721) is killed by signal: Bus error.": "25. ",
    "CUDA error: no kernel image is available for execution on the device": "73. ",
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective:"
    " CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[3])": "2. ",
}
SEARCHES = [  # folder, query, a page that it must find, how what it opens begins
    ("", "EADDRINUSE", TROUBLE, "6. "),
    ("", "accumulating gradients", "docs/concepts.html", "gradient accumulation"),
    ("zh/", "EADDRINUSE", TROUBLE_ZH, "6. "),
    ("zh/", "梯度累积", "docs/zh/concepts.html", "梯度累积"),
    *(("", line, TROUBLE, case) for line, case in PASTED.items()),
    *(("zh/", line, TROUBLE_ZH, case) for line, case in PASTED.items()),
]
IN_VIEW = """all => all.filter(one => {
    const { top, bottom } = one.getBoundingClientRect();
    return top > 40 && bottom < innerHeight;
}).map(one => one.textContent.trim())"""


@pytest.mark.slow
def test_the_site_is_built_and_shown_and_searched_in_both_languages(tmp_path):
    env = os.environ | {"VIRTUAL_ENV": sys.prefix}
    command = ["make", "site", f"SITE={tmp_path}"]
    end = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert end.returncode == 0 and "WARNING" not in end.stderr, end.stdout + end.stderr

    problems = [
        f"{path}: the language switch leads to {address}"
        for path in tmp_path.rglob("*.html")
        for address in re.findall(r'nav-link" href="([^"]+)" lang="', path.read_text())
        if path.name != "404.html" and not (path.parent / address).is_file()
    ]
    for address in re.findall(r'(?:href|src)="([^"#?]+)', (tmp_path / "404.html").read_text()):
        if not (tmp_path / address[1:]).is_file():  # a server shows it at any address
            problems.append(f"404.html leads to {address}")
    for path in tmp_path.rglob("*.html"):
        shown = path.read_text()
        if re.search("from your clone|克隆的仓库里打开", shown):
            problems.append(f"{path}: the site needs no clone")
        text = re.sub(r"<(pre|code|script|style).*?</\1>", "", shown, flags=re.S)
        if raw := re.search(r".{0,40}\]\([^)\s]+\)", text):
            problems.append(f"{path}: a link is shown as {raw[0]}")
    with browser() as page:
        page.on(
            "console",
            lambda message: message.type in ("error", "warning") and problems.append(message.text),
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "requestfailed",
            lambda request: (
                request.failure != "net::ERR_ABORTED"  # by the next page
                and problems.append(f"{request.failure}: {request.url}")
            ),
        )
        for name in PAGES:
            page.goto(f"file://{tmp_path}/{name}.html")
            problems += page.evaluate("""[...document.images]
                .filter(image => image.complete && !image.naturalWidth)
                .map(image => `${location}: no picture ${image.src}`)""")
        page.click("header >> text=English >> visible=true")
        page.wait_for_url(f"file://{tmp_path}/notebooks/speed.html")
        for folder in ("", "zh/"):
            page.goto(f"file://{tmp_path}/{folder}index.html")
            links = page.eval_on_selector_all(".cards a", "links => links.map(a => a.pathname)")
            assert len(links) == 12 and all(map(os.path.isfile, links)), links
            name = "docs/zh/concepts" if folder else "docs/concepts"
            page.goto(f"file://{tmp_path}/{folder}{name}.html")
            page.evaluate("document.documentElement.dataset.theme = 'dark'")
            page.locator("figure.see").scroll_into_view_if_needed()
            scene = page.locator("figure.see iframe").content_frame
            scene.locator("html[style*=dark] svg .block >> nth=0").wait_for()
            assert scene.locator("html").get_attribute("lang") == ("zh-CN" if folder else "en")
            page.wait_for_function("document.querySelector('figure.see iframe').height > 600")
        for folder, query, expected, begin in SEARCHES:
            page.goto(f"file://{tmp_path}/{folder}search.html?q={quote(query)}")
            page.wait_for_selector("#search-results .search-summary:not(:empty)")
            links = page.query_selector_all("#search-results ul.search a")
            found = [link.evaluate("link => link.pathname") for link in links]
            expected = f"{tmp_path}/{folder}{expected}"
            assert expected in found and len(found) < 20, (query, found)
            links[found.index(expected)].click()
            page.wait_for_selector("article .highlighted")
            shown = page.eval_on_selector_all("article :is(h2, h3, tr)", IN_VIEW)
            assert any(text.startswith(begin) for text in shown), (query, shown)
    assert not problems, "\n".join(problems)
