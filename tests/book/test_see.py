"""docs/see/: a browser steps through the recorded runs, and the calculators agree with ours."""

import functools
import json
import random
import re

import pytest
from needs import browser
from processes import ROOT

from tools import fit, plan
from tools.planning import step_model
from tools.planning.layers import Layer

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
                page.goto(f"file://{PAGE}#{name}/{option}/0/{language}/every=1")
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
    count = len(SCENES["step"]["moments"]["ddp"])
    page.click("#next")
    keys = "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"
    for key, expected in zip(keys, (3, 2, count, count, 1), strict=True):
        page.keyboard.press(key)
        assert page.inner_text("#place") == f"{expected} / {count}"
    page.keyboard.press(" ")  # plays
    page.wait_for_function(f"document.getElementById('place').textContent === '2 / {count}'")
    page.click("#play")
    assert page.inner_text("#play") == "▶"
    page.goto(f"file://{PAGE}#step/ddp/10/en")
    page.click("text=model(images)")  # keeps the moment, and shows both
    assert page.evaluate("location.hash") == "#step/model/8/en/beside=ddp"
    assert page.locator(".lane").count() == 4
    page.goto(f"file://{PAGE}#time/ddp/0/en")
    notes = [page.inner_text("#note")]
    while page.is_enabled("#next"):
        page.keyboard.press("ArrowRight")
        notes.append(page.inner_text("#note"))
    said = "rank 3 still reads", "hidden", "Waiting for rank 3: rank 0, rank 1, rank 2", "exposed"
    firsts = [next(k for k, note in enumerate(notes) if words in note) for words in said]
    assert firsts == [0, 2, 4, 6]
    page.goto(f"file://{PAGE}#step/slow/11/en")
    page.click("#ask button:text('rank 1')")
    assert page.inner_text("#ask") == "No: rank 0." and page.inner_text("#play") == "❚❚"
    page.click("text=if rank == 0")
    page.keyboard.press("End")
    assert "why_hang.py" in page.inner_text("#note") and "barrier" in page.inner_text("#note pre")
    page.click("#language")
    assert page.get_attribute("html", "lang") == "zh-CN" and "rank 0" in page.inner_text("#note")
    page.click("#scenes button >> nth=2")
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
        # two simulated steps, whose last rank is late
        layers, bucket = random.randint(1, 9), step_model.BUCKET
        s = STEP | s | {"ranks": s["gpus"], "layers": layers, "bucket": bucket, "optimizer": 0}
        s["late"] = {s["gpus"] - 1: 1}
        step = step_model.layered_step(3e-3, [Layer(s["gradients"] / layers, 1)] * layers)
        send = functools.partial(step_model.cluster_seconds, devices=s["gpus"], cluster=cluster)
        expected = 2 + 2 * step_model.step_seconds(step, send)
        assert page.evaluate("s => trace('ddp', s).end", s) == pytest.approx(expected)


@pytest.mark.slow
def test_the_commands_of_the_calculators_give_the_numbers_of_the_page(page, monkeypatch, capsys):
    charts = ("fit", fit, ".memory b"), ("scale", plan, "#calculator svg .name")
    for k, (name, tool, numbers) in enumerate(charts * 3):
        page.goto(f"file://{PAGE}#{name}/-/0/en")
        page.click(f".presets button >> nth={k // 2}")
        page.reload()  # the address holds the settings
        monkeypatch.setattr("sys.argv", page.inner_text("#calculator code").split()[1:])
        tool.main(tool.parse_args())
        said = capsys.readouterr().out.replace("yes", "GB ✓").replace(" no ", " GB ✗ ")
        shown = page.locator(numbers).all_text_contents()
        shown = shown if tool is fit else [" to ".join(shown[2:4])]  # of 64 GPUs
        assert [text for text in shown if text not in said] == []


STEP = {"ranks": 2, "machine": 1, "inside": 1e9, "network": 1e9, "layers": 2, "gradients": 24}
STEP |= {"bucket": 1, "forward": 1e-3, "backward": 2e-3, "optimizer": 0, "steps": 2, "micro": 1}
STEP |= {"program": "ddp", "sends": "last"}
SIMULATED = {
    "step/ddp": {},
    "step/slow": {"late": {1: 0.4}},
    "step/hang": {"barrier": True},
    "step/model": {"sends": "never"},
    "fsdp/fsdp": {"program": "fsdp", "blocking": True, "layers": 3},
    "ring/ring": {"program": "ring", "ranks": 4, "size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("scene", SIMULATED)
def test_the_simulation_has_the_order_and_the_values_of_a_record(page, scene):
    name, option = scene.split("/")
    frames = RUNS[name][option]["frames"]
    kinds = ("gradient", "bucket", "compute", "wait", "done", "send", "receive")
    recorded, values = [], []
    for rank, first in enumerate(frames[0]["ranks"]):
        ones = [frame["ranks"][rank] | {"ms": 0} for frame in frames]
        new = [k for k, one in enumerate(ones) if one["kind"] in kinds and one != ones[k - 1]]
        recorded += [(k, rank, ones[k]) for k in new]
        sent = [ones[k].get("sent") for k in new if ones[k]["kind"] in ("bucket", "wait")]
        wholes = [one["values"]["whole"] for one in ones if one.get("values", {}).get("whole")]
        sent = [flat(value or wholes.pop(0)) for value in sent if value or wholes]
        values.append(first["values"]["tensor"] if name == "ring" else sent)
    s = STEP | SIMULATED[scene] | {"values": values}
    trace = page.evaluate("s => trace(s.program, s)", s)
    events = sorted(trace["events"], key=lambda event: event["rank"])
    names = ("to", "source") if name == "ring" else ("calls",)
    expected = [(rank, one["kind"], *map(one.get, names)) for _, rank, one in recorded]
    assert [(e["rank"], e["kind"], *map(e.get, names)) for e in events] == expected
    assert len(trace["stuck"]) == (2 if option == "hang" else 0)
    for event, (number, rank, one) in zip(events, recorded, strict=True):
        of = re.findall(r"\d", str(one.get("of")))
        assert event.get("of", []) == [int(layer) + (name == "step") for layer in of]
        next_values = [frame["ranks"][rank].get("values", {}) for frame in frames[number:][:6]]
        shown = [flat(value) for values in next_values for value in values.values()]
        for value in event["value"] if one["kind"] == "done" else []:
            assert any(pytest.approx(flat(value), abs=1e-3) == other for other in shown)
        for other, (after, *_) in zip(events, recorded, strict=True):
            assert number >= after or event["time"] <= other["time"] + 1e-9
