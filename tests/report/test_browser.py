"""The page in a real browser: it renders without console messages, sorts, filters, links to runs, draws curves."""

import shutil
import time

import pytest

from marginlens.paper import TABLES
from marginlens.report.figures import WIDTH
from marginlens.report.gather import gather
from marginlens.report.page import page
from marginlens.runs.store import scan
from tests.report.folders import CONTENT, evaluate, write_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not on this machine")


@pytest.fixture(scope="module")
def browser():
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = tmp_path_factory.mktemp("browser") / "runs"
    for seed, top1 in enumerate((89.9, 90.12, 89.8)):
        write_run(store, data="cifar10", seed=seed, probe=top1)
    write_run(store, data="cifar10", effect="emphasis(s=20)", probe=90.4)
    write_run(store, data="cifar10", effect="emphasis(s=20)", seed=1, done=40)
    failure = "<script>console.error('x')</script>"
    write_run(store, data="cifar10", effect="emphasis(s=5)", seed=1, done=0, failure=failure)
    write_run(store, data="cifar100", effect="emphasis(s=20)", epochs=20, probe=55.0)
    write_run(store, data="shapes", effect="margin(m2=0.3)", epochs=4, lr=0.1, probe=60.0)
    return store


def show(browser, folder, entries, paper=False):
    path = folder / "report.html"
    path.write_text(page(gather(entries, TABLES, paper=paper), ["runs"]))
    begin = time.monotonic()
    browser.get(path.as_uri())
    return time.monotonic() - begin, path.stat().st_size


@pytest.fixture
def shown(browser, store, tmp_path):
    show(browser, tmp_path, scan(store))
    yield browser
    assert browser.get_log("browser") == []


def rows(browser, key, column):
    """The texts of a column of the rows that are not hidden, in their order."""
    script = """return Array.from(document.querySelectorAll("#rows-" + arguments[0] + " > tr"))
        .filter(row => !row.hidden).map(row => row.cells[arguments[1]].textContent)"""
    return browser.execute_script(script, key, column)


def header(browser, key, name):
    path = f"//tbody[@id='rows-{key}']/../thead//button[text()='{name}']"
    return browser.find_element("xpath", path)


def box(browser, of):
    return browser.find_element("css selector", f".tools[data-of='{of}'] input[type=search]")


def test_it_renders(shown):
    assert shown.title == "marginlens report"
    assert rows(shown, "settings", 2) == [
        "plain",
        "emphasis(s=5)",
        "emphasis(s=20)",
        "emphasis(s=20)",
        "margin(m2=0.3)",
    ]
    assert rows(shown, "settings", 6)[:3] == ["89.94 ± 0.16", "", "90.40 (1 of 2 seeds)"]
    assert [rows(shown, "tab2", column) for column in range(3)] == [
        ["MoCo", "MoCo + pos."],
        ["89.413 ± 0.109", "90.663 ± 0.159"],
        ["89.94 ± 0.16", "90.40"],
    ]
    first = [rows(shown, "cells", column)[0] for column in range(10)]
    assert first[:8] == ["Tab. 2", "MoCo", "CIFAR10", "89.413 ± 0.109", "89.94 ± 0.16", "+0.53", "", "3"]
    assert first[9] == "seed 0: 89.90, seed 1: 90.12, seed 2: 89.80"
    assert "seed 1: interrupted at epoch 40 of 200" in rows(shown, "cells", 9)[1]
    assert rows(shown, "looks", 0) == ["20 of 200 epochs"]
    figure = shown.find_element("css selector", "#fig3 ~ .panels svg")
    assert len(figure.find_elements("css selector", "circle.dot")) == 2  # s = 1 and 20
    assert len(figure.find_elements("css selector", "path.printed")) == 4  # of Tab. 2: MoCo and SimCLR, plain and pos.


def test_numbers_sort_by_size_and_what_was_not_run_comes_last(shown):
    head = header(shown, "settings", "probe")
    head.click()
    assert rows(shown, "settings", 6) == ["55.00", "60.00", "89.94 ± 0.16", "90.40 (1 of 2 seeds)", ""]
    assert head.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    head.click()
    assert rows(shown, "settings", 6)[:3] == ["90.40 (1 of 2 seeds)", "89.94 ± 0.16", "60.00"]
    assert rows(shown, "settings", 6)[-1] == ""


def test_with_paper_every_row_is_there_and_sorts(browser, store, tmp_path):
    show(browser, tmp_path, scan(store), paper=True)
    assert len(rows(browser, "tab2", 0)) == 12
    assert rows(browser, "tab9", 2) == ["not run"] * 4
    header(browser, "tab2", "CIFAR10 published").click()
    numbers = [float(text.split()[0]) for text in rows(browser, "tab2", 1)]
    assert numbers == sorted(numbers)
    for _ in range(2):
        header(browser, "tab2", "CIFAR10 ours").click()
        assert rows(browser, "tab2", 2)[-1] == "not run"
        assert rows(browser, "tab2", 2)[0] != "not run"
    tools = box(browser, "rows-tab2").find_element("xpath", "..")
    tools.find_element("css selector", "input[type=checkbox]").click()
    assert len(rows(browser, "tab2", 0)) == 2
    assert browser.get_log("browser") == []


def test_a_header_works_from_the_keyboard(shown):
    head = header(shown, "cells", "table")
    head.send_keys("\ue007")  # enter
    found = rows(shown, "cells", 0)
    assert (found[0], found[-1]) == ("Fig. 3", "Tab. 3")


def test_filter(shown):
    search = box(shown, "rows-settings")
    search.send_keys("emphasis cifar100")
    assert rows(shown, "settings", 0) == ["cifar100"]
    tools = search.find_element("xpath", "..")
    assert tools.find_element("css selector", "output").text == "1 of 5 shown"


def test_a_number_leads_to_its_run(shown):
    box(shown, "all-runs").send_keys("nothing like this")
    link = shown.find_element("link text", "seed 1: 90.12")
    link.click()
    section = shown.find_element("css selector", link.get_attribute("href").split("report.html")[1])
    assert section.get_attribute("open") is not None
    assert section.is_displayed()
    assert "--effect plain --epochs 200 --seed 1" in section.text
    assert "NVIDIA H200" in section.text
    seen = "const y = arguments[0].getBoundingClientRect().top; return y >= 0 && y < innerHeight"
    assert shown.execute_script(seen, section)


def lines(browser, panel="loss"):
    """The setting of each line of a panel."""
    script = """const plot = Array.from(document.querySelectorAll("#curve-plots svg"))
        .find(svg => svg.querySelector(".name").textContent === arguments[0]);
        return Array.from(plot.querySelectorAll(".run-line")).map(line => line.dataset.setting)"""
    return browser.execute_script(script, panel)


def test_curves_of_every_run_in_the_colour_of_its_setting(shown):
    """Three seeds of plain are one colour; a run that failed in its first epoch has no curve."""
    plots = shown.find_elements("css selector", "#curve-plots svg")
    names = [plot.find_element("css selector", ".name").text for plot in plots]
    assert names[:4] == ["loss", "kNN, top-1 in %", "learning rate", "spread of the features"]
    assert lines(shown) == ["0", "0", "0", "1", "1", "2", "3"]
    classes = """return Array.from(document.querySelectorAll("#curve-plots figure:first-child path.line"))
        .map(line => line.className.baseVal)"""
    assert shown.execute_script(classes) == [f"line s{i} dash0" for i in (0, 0, 0, 1, 1, 2, 3)]
    titles = "return Array.from(document.querySelectorAll('#curve-plots g > title')).map(x => x.textContent)"
    assert any("s=20" in text and "seed 1: 3.6 at epoch 40" in text for text in shown.execute_script(titles))
    assert "NaN" not in shown.find_element("id", "curve-plots").get_attribute("innerHTML")


def test_settings_are_chosen_in_the_legend(shown):
    boxes = shown.find_elements("css selector", "#curve-settings input")
    boxes[0].click()
    assert lines(shown) == ["1", "1", "2", "3"]
    none, every = (shown.find_element("css selector", f"button[data-check='{to}']") for to in ("", "1"))
    none.click()
    assert shown.find_element("id", "curve-plots").text == "Choose a setting above."
    box(shown, "curve-settings").send_keys("margin")
    every.click()  # of those that the filter shows
    assert lines(shown) == ["3"]


def test_a_runs_own_link_chooses_its_curves(shown):
    shown.execute_script("location.hash = document.querySelector('details.run:last-of-type').id")
    shown.find_element("css selector", "details[open] a[data-curve]").click()
    assert lines(shown) == ["3"]
    chosen = shown.find_elements("css selector", "#curve-settings input:checked")
    assert [x.find_element("xpath", "..").text for x in chosen] == ["shapes, margin(m2=0.3), 4 epochs, lr=0.1"]


@pytest.mark.parametrize("count", [1, 4, 30])
def test_any_number_of_settings_has_curves(browser, tmp_path, count):
    """The first eight are drawn at first, each in a colour; of thirty-two no two look the same."""
    for number in range(count):
        write_run(tmp_path / "runs", data="shapes", epochs=3, lr=(number + 1) / 100)
    show(browser, tmp_path, scan(tmp_path / "runs"))
    assert lines(browser) == [str(i) for i in range(min(count, 8))]
    every = browser.find_element("css selector", "button[data-check='1']")
    assert every.is_displayed() == (count > 1)  # one setting needs no legend
    if count > 1:
        every.click()
    script = "return Array.from(document.querySelectorAll('#curve-settings path')).map(x => x.className.baseVal)"
    assert len(set(browser.execute_script(script))) == len(lines(browser)) == count
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_as_wide_as_the_window(shown, width):
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    shown.execute_script("document.querySelectorAll('details').forEach(x => x.open = true)")
    try:
        assert shown.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("odd", [{"holdout": 10000}, {"holdout": 10000, "epochs": 40, "momentum": 0.5, "batch": 1024}])
def test_a_panels_name_stays_inside_it(browser, tmp_path, odd):
    path = write_run(tmp_path / "runs", data="cifar100")
    for rate in (1.0, 10.0):
        evaluate(path, "probe", "cifar100", CONTENT["cifar100"], 60.0, {"lr": rate, **odd})
    show(browser, tmp_path, scan(tmp_path / "runs"))
    script = """return Array.from(document.querySelectorAll("figure.panel svg .name")).map(name => {
        const box = name.getBBox(); return [name.textContent, box.x, box.x + box.width]})"""
    names = {name: reach for name, *reach in browser.execute_script(script) if "probe" in name}
    assert len(names) == 1
    for left, right in names.values():
        assert 0 <= left < right <= WIDTH


def test_no_runs(browser, tmp_path):
    show(browser, tmp_path, [])
    assert browser.find_element("css selector", "header p").text.startswith("No runs in runs")
    show(browser, tmp_path, [], paper=True)
    assert set(rows(browser, "tab2", 2)) == {"not run"}
    header(browser, "tab2", "CIFAR10 published").click()
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_five_hundred_runs_open_in_a_few_seconds(browser, tmp_path):
    for number in range(500):
        lr = round(0.01 + (number % 100) / 1000, 3)
        write_run(tmp_path / "runs", data="cifar10", lr=lr, seed=number // 100, probe=80 + number / 50)
    seconds, size = show(browser, tmp_path, scan(tmp_path / "runs"))
    print(f"500 runs of 200 epochs: {size / 1e6:.1f} MB, loaded in {seconds:.2f} s")
    assert seconds < 10
    assert size < 10e6
    assert len(rows(browser, "settings", 0)) == 100
    assert rows(browser, "settings", 4)[:2] == ["", "lr=0.01"]
    assert browser.get_log("browser") == []
