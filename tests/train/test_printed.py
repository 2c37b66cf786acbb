"""Every command that we print works where it is printed: each is provoked, then typed as it stands there.

In the working directory are folders with the names of the data sets, as a newcomer has them.
"""

import ast
import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import requests

import marginlens as ml
from marginlens.cli import COMMANDS, main
from marginlens.data import prepare, sources
from marginlens.report.page import commands as of_page
from marginlens.runs.store import drop_weights
from tests.data.conftest import cifar10, cifar100, jpeg, small, tar_of  # noqa: F401

PACKAGE = Path(ml.__file__).parent
QUICK = "--encoder tiny --hidden 8 --out 8 --size 8 --batch 4 --epochs 1 --checkpoint-seconds 0 --runs runs --workers 0"
SHORT = {
    "probe": "--epochs 1 --workers 0",
    "transfer": "--epochs 1 --workers 0",
    "knn": "--workers 0",
    "embed": "--workers 0",
    "data prepare": "--workers 0",
    "pretrain": "--workers 0",
}
"""Added to a command so that it takes no time; none of it is needed for the command to work."""


def photos(folder, names=("cat", "dog"), count=5):
    rng = np.random.default_rng(0)
    for name in names:
        for i in range(count):
            jpeg(folder / name / f"{i}.jpg", rng, size=(20, 24))


def said(line, code=0):
    """All that a command line prints; it must end with this code."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        ended = 0
        try:
            main(shlex.split(line.removeprefix("marginlens ")))
        except SystemExit as end:
            ended = end.code or 0
    assert ended == code, out.getvalue()
    return out.getvalue()


def typed(line):
    """Run a printed command, shortened."""
    more = next((more for name, more in SHORT.items() if line.startswith(f"marginlens {name} ")), "")
    return said(f"{line} {more}")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A working directory with three folders of images, the data sets of these names, and a run on each."""
    folder = tmp_path_factory.mktemp("world")
    here = folder / "my files"
    photos(here / "photos")
    photos(here / "flat", ("",))
    photos(here / "half" / "train", count=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("MARGINLENS_DATA", str(folder / "data"))
        texts = {name: said(f"pretrain --data ./{name} {QUICK}") for name in ("photos", "flat", "half")}
        said(f"probe {run_of(texts['photos'])} --epochs 1 --batch 2 --workers 0")
    return folder, texts


def run_of(text):
    return re.search(r"^(runs/\S+): 1 epoch", text, flags=re.M)[1]


@pytest.fixture(autouse=True)
def here(world, data_root, monkeypatch, tmp_path):
    """A copy of that world, for a test to spoil."""
    folder, _ = world
    shutil.copytree(folder, tmp_path / "world")
    for record in (tmp_path / "world" / "data").glob("*/store.json"):
        shutil.rmtree(record.parent)  # it names the images of the original
    monkeypatch.chdir(tmp_path / "world" / "my files")
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "world" / "data"))
    for name in ("photos", "flat", "half"):
        prepare.ready(f"./{name}", 0)
    return tmp_path / "world" / "my files"


@pytest.fixture
def run(world):
    """The run on photos, as it is called in the working directory."""
    return run_of(world[1]["photos"])


@pytest.fixture
def fetched(cifar10, cifar100, small, monkeypatch):  # noqa: F811
    """Small official files in place of a download."""
    folders = {"cifar10": cifar10[0], "cifar100": cifar100[0]}
    monkeypatch.setattr(prepare, "download", lambda name, *_: folders[name])
    return folders


def next_commands(world):
    for text in world[1].values():
        (line,) = re.findall(r"^next: (marginlens .+)$", text, flags=re.M)
        yield line


def test_what_comes_next(world):
    lines = list(next_commands(world))
    assert [line.split()[1] for line in lines] == ["probe", "embed", "probe"]
    assert lines[1].endswith("--data flat --out features.safetensors")
    assert lines[2].endswith("--holdout 2")
    assert "top-1" in typed(lines[0])
    assert "5 x 128 features" in typed(lines[1])
    assert "top-1" in typed(lines[2])


def test_the_rest_of_an_unfinished_run(run):
    Path(run, "result.json").unlink()
    text = said(f"probe {run}", code=2)
    (line,) = re.findall(r"(marginlens pretrain .+)$", text, flags=re.M)
    assert "1 epoch, loss" in typed(line)
    assert "top-1" in said(f"probe {run} --epochs 1 --workers 0")


def test_the_end_of_a_run_made_again(run):
    *_, last = sorted(Path(run, "checkpoints").iterdir())
    last.write_bytes(last.read_bytes()[:-9])
    text = said(f"probe {run} --epochs 2", code=2)
    (line,) = re.findall(r"(marginlens pretrain .+)$", text, flags=re.M)
    assert "1 epoch, loss" in typed(line)
    assert "top-1" in said(f"probe {run} --epochs 2 --workers 0")


def test_the_command_of_a_run(run):
    command = json.loads(said(f"runs show {run} --json"))["command"]
    assert "already complete" in typed(command)


def test_the_commands_of_a_report(run):
    found = ml.open_run(run)
    lines = of_page(found.path, found.settings, found.evaluations)
    assert [line.split()[1] for line in lines] == ["pretrain", "probe"]
    assert "already complete" in said(f"{lines[0]} --workers 0")
    assert "measured before" in said(f"{lines[1]} --workers 0")


def test_data_that_are_not_prepared(fetched):
    text = said("pretrain --data cifar10", code=2)
    (line,) = re.findall(r"run: (marginlens .+)$", text, flags=re.M)
    assert "500 train, 100 test" in said(line)


def test_several_data_sets_that_are_not_prepared(fetched):
    text = said("sweep --data cifar10 --transfer-to cifar100 --grid seed=0", code=2)
    (lines,) = re.findall(r"run: (marginlens .+)$", text, flags=re.M)
    assert [said(line).split(":")[0] for line in lines.split(" and ")] == ["cifar10", "cifar100"]


def test_data_of_another_version(fetched, monkeypatch):
    said("data prepare cifar10")
    newer = sources.SOURCES | {"cifar10": sources.Source(sources.read_cifar10, "", "https://x/y", version=9)}
    monkeypatch.setattr(prepare, "SOURCES", newer)
    monkeypatch.setattr(prepare, "source", newer.__getitem__)
    text = said("data info cifar10", code=2)
    (line,) = re.findall(r"run: (marginlens .+)$", text, flags=re.M)
    said(line)
    assert "500 train" in said("data info cifar10")


def test_data_that_cannot_be_downloaded(cifar10, small, monkeypatch):  # noqa: F811
    def offline(*_, **__):
        raise requests.ConnectionError("no network")

    monkeypatch.setattr("pooch.retrieve", offline)
    text = said("data prepare cifar10", code=2)
    (line,) = re.findall(r"run: (marginlens .+)$", text, flags=re.M)
    tar_of(cifar10[0], Path("cifar-10-binary.tar.gz"))
    assert "500 train, 100 test" in said(line)


def test_data_without_an_address(cifar10, small, monkeypatch):  # noqa: F811
    mine = sources.SOURCES | {"mine": sources.Source(sources.read_cifar10, "mine")}
    for module in (sources, prepare):
        monkeypatch.setattr(module, "SOURCES", mine)
    text = said("data prepare mine", code=2)
    (line,) = re.findall(r"run: (marginlens .+)$", text, flags=re.M)
    assert "500 train" in said(line.replace("PATH", shlex.quote(str(cifar10[0]))))


@pytest.mark.parametrize("asked", ["data prepare folder", "data info ./photos"])
def test_a_folder_that_was_to_be_prepared(asked):
    text = said(asked, code=2)
    (line,) = re.findall(r": (marginlens data prepare .+)$", text, flags=re.M)
    assert "8 train, 2 test" in typed(line.replace("PATH", "./photos"))


def test_images_that_cannot_be_decoded():
    Path("photos/cat/bad one.jpg").write_bytes(b"no image")
    text = said(f"pretrain --data ./photos {QUICK}", code=2)
    (line,) = re.findall(r"skip them: (marginlens .+)$", text, flags=re.M)
    assert "8 train, 2 test" in typed(line)
    assert "already complete" in said(f"pretrain --data ./photos {QUICK}")


def test_data_that_changed_since(run):
    jpeg(Path("photos/cat/new.jpg"), np.random.default_rng(9), size=(30, 30))
    said("data prepare folder --from photos --workers 0")
    text = said(f"knn {run} --workers 0", code=2)
    (line,) = re.findall(r": (marginlens transfer .+)$", text, flags=re.M)
    assert "transfer to photos: top-1" in typed(line)


def test_data_that_are_nowhere(run):
    text = said(f"embed {run} --data nowhere --out x.safetensors", code=2)
    (line,) = re.findall(r"\((marginlens .+)\)$", text, flags=re.M)
    assert "photos" in typed(line)


def test_no_probe_at_several_rates(run):
    text = said("report --runs runs --rates rates.svg", code=2)
    (line,) = re.findall(r": (marginlens .+)$", text, flags=re.M)
    assert "at a learning rate of 10" in typed(line.replace("RUN", run))


def test_what_to_do_with_runs(run, world):
    other = run_of(world[1]["flat"])
    text = said(f"runs compare {Path(run).name}", code=2)
    (line,) = re.findall(r": (marginlens runs compare .+)$", text, flags=re.M)
    names = [shlex.quote(Path(path).name) for path in (run, other)]
    assert "flat" in typed(line.replace(" A B", f" {names[0]} {names[1]}"))
    text = said("runs add", code=2)
    (line,) = re.findall(r"(marginlens runs add FOLDER)", text)
    shutil.copytree(run, Path("..", "elsewhere", Path(run).name))
    assert typed(line.replace("FOLDER", f"../elsewhere/{names[0]}"))
    text = said("runs show nothing", code=2)
    (line,) = re.findall(r"(marginlens runs --runs \S+) lists them", text)
    assert Path(run).name in typed(line)
    (line,) = re.findall(r"(marginlens runs show RUN) says which", said("runs"))
    assert "probe" in typed(line.replace("RUN", run))


def test_weights_that_cannot_be_removed_or_are_gone(run):
    drop_weights(ml.open_run(run))
    text = said(f"sweep --data ./photos --grid seed=0 {QUICK.replace('--checkpoint-seconds 0 ', '')}", code=2)
    line = re.search(r"\((marginlens runs prune)\)", text)[1]
    assert typed(line)
    Path(run, "result.json").unlink()
    with pytest.raises(ValueError, match="marginlens runs prune removes"):
        drop_weights(ml.open_run(run))
    assert "interrupted" in said("runs prune --interrupted")


@pytest.mark.parametrize("line", ["pretrian", "--bogus pretrain", "data bogus", "pretrain --bogus 3", "runs bogus"])
def test_a_mistake_in_a_command(line):
    text = said(line, code=2)
    (hint,) = re.findall(r"marginlens ([a-z ]*(?: ?--help)?)(?:'| lists)", text)
    assert "marginlens" in said(f"{hint} --help".replace("--help --help", "--help"))


def test_a_page_that_would_take_the_place_of_a_folder():
    Path("my lens").mkdir()
    text = said("lens page 'my lens'", code=2)
    (line,) = re.findall(r"(marginlens lens page .+)$", text, flags=re.M)
    assert "wrote" in typed(line)


@pytest.mark.parametrize("spoilt", ["", "result.json"])
def test_a_run_that_no_lens_looked_at(run, spoilt):
    """The printed command leaves out the settings of the run."""
    Path(run, spoilt or "lens.jsonl").unlink(missing_ok=True)
    if not spoilt:
        Path(run, "lens.jsonl").write_text("")
        shutil.rmtree(Path(run, "checkpoints"))
    text = said(f"lens page lens.html --run {run}", code=2)
    more = re.search(r"marginlens pretrain \.\.\. (--lens \d+)", text)[1]
    again = said(f"pretrain --data ./photos {QUICK} --seed 1 {more}")
    assert "wrote" in said(f"lens page lens.html --run {run_of(again)}")


MENTIONED = {
    "cli.py": ("marginlens {__version__}", "marginlens {name", "marginlens {close", "--help lists"),
    "data/commands.py": ("marginlens data prepare folder --from PATH",),
    "data/disk.py": ("marginlens data prepare {name}",),
    "data/folder.py": ("--skip-bad",),
    "data/prepare.py": (
        "by another version; run: marginlens data prepare {name}",
        "run: marginlens data prepare folder --from PATH",
        "run: marginlens data prepare {name} --from PATH",
        "run: marginlens data prepare {name} --from {file}",
    ),
    "demo.py": ("<title>",),
    "evals/features.py": ("marginlens embed needs no labels",),
    "lens/claims.py": ("Which claims about margins hold?",),
    "lens/commands.py": ("marginlens lens page {",),
    "lens/figures.py": ("marginlens {name}",),
    "lens/page.py": ("<title>", "has no row in it", "record one while it trains"),
    "paper/match.py": ("marginlens sweep runs any settings",) * 2,
    "report/commands.py": ("<title>", "# Results", "% made by"),
    "report/latex.py": ("% made by",),
    "report/page.py": ("marginlens pretrain {", "marginlens {shlex.quote(known.kind)} {folder}"),
    "report/rates.py": ("marginlens probe RUN --beside 3 10 30",),
    "report/tables.py": (
        "<!-- marginlens report -->",
        "<!-- end of marginlens report -->",
        "Made by `marginlens report`",
    ),
    "runs/commands.py": ("marginlens runs compare A B", "marginlens runs add FOLDER"),
    "runs/config.py": ("A data set (marginlens data list)",),
    "runs/evaluate.py": ("marginlens transfer {",),
    "runs/export.py": ("(marginlens data list)",),
    "runs/run.py": ("marginlens pretrain --config {config} --runs {store}", "marginlens pretrain named"),
    "runs/store.py": ("marginlens runs prune removes", "marginlens runs --runs {"),
    "runs/texts.py": ("marginlens runs show RUN says which",),
    "sweep/job.py": ("As for marginlens pretrain.", "marginlens sweep has --transfer-to"),
    "sweep/plan.py": (
        "(marginlens runs prune)",
        "remove it with marginlens runs prune",
        "marginlens data prepare {name}",
    ),
    "train/commands.py": ("next: marginlens {",),
}
"""Where the package prints or mentions a command. A test above types each that can be typed."""


def texts(path):
    """Every text in a file that is no docstring, f-strings as they are written."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_command_is_printed_that_is_not_typed_here():
    """A new one fails this test: give it a test above, and a line in the table."""
    first = "|".join({re.escape(name.split()[0]) for name in COMMANDS})
    printed = re.compile(rf"marginlens (?:(?:{first})\b|\{{|--help)")
    for path in sorted(PACKAGE.rglob("*.py")):
        listed = MENTIONED.get(path.relative_to(PACKAGE).as_posix(), ())
        found = [text for text in texts(path) if printed.search(text)]
        unknown = [text for text in found if not any(part in text for part in listed)]
        assert not unknown, f"{path}: {unknown}"
        assert all(any(part in text for text in found) for part in listed), f"{path}: {listed} of {found}"
