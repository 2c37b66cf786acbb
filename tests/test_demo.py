"""The demo: small, from end to end, and its page."""

import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageColor

import marginlens as ml
from marginlens import demo
from marginlens.cli import main
from marginlens.data import shapes, store
from marginlens.errors import Stopped
from marginlens.evals.probe import Probe

ROOT = Path(__file__).parents[1]


def test_stopped_it_says_how_to_go_on(monkeypatch, tmp_path):
    def stop(*args, **settings):
        raise Stopped("stopped by SIGTERM; kept 5 of 8 steps. Go on with --resume", 143)

    monkeypatch.setattr(demo, "pretrain", stop)
    with pytest.raises(
        Stopped, match=r"^stopped by SIGTERM; kept 5 of 8 steps. The same command goes on there$"
    ) as end:
        demo._run(demo.settings_of("plain", 1), tmp_path)
    assert end.value.code == 143


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The demo with one epoch on a few images, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARGINLENS_DATA", str(folder / "data"))
        patch.setattr(demo, "PROBE", Probe(epochs=1, batch=64, lr=0.5))
        few = {split: [store.Batch(*shapes.draw(count, split))] for split, count in (("train", 256), ("test", 128))}
        store.write("shapes", few, shapes.CLASSES)
        main(["demo", "--out", str(folder / "demo"), "--epochs", "1"])
        yield folder / "demo"


class Tags(HTMLParser):
    """Every tag's attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_is_whole_and_needs_no_network(made):
    text = (made / "report.html").read_text()
    page = Tags()
    page.feed(text)
    for _, attributes in page.found:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:") or attributes[name] == "lens.html"
    assert (made / "lens.html").is_file()
    assert [tag for tag, _ in page.found if tag in ("figure", "svg", "script")] == ["figure", "svg"] * 5
    assert text.count("<tr>") == 6 + 1 + len(demo.SWEEP)  # the random encoder, four runs, the sweep, two heads
    assert len(text) < 1e6
    assert [
        w for w in ("What happened", "Accuracy", "Training", "sees", "Maps", "Angles", "sweep") if w not in text
    ] == []
    assert "nan" not in re.sub(r"<script.*?</script>|base64,[^\"]*", "", text, flags=re.S).lower()


def test_drawings_share_no_id_and_their_text_can_be_searched(made):
    text = (made / "report.html").read_text()
    page = Tags()
    page.feed(text)
    ids = [a["id"] for _, a in page.found if "id" in a]
    assert len(ids) == len(set(ids))
    uses = {a["xlink:href"][1:] for _, a in page.found if "xlink:href" in a} | set(re.findall(r"url\(#(.*?)\)", text))
    assert uses <= set(ids)
    words = re.findall(r"<text [^>]*>(.*?)</text>", text)
    for word in (*demo.COLOURS, *shapes.CLASSES, "loss", "kNN, top-1 in %", "degrees"):
        assert word in words


def test_the_picture_is_a_picture(made):
    with Image.open(made / "report.png") as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50


def test_it_shows_what_was_measured(made, capsys):
    """Run again, nothing is trained again, the files are the same, and the table has the records' numbers."""
    capsys.readouterr()
    before = [(made / name).read_bytes() for name in ("report.html", "lens.html", "report.png")]
    main(["demo", "--out", str(made), "--epochs", "1", "--json"])
    said = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(said.out)["rows"]}
    assert list(rows) == ["random", *demo.EFFECTS]
    assert said.err.count("is already complete") == len(demo.EFFECTS)
    assert [(made / name).read_bytes() for name in ("report.html", "lens.html", "report.png")] == before
    text = (made / "report.html").read_text()
    for path in (made / "runs").iterdir():
        (record,) = (path / "evaluations").glob("probe-*.json")
        found = json.loads(record.read_text())["top1"]
        effect = json.loads((path / "config.json").read_text())["settings"]["effect"]
        assert rows[next(n for n, e in demo.EFFECTS.items() if e == effect)]["probe"] == found
        assert f"<td>{found:.1f} %</td>" in text


def test_its_seeds_are_those_of_the_records():
    """The package shows the summary of the sweep, and the choice is the protocol's."""
    spec = importlib.util.spec_from_file_location("demo_effects", ROOT / "benchmarks" / "demo_effects.py")
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    lines = [json.loads(line) for line in (ROOT / "results" / "demo_effects.jsonl").read_text().splitlines()]
    assert len(lines) == len(sweep.plan())
    assert sweep.summary(lines) == demo.SWEEP
    kept_back = {row["effect"]: row["holdout"][0] for row in demo.SWEEP if row["batch"] == 64}
    for kind in ("margin", "emphasis"):
        best = max((effect for effect in kept_back if effect.startswith(kind)), key=kept_back.get)
        assert demo.EFFECTS[kind] == best
    assert demo.seeds_of("plain").seeds >= 5


def shown(name, angle, norm):
    """A line of the demo with one row at an angle."""
    c = torch.tensor([angle]).deg2rad().cos()
    rows = ml.Rows(c, c.acos(), c, c, c, c, c, c, c, c)
    return demo.Shown(name, demo.EFFECTS[name], 80.0, 70.0, 1.0, ["an epoch"], {}, rows, norm)


def test_the_sentences_follow_the_numbers(monkeypatch):
    said = demo.lesson([shown("plain", 26, 7.0), shown("margin", 25.5, 7.1), shown("emphasis", 20, 7.3)])
    assert "no loss clearly beats plain" in said["What happened"]
    assert said["Why"].startswith("Emphasis weighs positives more and pulls them closest")
    closer = demo.lesson([shown("plain", 26, 7.0), shown("margin", 20, 7.1)])["Why"]
    assert closer.startswith("Margin pulls positives closest")
    assert "20°, and 26° with plain" in said["Why"]
    assert "about equally large here (mean norm 7.0 to 7.3)" in said["What a probe at one rate sees"]
    said = demo.lesson([shown("plain", 26, 1.0), shown("margin", 26, 1.0), shown("emphasis", 26, 4.0)])
    assert said["Why"].startswith("No loss pulled positives closer")
    assert "up to 4.0 times as large" in said["What a probe at one rate sees"]
    better = [dict(row, probe=[99.0, 1.0]) if row["effect"] == demo.EFFECTS["margin"] else row for row in demo.SWEEP]
    monkeypatch.setattr(demo, "SWEEP", better)
    assert "margin beat plain" in demo.lesson([shown("plain", 26, 1.0), shown("margin", 26, 1.0)])["What happened"]
    assert "below plain at batch 64 and" in demo.decoupled()
    assert "above plain at batch 32 (within the spread of seeds)" in demo.decoupled()


def test_the_page_in_a_browser(made, tmp_path):
    """It renders, the bars of every encoder are to be seen, and the console has no errors."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt-get install chromium")
    asked = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1100,3000"]
    command = [browser, *asked, f"--screenshot={tmp_path / 'page.png'}", (made / "report.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    with Image.open(tmp_path / "page.png") as image:
        seen = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)}
    for colour in demo.COLOURS.values():
        assert seen.get(ImageColor.getrgb(colour), 0) > 1000
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--epochs", "0"], "epochs is 0; it must be greater than or equal to 1"),
        (["--out", "/proc/nope"], "give --out another folder"),
    ],
)
def test_mistakes(capsys, options, line):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *options])
    assert caught.value.code == 2
    assert line in capsys.readouterr().err
