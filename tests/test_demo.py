"""The demo: small, from end to end, and its page."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from PIL import Image, ImageColor

from marginlens import demo
from marginlens.cli import main
from marginlens.data import shapes, store
from marginlens.errors import Stopped
from marginlens.evals.probe import Probe


def test_stopped_it_says_how_to_go_on(monkeypatch, tmp_path):
    def stop(*args, **settings):
        raise Stopped("stopped by SIGTERM; kept 5 of 8 steps. Go on with --resume", 143)

    monkeypatch.setattr(demo, "pretrain", stop)
    with pytest.raises(
        Stopped, match=r"^stopped by SIGTERM; kept 5 of 8 steps. The same command goes on there$"
    ) as end:
        demo._trained("plain", None, demo.settings_of("plain", 1), tmp_path)
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
            assert attributes.get(name, "data:").startswith("data:")
    assert [tag for tag, _ in page.found if tag in ("figure", "svg", "script")] == ["figure", "svg"] * 4
    assert text.count("<tr>") == 5  # a head, the random encoder and three runs
    assert len(text) < 1e6
    assert [w for w in ("Accuracy", "Training", "sees", "Maps", "Angles") if w not in text] == []
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
    before = [(made / name).read_bytes() for name in ("report.html", "report.png")]
    main(["demo", "--out", str(made), "--epochs", "1", "--json"])
    said = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(said.out)["rows"]}
    assert list(rows) == ["random", *demo.EFFECTS]
    assert said.err.count("is already complete") == 3
    assert [(made / name).read_bytes() for name in ("report.html", "report.png")] == before
    text = (made / "report.html").read_text()
    for path in (made / "runs").iterdir():
        (record,) = (path / "evaluations").glob("probe-*.json")
        found = json.loads(record.read_text())["top1"]
        effect = json.loads((path / "config.json").read_text())["settings"]["effect"]
        assert rows[next(n for n, e in demo.EFFECTS.items() if e == effect)]["probe"] == found
        assert f"<td>{found:.1f} %</td>" in text


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
