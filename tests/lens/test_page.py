"""The lens's page: its JavaScript computes what Python computes, and in a real browser everything can be moved."""

import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
import tarfile
import time
from base64 import b64encode
from pathlib import Path

import mpmath as mp
import pytest
import torch

import marginlens as ml
from marginlens import cli, effects
from marginlens.lens import page as pages
from marginlens.lens import theory
from marginlens.runs.run import open_run
from tests import oracle_mpmath
from tests.catalogue import EFFECTS
from tests.report.folders import write_run

TOLERANCE = 1e-9
"""Relative, of JavaScript's float64 against Python's and against 150 digits."""
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = "axe-core@4.10.3"
INTEGRITY = "Xm7bpRXnDSX2YE2YFfBk2FnF0ep6tmG7xPh8iHee8MIcrgq762Nkce856dYtJYLkuIoYZvGfTs/PbZhideTcEg=="
"""SHA-512 of AXE's tarball, as the npm registry publishes it."""
CACHE = Path.home() / ".cache" / "marginlens-tests"
VISITS = itertools.count()
MORE = ["margin(m1=0.4, m2=0.3) * attenuation(alpha=1)", "emphasis(s=20, c=0.7) * ratio(m1=1, scope=row)"]


def write_lens(run, steps=3, hot=(9, 16)):
    """A lens.jsonl with 100 rows in one bin, and 20 in its neighbours, at each step."""
    i, j = hot
    lines = []
    for step in range(1, steps + 1):
        counts = [[0] * 20 for _ in range(36)]
        counts[i][j], counts[i + 1][j], counts[i][j - 1] = 100, 10, 10
        joint = {"theta": [math.pi * k / 36 for k in range(37)], "q": [k / 20 for k in range(21)], "counts": counts}
        lines.append({"step": 50 * step, "joint": joint, "alignment": 0.5})
    (run / "lens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lens") / "runs"
    path = write_run(folder, data="shapes", effect="margin(m1=0.4)", tau=0.2, epochs=4)
    write_lens(path, steps=100)
    return path


@pytest.fixture
def call(monkeypatch, tmp_path):
    """`marginlens lens page` with these words, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: cli.main(["lens", "page", *map(str, words)])


@pytest.fixture
def refused(call, capsys, tmp_path):
    """The one line with which the words are refused; nothing is written or changed."""

    def line(*words):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit) as end:
            call(*words)
        assert end.value.code == 2
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    return line


# the command


def test_the_command_writes_one_self_contained_file(call, capsys, tmp_path, run):
    call("lens.html", "--run", run)
    text = (tmp_path / "lens.html").read_text()
    assert "1 run laid over" in capsys.readouterr().out
    assert len(text) < 1_000_000
    assert re.match(pages.MARK, text)
    assert set(re.findall(r"\w+://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert set(re.findall(r"<link [^>]*>", text)) == {'<link rel="icon" href="data:,">'}
    assert "src=" not in text
    assert "@import" not in text
    assert "url(http" not in text
    call("lens.html")  # ours may be replaced
    assert "Recorded rows" not in (tmp_path / "lens.html").read_text()


def test_a_place_that_cannot_be_written_is_one_line(refused, tmp_path):
    (tmp_path / "lens.html").write_text("<!doctype html><title>mine</title>")
    assert "is not replaced" in refused("lens.html")
    (tmp_path / "docs").mkdir()
    assert "docs/lens.html" in refused("docs")
    assert "folder missing does not exist" in refused("missing/lens.html")
    assert not (tmp_path / "missing").exists()


def test_a_run_without_a_record_says_how_to_make_one(refused, tmp_path):
    path = write_run(tmp_path / "runs", data="shapes", epochs=4)
    said = refused("lens.html", "--run", path)
    assert "lens.jsonl" in said
    assert "marginlens pretrain ... --lens 50" in said
    assert "does not exist" in refused("lens.html", "--run", "nowhere")
    write_lens(path, steps=0)
    assert "--lens 50" in refused("lens.html", "--run", path)


def damage(name):
    """Return a function that breaks the second line of a lens.jsonl, by a name."""

    def change(line):
        joint = line["joint"]
        match name:
            case "no joint":
                del line["joint"]
            case "few edges":
                joint["theta"].pop()
            case "falling edges":
                joint["q"][3] = 0.0
            case "negative count":
                joint["counts"][0][0] = -1
            case "fractions of rows":
                joint["counts"][0][0] = 0.5
            case "few counts":
                joint["counts"][4].pop()
            case "angle beyond pi":
                joint["theta"][-1] = 4.0
            case "text for a step":
                line["step"] = "50"

    return change


DAMAGES = ["no joint", "few edges", "falling edges", "negative count", "fractions of rows", "few counts"]
DAMAGES += ["angle beyond pi", "text for a step", "no JSON", "an infinite edge", "not UTF-8"]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_one_line_with_file_and_line(refused, tmp_path, name):
    path = write_run(tmp_path / "runs", data="shapes", epochs=4)
    lines = write_lens(path)
    damage(name)(lines[1])
    texts = [json.dumps(line).encode() for line in lines]
    if name in ("no JSON", "not UTF-8", "an infinite edge"):
        texts[1] = {"no JSON": b"{half", "not UTF-8": b"\xff", "an infinite edge": texts[1]}[name]
        texts[1] = texts[1].replace(b"0.95", b"Infinity")
    (path / "lens.jsonl").write_bytes(b"\n".join(texts) + b"\n")
    said = refused("lens.html", "--run", path)
    assert str(path / "lens.jsonl") in said
    assert "line 2" in said


def test_a_line_that_a_killed_process_left_is_skipped(tmp_path):
    path = write_run(tmp_path / "runs", data="shapes", epochs=4)
    write_lens(path)
    with (path / "lens.jsonl").open("a") as file:
        file.write('{"step": 200, "joi')
    assert [line.step for line in pages.recorded(open_run(path))] == [50, 100, 150]


def test_a_long_record_is_thinned_and_keeps_its_ends(run):
    steps = [line.step for line in pages.recorded(open_run(run))]
    assert len(steps) == pages.MOST_STEPS
    assert (steps[0], steps[-1]) == (50, 5000)
    assert steps == sorted(set(steps))


def test_what_a_run_is_called_is_text(tmp_path):
    path = write_run(tmp_path / "runs", data="shapes", epochs=4)
    path = path.rename(path.with_name("<script>alert(1)<!--"))
    write_lens(path)
    text = pages.page([open_run(path)])
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;!--") == 1


def test_presets_are_effects_that_python_knows():
    for preset in pages.PRESETS:
        assert str(ml.effect(preset.effect)) == preset.effect
        assert len(preset.says.split()) < 28
    words = " ".join(preset.name for preset in pages.PRESETS)
    assert all(name in words for name in ("Fig. 1", "Fig. 2", "Fig. 8", "ArcFace", "DCL", "s = 20"))
    (dcl,) = (preset for preset in pages.PRESETS if preset.name == "DCL")
    assert ml.effect(dcl.effect) == ml.Attenuation(alpha=1)


def test_the_angles_that_presets_name_are_right():
    for preset in pages.PRESETS:
        for number in re.findall(r"(\d+)°", preset.says):
            effect = ml.effect(preset.effect)
            where = theory.peak_angle(effect.m1) if "largest" in preset.says else math.pi - effect.m1
            assert round(math.degrees(where)) == int(number)


# effects with and without JavaScript


def test_effects_without_javascript_are_named():
    missing = [name for name in effects.EFFECTS if name not in pages.TWINS]
    assert set(pages.TWINS) <= set(effects.EFFECTS)
    if missing:
        pytest.skip(f"no JavaScript yet for {', '.join(missing)}; the page says so")


def test_a_new_effect_is_one_class_and_the_page_says_that_it_is_missing(monkeypatch):
    assert "Not on this page yet" not in pages.page()
    monkeypatch.setitem(effects.EFFECTS, "focal", ml.Plain)
    assert re.search(r"Not on this page yet:\s<code>focal</code>\.", pages.page())


# in a real browser


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium or chromedriver is not on this machine")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1400"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    found.set_script_timeout(10)
    yield found
    found.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory, run):
    folder = tmp_path_factory.mktemp("pages")
    found = {"plain": folder / "lens.html", "run": folder / "run.html"}
    found["plain"].write_text(pages.page())
    found["run"].write_text(pages.page([open_run(run)]))
    return found


def wish(browser, colours="light", motion="reduce"):
    """Set what the reader's system asks of pages."""
    features = [{"name": "prefers-color-scheme", "value": colours}, {"name": "prefers-reduced-motion", "value": motion}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture
def show(browser, files):
    """Open a page; after the test, the console has no message and nothing was fetched."""

    def opened(name="plain", link="", **wishes):
        wish(browser, **wishes)
        browser.get(f"{files[name].as_uri()}?{next(VISITS)}{link}")  # a new address, or only the hash would change
        return browser

    yield opened
    assert browser.execute_script("return performance.getEntriesByType('resource').map(x => x.name)") == []
    assert browser.get_log("browser") == []


def settled(browser):
    """Wait until two frames are drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return browser


def get(browser, selector):
    return browser.find_element("css selector", selector)


def code(browser):
    return settled(browser).find_element("id", "code").text


def facts(browser):
    """Return the state in a link, as a dictionary."""
    link = settled(browser).find_element("id", "link").get_attribute("href").split("#")[1]
    return dict(pair.split("=", 1) for pair in link.split("&"))


def near(found, expected, name):
    """Each pair of numbers agrees to TOLERANCE, relatively."""
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in (found, expected))
    error = ((ours - theirs).abs() / theirs.abs().clamp(min=1e-290)).max()
    assert error <= TOLERANCE, f"{name}: relative error {error:.3g}"


def test_every_twin_is_in_javascript(show):
    assert set(show().execute_script("return Object.keys(lens.EFFECTS)")) == set(pages.TWINS)


def test_javascript_multiplies_as_python_does(show):
    """525 points for each effect of the catalogue and more products, at two betas."""
    theta = [math.pi * (i + 0.5) / 25 for i in range(25)]
    q = [(j + 0.5) / 21 for j in range(21)]
    listed = [*map(str, EFFECTS), *MORE]
    script = """const [names, theta, q, beta] = arguments;
        return JSON.stringify(names.map(name => {
            const factors = lens.parse(name), found = [[], []];
            for (const x of theta) for (const y of q) {
                const {sign, positive, negative} = lens.multipliers(factors, lens.rowAt(x, y, 0.25), beta);
                found[0].push(sign * Math.exp(positive));
                found[1].push(Math.exp(negative));
            }
            return found;
        }))"""  # as text: the driver is slow with long lists
    grid = torch.tensor(theta, dtype=torch.float64)[:, None], torch.tensor(q, dtype=torch.float64)[None]
    browser = show()
    for beta in (0.3, 1.0):
        found = json.loads(browser.execute_script(script, listed, theta, q, beta))
        for name, (positive, negative) in zip(listed, found, strict=True):
            expected = theory.multipliers(name, *grid, 0.25, beta)
            near(positive, expected.positive, f"{name}, beta {beta}")
            near(negative, expected.negative, f"{name}, beta {beta}")


@pytest.mark.parametrize("tau", [0.01, 0.25])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_forces_are_the_gradients_of_the_loss(show, tau, beta):
    """In 150 digits, also where factors overflow alone: tau = 0.01 and probabilities of e^-190."""
    angles = [1.9, 1.2, 2.6, 0.8]
    cases = [0.05, 0.9, 2.8]
    listed = [*map(str, EFFECTS), *MORE]
    script = """const [names, cases, angles, tau, beta] = arguments;
        return names.map(name => cases.map(theta => {
            const {positive, negatives} = lens.forces(lens.parse(name), theta, angles, tau, beta);
            return [positive, ...negatives];
        }))"""
    found = show().execute_script(script, listed, cases, angles, tau, beta)
    for name, rows in zip(listed, found, strict=True):
        for theta, ours in zip(cases, rows, strict=True):
            exact = [mp.mpf(x) for x in (theta, *angles)]
            _, slopes = oracle_mpmath.row([mp.cos(x) for x in exact], 0, mp.mpf(tau), mp.mpf(beta), ml.effect(name))
            expected = [float(-mp.sin(x) * slope) for x, slope in zip(exact, slopes, strict=True)]
            pairs = [(a, b) for a, b in zip(ours, expected, strict=True) if abs(b) > 1e-290]
            assert pairs or name == "emphasis(s=0)"
            near(*zip(*pairs, strict=True), f"{name} at {theta}")


def test_the_string_form_goes_to_javascript_and_back(show):
    listed = [*map(str, EFFECTS), *MORE]
    back = show().execute_script("return arguments[0].map(name => lens.spell(lens.parse(name)))", listed)
    assert [ml.effect(text) for text in back] == [ml.effect(text) for text in listed]
    bad = [
        "focal(g=2)",
        "margin(m3=1)",
        "ratio",
        "margin(m1=x)",
        "margin(m1=1",
        "",
        "constructor",
        "margin(toString=1)",
    ]
    script = "return arguments[0].map(name => { try { lens.parse(name); return ''; } catch (e) { return e.message; } })"
    assert all(show().execute_script(script, bad))


def test_it_opens_with_a_margin(show):
    browser = show()
    assert browser.title == "marginlens lens"
    start = pages.PRESETS[pages.START]
    assert code(browser) == f'marginlens.info_nce(q, k, tau=0.25, effect="{start.effect}")'
    assert get(browser, "#says").text == start.says
    assert "1.39" in get(browser, "#left-reads").text  # sin(40 degrees + 0.4) / sin(40 degrees)
    assert math.sin(math.radians(40) + 0.4) / math.sin(math.radians(40)) == pytest.approx(1.39, abs=5e-3)


def drag(browser, index, degrees):
    """Take the point with the mouse and turn it to an angle."""
    from selenium.webdriver.common.action_chains import ActionChains

    script = """const box = document.getElementById("circle"), at = new DOMPoint(...arguments[0]);
        const {x, y} = at.matrixTransform(box.getScreenCTM()); return [x, y]"""

    def place(angle):
        x, y = browser.execute_script(script, [150 * math.sin(angle), -150 * math.cos(angle)])
        return round(x), round(y)

    now = float(get(browser, f"[data-point='{index}']").get_attribute("aria-valuenow"))
    chain = ActionChains(browser, duration=20)
    for k, angle in enumerate((math.radians(now), math.radians(degrees))):
        chain.w3c_actions.pointer_action.move_to_location(*place(angle))
        chain.w3c_actions.pointer_action.pointer_down() if k == 0 else chain.w3c_actions.pointer_action.pointer_up()
    chain.perform()


def test_a_point_is_dragged_with_the_mouse(show):
    browser = show()
    before = get(browser, ".force").get_attribute("d")
    drag(browser, -1, 100)
    assert float(facts(browser)["positive"]) == pytest.approx(100, abs=1)
    assert "100° from its anchor" in get(browser, "#now").text
    drag(browser, 0, -20)
    assert float(facts(browser)["negatives"].split(",")[0]) == pytest.approx(-20, abs=1)
    assert get(browser, ".force").get_attribute("d") != before
    assert get(browser, "#says").text == pages.PRESETS[pages.START].says  # the effect is still the example's


def test_a_point_is_dragged_by_touch(show):
    browser = show()
    box = "const {x, y, width, height} = document.querySelector(arguments[0]).getBoundingClientRect();"
    x, y = browser.execute_script(f"{box} return [x + width / 2, y + height / 2]", "[data-point='-1'] .body")
    touch = "Input.dispatchTouchEvent"
    browser.execute_cdp_cmd(touch, {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for step in range(1, 5):
        browser.execute_cdp_cmd(touch, {"type": "touchMove", "touchPoints": [{"x": x + 4 * step, "y": y + 15 * step}]})
    browser.execute_cdp_cmd(touch, {"type": "touchEnd", "touchPoints": []})
    assert float(facts(browser)["positive"]) > 50


def test_a_point_is_moved_with_the_keyboard(show):
    from selenium.webdriver.common.keys import Keys

    browser = show()
    handle = get(browser, "[data-point='-1']")
    handle.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.PAGE_UP, Keys.ARROW_LEFT)
    settled(browser)
    assert handle.get_attribute("aria-valuenow") == "51"
    assert handle.get_attribute("aria-valuetext").startswith("51 degrees from the anchor, weight ")
    focus = "return getComputedStyle(arguments[0].querySelector('.focus')).stroke"
    assert browser.execute_script(focus, handle) != "rgba(0, 0, 0, 0)"
    handle.send_keys(Keys.END)
    settled(browser)
    assert handle.get_attribute("aria-valuenow") == "180"
    assert browser.execute_script("return scrollY") == 0


def test_a_repelled_positive_is_shown(show):
    browser = show(link="#effect=margin(m1=0.5)&positive=140")
    towards = "return [...document.querySelectorAll('.force')].at(-1).getAttribute('d')"  # the positive's
    assert not get(browser, "#repelled").is_displayed()
    pulled = browser.execute_script(towards)
    get(browser, "[data-point='-1']").send_keys("\ue00e" * 2)  # page up: 160 degrees
    assert get(settled(browser), "#repelled").is_displayed()
    assert "so it is repelled" in get(browser, "#now").text
    turn = re.compile(r"A[\d.]+ [\d.]+ 0 0 (\d)")
    assert turn.search(pulled)[1] != turn.search(browser.execute_script(towards))[1]
    assert "repelled" in get(browser, "#left").get_attribute("innerHTML")
    assert "repelled" not in get(browser, "#right").get_attribute("innerHTML")


@pytest.mark.parametrize("degrees", [0, 180])
def test_where_only_a_margin_turns_the_positive_no_number_is_made_up(show, degrees):
    browser = show(link=f"#effect=margin(m1=0.5)&positive={degrees}")
    assert "Here the margin turns it, and the plain loss does not." in get(browser, "#now").text
    assert ("repelled" in get(browser, "#now").text) == (degrees == 180)
    assert "∞" in get(browser, "#numbers tbody tr").text
    assert "∞" not in get(show(link=f"#effect=emphasis(s=20)&positive={degrees}"), "#numbers").text


SLIDERS = {
    "margin.m1": "margin(m1=0.41)",
    "margin.m2": "margin(m1=0.4, m2=0.01)",
    "emphasis.s": "emphasis(s=21)",
    "emphasis.c": "emphasis(s=20, c=10)",
    "ratio.m1": "ratio(m1=0.41)",
    "attenuation.alpha": "attenuation(alpha=0.99)",
    "tau": "tau=0.26",
    "beta": "beta=0.99",
    "copies": "",
}


@pytest.mark.parametrize("key", SLIDERS)
def test_every_slider_changes_the_loss(show, key):
    from selenium.webdriver.common.keys import Keys

    effect = {"attenuation": "attenuation(alpha=1)", "ratio": "ratio(m1=0.4)"}.get(key.split(".")[0], "plain")
    effect = {"margin": "margin(m1=0.4)", "emphasis": "emphasis(s=20)"}.get(key.split(".")[0], effect)
    browser = show(link=f"#effect={effect}")
    down = key in ("emphasis.c", "attenuation.alpha", "beta")
    before = get(browser, "#now").text
    slider = get(browser, f"input[data-key='{key}']")
    slider.send_keys(*[Keys.ARROW_LEFT if down else Keys.ARROW_RIGHT] * (2 if key == "emphasis.s" else 1))
    end = time.monotonic() + 5.0
    while SLIDERS[key] not in code(browser) and time.monotonic() < end:  # keys arrive one after another
        time.sleep(0.05)
    assert SLIDERS[key] in code(browser)
    if key == "copies":
        slider.send_keys(Keys.END)
        assert facts(browser)["copies"] == "251"
        assert get(browser, "#now").text != before
    assert slider.get_attribute("aria-valuetext")


def test_effects_multiply(show):
    browser = show(link="#effect=plain")
    for name in ("emphasis", "attenuation"):
        get(browser, f"input[data-key='on.{name}']").click()
    assert 'effect="emphasis(s=20) * attenuation(alpha=1)"' in code(browser)
    get(browser, "input[data-key='attenuation.kind'][value='II']").click()
    assert "attenuation(alpha=1, kind=II)" in code(browser)
    get(browser, "input[data-key='on.ratio']").click()
    get(browser, "input[data-key='ratio.scope'][value='row']").click()
    assert "ratio(m1=0.4, scope=row)" in code(browser)
    spelled = re.search('effect="(.*)"', code(browser))[1]
    assert len(ml.effect(spelled).factors) == 3
    assert "Eq. 9" in get(browser, "#left-equation").text


@pytest.mark.parametrize("index", range(len(pages.PRESETS)), ids=[preset.name for preset in pages.PRESETS])
def test_presets(show, index):
    browser, preset = show(), pages.PRESETS[index]
    get(browser, f"[data-preset='{index}']").click()
    assert f'effect="{preset.effect}"' in code(browser)
    assert get(browser, "#says").text == preset.says
    held = facts(browser)
    assert (float(held["positive"]), held["maps"]) == (preset.positive, preset.maps)
    assert float(held["tau"]) == preset.tau
    pressed = "return [...document.querySelectorAll('[data-preset]')].map(x => x.getAttribute('aria-pressed'))"
    assert [i for i, x in enumerate(browser.execute_script(pressed)) if x == "true"] == [index]
    for side in ("left", "right", "curve"):
        assert re.search(r"Eq\. \d|Fig\. \d|Lemma|Theorem", get(browser, f"#{side}-equation").text)
        drawn = get(browser, f"#{side}").get_attribute("innerHTML")
        assert "NaN" not in drawn
        assert "Infinity" not in drawn
        assert "undefined" not in drawn


def test_maps_are_coloured_by_weight(show):
    """Blue below 1, orange above, and the neutral colour at 1."""
    script = """const image = new Image(), done = arguments[1];
        image.onload = () => {
            const canvas = document.createElement("canvas");
            const context = canvas.getContext("2d", {willReadFrequently: true});
            [canvas.width, canvas.height] = [image.width, image.height];
            context.drawImage(image, 0, 0);
            const at = x => [...context.getImageData(Math.round(x * image.width), 60, 1, 1).data].slice(0, 3);
            done([at(0.2), at(0.433), at(0.75)]);
        };
        image.src = document.querySelector("#" + arguments[0] + " image").getAttribute("href")"""
    browser = show(link="#effect=margin(m1=0.4)&maps=split")  # the factor is 1 at (pi - m1) / 2
    near_, one, far = browser.execute_async_script(script, "left")
    assert near_[0] > near_[2] + 40
    assert far[2] > far[0] + 40
    assert max(one) - min(one) < 20


def test_the_link_holds_the_state(show):
    link = "#effect=margin(m1=0.7,+m2=0.2)+*+emphasis(s=3,+c=2)&tau=0.1&beta=0.5&copies=7&positive=-33.5"
    link += "&negatives=10,20,30,-40,-50,-60&maps=gradients"
    browser = show(link=link)
    assert code(browser).endswith('tau=0.1, beta=0.5, effect="margin(m1=0.7, m2=0.2) * emphasis(s=3, c=2)")')
    first, held = get(browser, "#link").get_attribute("href"), facts(browser)
    assert (held["positive"], held["copies"], held["maps"]) == ("-33.5", "7", "gradients")
    assert held["negatives"] == "10,20,30,-40,-50,-60"
    numbers = get(browser, "#numbers").text
    browser = show(link="#" + first.split("#")[1])
    assert get(settled(browser), "#link").get_attribute("href").split("#")[1] == first.split("#")[1]
    assert get(browser, "#numbers").text == numbers
    get(browser, "[data-preset='5']").click()
    end = time.monotonic() + 20
    while "attenuation" not in browser.current_url and time.monotonic() < end:
        time.sleep(0.05)
    assert browser.current_url == get(browser, "#link").get_attribute("href")
    browser.execute_script("location.hash = arguments[0]", first.split("#")[1])  # a link within the page
    settled(browser)
    assert get(settled(browser), "#numbers").text == numbers


@pytest.mark.parametrize(
    "effect", ["focal(g=2)", "<img src=x onerror=alert(1)>", "margin(m1=9)", "ratio(m1=1) * ratio(m1=1)"]
)
def test_a_link_that_asks_for_what_there_is_not(show, effect):
    browser = show(link=f"#effect={effect}&tau=nan&beta=-3&positive=1e9&negatives=1,2&maps=x&run=7&step=-1&odd")
    assert effect in get(browser, "#notice").text
    assert 'tau=0.25, beta=0, effect="plain"' in code(browser)
    assert facts(browser)["positive"] == "180"
    assert "NaN" not in get(browser, "main").text
    get(browser, "[data-preset='1']").click()
    assert not get(settled(browser), "#notice").is_displayed()


def test_a_recorded_run_is_laid_over(show, run):
    browser = show("run")
    assert code(browser) == 'marginlens.info_nce(q, k, tau=0.2, effect="margin(m1=0.4)")'
    assert run.name in get(browser, "#says").text
    count = "return document.querySelectorAll(`#${arguments[0]} ${arguments[1]}`).length"
    assert browser.execute_script(count, "left", ".rows") == browser.execute_script(count, "right", ".rows") == 3
    assert browser.execute_script(count, "curve", ".hist") == 36
    centres = [(9, 16, 100), (10, 16, 10), (9, 15, 10)]
    found = [theory.multipliers("margin(m1=0.4)", math.pi * (i + 0.5) / 36, (j + 0.5) / 20, 0.2) for i, j, _ in centres]
    means = [sum(n * float(m[k]) for m, (_, _, n) in zip(found, centres, strict=True)) / 120 for k in (0, 1)]
    said = get(browser, "#summary").text
    assert said.startswith("120 recorded rows")
    assert f"pulls by about {means[0]:.3g}" in said
    assert f"pushes by {means[1]:.3g}" in said
    assert "Median angle 48°" in said  # 45 + 5 * 60 / 110
    assert "none is repelled" in said
    assert get(browser, "#step-now").text == "5,000"
    get(browser, "#step").send_keys("\ue012")  # left
    assert facts(browser)["step"] == "58"
    assert get(browser, "#step-now").text == f"{pages.recorded(open_run(run))[58].step:,}"
    get(browser, "#run option[value='-1']").click()
    assert settled(browser).execute_script(count, "left", ".rows") == 0
    assert not get(browser, "#summary").is_displayed()


def test_repelled_rows_are_counted(show):
    browser = show("run", "#effect=margin(m1=2.4)&tau=0.2&run=0&step=0")
    assert "91.7 % are repelled" not in get(browser, "#summary").text  # 47.5 and 52.5 degrees, border at 42.5
    assert "100.0 % are repelled" in get(browser, "#summary").text
    browser = show("run", "#effect=margin(m1=2.3)&tau=0.1&run=0&step=0")  # border at 48.2
    assert "8.3 % are repelled" in get(browser, "#summary").text
    assert "those at the run's tau, 0.2" in get(browser, "#summary").text


def test_let_go_descends_and_put_back_undoes_it(show):
    browser = show()
    assert get(browser, "#go").text == "Take 20 steps"  # motion is unwelcome
    before = facts(browser)
    get(browser, "#go").click()
    after = facts(browser)
    assert 0 < float(after["positive"]) < float(before["positive"])
    assert get(browser, "#go").get_attribute("aria-pressed") == "false"
    get(browser, "#back").click()
    assert facts(browser) == before
    browser = show(motion="no-preference")
    get(browser, "#go").click()
    assert get(browser, "#go").text == "Stop"
    end = time.monotonic() + 20
    while facts(browser)["positive"] == before["positive"] and time.monotonic() < end:
        time.sleep(0.02)
    get(browser, "#go").click()
    assert get(browser, "#go").text == "Let go"
    assert float(facts(browser)["positive"]) < float(before["positive"])


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_as_wide_as_the_window(show, width):
    browser = show("run")
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        settled(browser)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        if width < 600:  # the circle stays in sight while the sliders are moved
            browser.execute_script("document.querySelector('.loss').scrollIntoView({block: 'end'})")
            assert browser.execute_script("return document.getElementById('circle').getBoundingClientRect().top") == 0
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_dark_page_is_dark(show):
    paper = "return getComputedStyle(document.body).backgroundColor"
    picture = "return document.querySelector('#left image').getAttribute('href')"
    light = [settled(show()).execute_script(script) for script in (paper, picture)]
    dark = [settled(show(colours="dark")).execute_script(script) for script in (paper, picture)]
    assert light[0] == "rgb(255, 255, 255)"
    assert sum(map(int, re.findall(r"\d+", dark[0]))) < 120
    assert light[1] != dark[1]


@pytest.fixture(scope="module")
def axe(browser):
    """The source of axe-core, from npm's tarball with the pinned checksum."""
    tarball = CACHE / f"{AXE.replace('@', '-')}.tgz"
    if not tarball.is_file():
        if not (npm := shutil.which("npm")):
            pytest.skip("npm is not on this machine")
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", AXE, "--silent", "--pack-destination", str(CACHE)]
        try:
            subprocess.run(command, check=True, timeout=60, capture_output=True, cwd=CACHE)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"npm cannot fetch {AXE}: {error}")
    content = tarball.read_bytes()
    assert b64encode(hashlib.sha512(content).digest()).decode() == INTEGRITY, f"remove {tarball}"
    with tarfile.open(tarball) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_nothing_serious_is_found_by_axe(show, axe, colours):
    browser = show("run", "#effect=margin(m1=0.5)+*+emphasis(s=20)&positive=160&run=0", colours=colours)
    browser.execute_script(axe)
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    assert len(found["passes"]) > 15
    serious = [
        (finding["id"], [node["html"][:90] for node in finding["nodes"]][:3])
        for finding in found["violations"]
        if finding["impact"] in ("serious", "critical")
    ]
    assert serious == []
