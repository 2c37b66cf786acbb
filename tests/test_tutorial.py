"""docs/start/tutorial.md, followed: its files are saved, and its commands run in order, in an empty folder.

Each `text` block is compared with what the commands above it printed, whatever the numbers.
"""

import re
import runpy
import shlex
from glob import glob
from pathlib import Path

import pytest
from PIL import Image

from marginlens.cli import main
from marginlens.runs.store import scan

START = Path(__file__).parents[1] / "docs" / "start"
PARTS = re.compile(
    r"```python\n(?P<code>.*?)```|```text\n(?P<shown>.*?)```|^    (?P<command>\S.*?)$", flags=re.S | re.M
)
VARIES = re.compile(r"seed0-[0-9a-f]{10}|~/\S+|\w+/\d+\.jpg|\d[\d,.]*\d|\d")
FEW = {  # in place of what the page has: two epochs, of 40 photos
    "range(100)": "range(12)",
    "--epochs 40": "--epochs 2 --workers 0",
    "--epochs 20 --batch 16": "--epochs 1 --batch 16 --lr 0.01 --workers 0",
    "--size 64 --batch 32": "--size 32 --batch 16",
    "--k 10": "--k 10 --workers 0",
    "--from photos": "--from photos --workers 0",
    "--out photos.safetensors": "--out photos.safetensors --workers 0",
}


def parts(text):
    """The page's parts in order: ("code", a file's text), ("shown", printed lines) or ("command", a line)."""
    for part in PARTS.finditer(text):
        yield part.lastgroup, part[part.lastgroup]


def run(command):
    """Run a command line as a shell would: quotes go, and stars become names of files."""
    program, *words = shlex.split(command)
    words = [name for word in words for name in (sorted(glob(word)) if "*" in word else [word])]
    if program == "python":
        runpy.run_path(*words, run_name="__main__")
    else:
        assert program == "marginlens"
        main(words)


def pattern(line):
    """Return a printed line without its numbers, hashes and folders."""
    kept = (re.escape(text) for text in VARIES.split(line))
    return r"[\w./~,-]+".join(kept)


def follow(text, capsys):
    """Follow the page; return the printed text of each command."""
    printed, since = {}, ""
    for kind, content in parts(text):
        if kind == "code":
            Path(re.match(r"# (\w+\.py):", content)[1]).write_text(content)
        elif kind == "command":
            run(content)
            printed[content], progress = capsys.readouterr()
            since += progress + printed[content]
        else:
            for line in content.splitlines():
                assert re.search(f"^{pattern(line)}$", since, flags=re.M), f"{line!r} is not in\n{since}"
            since = ""
    return printed


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def check_what_is_left(printed):
    runs = scan("runs")
    assert sorted(run.settings.effect for run in runs) == ["attenuation(alpha=1)", "plain"]
    assert all(run.state == "complete" for run in runs)
    similar = printed["python similar.py"].split()
    assert similar[0] == Path("photos.files.txt").read_text().split()[0]
    assert len(set(similar)) == 6
    for picture in ("photos.png", "photos-views.png", "similar.png"):
        with Image.open(picture) as image:
            assert image.width > 500
    assert all(run.name in printed["marginlens runs"] for run in runs)
    return similar


def test_the_tutorial_with_few_photos_and_one_epoch(capsys):
    text = (START / "tutorial.md").read_text()
    for words, fewer in FEW.items():
        assert words in text
        text = text.replace(words, fewer)
    check_what_is_left(follow(text, capsys))


@pytest.mark.slow
def test_the_tutorial(capsys, all_cores):
    """As a newcomer follows it. Guessing gives 25 %."""
    printed = follow((START / "tutorial.md").read_text(), capsys)
    similar = check_what_is_left(printed)
    assert sum(name.split("/")[0] == similar[0].split("/")[0] for name in similar[1:]) >= 3
    probes = [float(re.search(r"top-1 ([\d.]+)", text)[1]) for line, text in printed.items() if " probe " in line]
    assert len(probes) == 2
    assert min(probes) > 60


def test_the_check_of_an_installation(capsys):
    (code,) = (content for kind, content in parts((START / "install.md").read_text()) if kind == "code")
    exec(code, {})
    value = float(re.search(r"tensor\(([\d.]+)\)", capsys.readouterr().out)[1])
    assert value == pytest.approx(5.6, abs=0.1)
