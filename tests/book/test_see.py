"""docs/see/: a browser steps through the recorded runs, and the calculators agree with ours."""

import json
import random
import re

import pytest
from needs import browser
from processes import ROOT

from tools import fit
from tools.planning import step_model

PAGE = ROOT / "docs/see/index.html"


def read(name):
    """The value of the last constant in a file of docs/see/."""
    text = (PAGE.parent / name).read_text()
    return json.loads(re.sub(r".*^const \w+ = ", "", text, flags=re.M | re.S).rstrip(";\n"))


SCENES = read("scenes.js")
RUNS = read("runs.js")


@pytest.fixture
def page():
    """The page in a browser; anything that it complains about or requests is an error."""
    problems = []
    with browser(viewport={"width": 390, "height": 844}) as page:
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith("file:") or problems.append(request.url),
        )
        page.goto(f"file://{PAGE}#step/ddp/0/en")
        yield page
    assert not problems


@pytest.mark.slow
def test_each_scene_is_shown_frame_by_frame_as_it_was_recorded(page):
    for language in ("en", "zh"):
        for name, runs in RUNS.items():
            for option, run in runs.items():
                page.goto(f"file://{PAGE}#{name}/{option}/0/{language}")
                check_frames(page, SCENES[name], run)


def check_frames(page, scene, run):
    """Step to the end with the right arrow, and compare what is shown with the record."""
    values = [{} for _ in range(scene["ranks"])]
    for number, frame in enumerate(run["frames"], 1):
        shown = page.evaluate("""() => ({
            place: document.getElementById("place").textContent,
            note: document.getElementById("note").textContent,
            lanes: [...document.querySelectorAll(".lane")].map(lane => ({
                does: lane.querySelector(".does").textContent,
                cells: [...lane.querySelectorAll(".cell")].map(cell => Number(cell.textContent)),
            })),
            lines: [...document.querySelectorAll("#code li")].map(item => [
                [...item.querySelectorAll("b")].map(rank => Number(rank.textContent)),
                item.querySelector("span").textContent]),
            wide: document.documentElement.scrollWidth > innerWidth,
        })""")
        place = f"{number} / {len(run['frames'])}"
        assert shown["place"] == place and shown["note"] and not shown["wide"], shown
        source = run["program"].splitlines()
        for rank, one in enumerate(frame["ranks"]):
            if "fresh" in one:  # another function or process
                values[rank] = {}
            values[rank] |= one.get("values", {})
            numbers = [
                number
                for label in scene["watch"]
                if one["kind"] != "gone"
                and values[rank].get(label) is not None
                and label not in scene.get("bars", {})
                for number in flat(values[rank][label])
            ]
            assert shown["lanes"][rank]["cells"] == numbers, (place, rank)
            lines = [text for ranks, text in shown["lines"] if rank in ranks]
            assert lines == ([source[one["line"] - 1]] if "line" in one else [])
        page.keyboard.press("ArrowRight")


def flat(value):
    return [number for one in value for number in flat(one)] if isinstance(value, list) else [value]


@pytest.mark.slow
def test_buttons_keys_and_switches_lead_where_they_say(page):
    def place():
        return page.inner_text("#place")

    count = len(RUNS["step"]["ddp"]["frames"])
    for way, expected in (
        (lambda: page.click("#next"), 2),
        (lambda: page.keyboard.press("ArrowRight"), 3),
        (lambda: page.click("#back"), 2),
        (lambda: page.keyboard.press("ArrowLeft"), 1),
        (lambda: page.click("#last"), count),
        (lambda: page.keyboard.press("ArrowRight"), count),  # there is no next
        (lambda: page.keyboard.press("Home"), 1),
        (lambda: page.keyboard.press("End"), count),
        (lambda: page.click("#first"), 1),
    ):
        way()
        assert place() == f"{expected} / {count}"
    page.click("text=if rank == 0")
    page.click("#last")
    assert "why_hang.py" in page.inner_text("#note") and "barrier" in page.inner_text("#note pre")
    page.click("#language")
    assert page.get_attribute("html", "lang") == "zh-CN" and "rank 0" in page.inner_text("#note")
    page.click("#scenes button >> nth=1")
    assert page.evaluate("location.hash").startswith("#ring/ring/0/zh")


@pytest.mark.slow
def test_the_calculators_agree_with_fit_and_plan_on_random_settings(page):
    random.seed(0)
    for _ in range(50):
        machine = random.choice([4, 8])
        s = {
            "weights": random.uniform(1e6, 1e10),
            "activations": random.uniform(1e6, 2e9),
            "batch": random.randint(1, 256),
            "blocks": random.randint(1, 96),
            "optimizer": random.choice(["sgd", "momentum", "adam"]),
            "bf16": random.random() < 0.5,
            "gpus": random.choice([1, 2, 4, machine, 4 * machine]),
            "machine": machine,
            "step": random.uniform(0.01, 1),
            "gradients": random.uniform(1e6, 3e9),
            "network": random.uniform(1e8, 4e11),
            "inside": random.uniform(5e9, 4e11),
        }
        model = fit.even_model(
            s["weights"],
            s["batch"] * s["activations"],
            s["blocks"],
            "bf16" if s["bf16"] else "none",
        )
        expected = {
            setting.name: fit.peak(model, setting, s["optimizer"]).total
            for setting in fit.settings(s["gpus"], machine)
        }
        rows = page.evaluate("s => fit(s)", s)
        assert {row["name"]: row["sum"] for row in rows} == pytest.approx(expected)
        cluster = step_model.Cluster(machine, s["network"], s["inside"])
        step = step_model.even_step(s["step"], s["gradients"])
        band = step_model.efficiency_band(step, s["gpus"], cluster, step_model.SPREAD)
        assert page.evaluate("s => scale(s)", s) == pytest.approx(band, rel=1e-4)
