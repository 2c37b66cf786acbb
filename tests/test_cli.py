"""The command line: its output, and one line with exit code 2 for every mistake."""

import ast
import importlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import marginlens as ml
from marginlens import cli, files
from marginlens.cli import COMMANDS, main
from marginlens.data import commands, prepare, shapes, store
from marginlens.output import Display, counted
from tests.data.conftest import cifar10, small, tree_of_jpegs  # noqa: F401


@pytest.fixture(autouse=True)
def data_root(tmp_path, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(capsys, *words):
    main(list(words))
    return capsys.readouterr().out


def picture(path):
    with Image.open(path) as image:
        return np.asarray(image)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("data",), ("data", "--help")])
def test_the_overview_names_every_command(capsys, words):
    out = run(capsys, *words)
    assert all(f"marginlens {name}" in out for name in COMMANDS if "data" not in words or name.startswith("data"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_that_teaches(capsys, name):
    with pytest.raises(SystemExit) as caught:
        main([*name.split(), "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"marginlens {name}" in out
    assert len(out) > 300
    assert not re.search(r"\{None\}|settings options|\b1 (?!is\b)[a-z]+s\b|default: (?:\)|None|True|False)", out)


def test_folders_are_listed(capsys, tmp_path):
    tree_of_jpegs(tmp_path / "pets")
    run(capsys, "data", "prepare", "folder", "--from", "pets", "--workers", "0")
    rows = {row["name"]: row for row in json.loads(run(capsys, "data", "list", "--json"))["data"]}
    assert not rows["folder"]["prepared"]
    assert "marginlens data prepare folder --from PATH" in rows["folder"]["about"]
    assert rows["pets"]["prepared"]
    assert rows["pets"]["about"] == f"a folder of images: {tmp_path / 'pets'} (4 train, 2 test, 2 classes)"


def test_one_of_a_kind_is_not_several():
    assert [counted(n, "step") for n in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]


def test_prepare_info_list_show_views(capsys, cifar10, tmp_path):  # noqa: F811
    folder, content = cifar10
    assert "500 train, 100 test" in run(capsys, "data", "prepare", "cifar10", "--from", str(folder))
    facts = json.loads(run(capsys, "data", "info", "cifar10", "--json"))
    assert facts["splits"] == {"train": 500, "test": 100}
    assert facts["size"] == "32 x 32"
    assert len(facts["classes"]) == 10
    assert len(facts["fingerprint"]) == 64
    np.testing.assert_allclose(facts["mean"], content["train"][0].mean((0, 2, 3)) / 255)
    assert "airplane" in run(capsys, "data", "info", "cifar10")
    listed = json.loads(run(capsys, "data", "list", "--json"))["data"]
    assert [row["name"] for row in listed if row["prepared"]] == ["cifar10"]
    assert "cifar10" in run(capsys, "data", "list")
    run(capsys, "data", "show", "cifar10", "--out", "grid.png", "--columns", "3")
    first = np.flatnonzero(content["train"][1] == 0)[0]
    grid = picture("grid.png")
    assert np.array_equal(grid[0:64:2, 130:194:2].transpose(2, 0, 1), content["train"][0][first])
    run(capsys, "data", "views", "cifar10", "--count", "2", "--seed", "1")
    views = picture("cifar10-views.png")
    assert np.array_equal(views[18:82:2, 130:194:2].transpose(2, 0, 1), content["train"][0][0])


def test_a_folder_from_end_to_end(capsys, tmp_path):
    tree_of_jpegs(tmp_path / "pets")
    out = run(capsys, "data", "prepare", "folder", "--from", "pets", "--workers", "1")
    assert "pets: 4 train, 2 test" in out
    facts = json.loads(run(capsys, "data", "info", "pets", "--json"))
    assert facts["size"] == "various"
    assert "a folder of images" in json.loads(run(capsys, "data", "list", "--json"))["data"][-1]["about"]
    given = ("--mean", "0.1", "0.2", "0.3", "--std", "1", "1", "1", "--json")
    out = run(capsys, "data", "prepare", "folder", "--from", "pets", "--as", "given", "--workers", "1", *given)
    assert json.loads(out)["mean"] == [0.1, 0.2, 0.3]
    run(capsys, "data", "show", "pets")
    run(capsys, "data", "views", "pets", "--crop", "padded")
    assert picture("pets.png").shape[0] == 2 * 130
    (tmp_path / "pets" / "train" / "cat" / "bad.jpg").write_bytes(b"?")
    assert "bad.jpg" in refused(capsys, "data", "prepare", "folder", "--from", "pets", "--as", "p", "--workers", "1")
    out = run(capsys, "data", "prepare", "folder", "--from", "pets", "--as", "p", "--skip-bad", "--workers", "1")
    assert "skipped: train/cat/bad.jpg" in out


def test_encoders(capsys):
    rows = {(r["name"], r["size"]): r for r in json.loads(run(capsys, "encoders", "--json"))}
    assert rows["resnet18", 32]["parameters"] == 11_689_512 - 513_000 - 9_408 + 1_728  # no fc, and a 3x3 stem
    assert rows["resnet18", 32]["flops"] == pytest.approx(1.11e9, rel=0.01)
    assert "resnet50" in run(capsys, "encoders")


MISTAKES = {
    ("dta", "list"): "did you mean 'marginlens data list'?",
    ("train",): "did you mean 'marginlens pretrain'?",
    ("runs", "list"): "did you mean 'marginlens runs'?",
    ("runs", "ls"): "did you mean 'marginlens runs'?",
    ("evaluate",): "did you mean 'marginlens probe'?",
    ("version",): "did you mean 'marginlens --version'?",
    ("xyzzy",): "marginlens --help lists the commands",
    ("data", "shwo", "x"): "did you mean 'marginlens data show'?",
    ("data", "info", "cifra10"): "did you mean 'cifar10'?",
    ("data", "info", "cifar10"): "run: marginlens data prepare cifar10",
    ("data", "info"): "an argument is missing",
    ("data", "prepare", "folder", "--path", "x"): "there is no option --path (did you mean --from?)",
    ("report", "--output", "x"): "there is no option --output (did you mean --out?)",
    ("data", "info", "shapes", "--jsno"): "--json",
    ("data", "prepare", "cifar10", "--from", "nowhere"): "nowhere does not exist",
    ("data", "prepare", "folder"): "marginlens data prepare folder --from PATH",
    ("data", "prepare", "folder", "--from", "nowhere"): "is not a folder",
    ("data", "prepare", "folder", "--from", ".", "--as", "cifar10"): "cannot be stored as 'cifar10'",
    ("data", "prepare", "folder", "--from", ".", "--as", "a/b"): "cannot be stored as 'a/b'",
    ("data", "prepare", "cifar10", "--as", "x"): "--skip-bad are for a folder",
    ("data", "show", "shapes", "--split", "val"): "has no split 'val'; it has train, test",
    ("data", "show", "shapes", "--out", "/proc/nope/x.png"): "give --out another place",
    ("data", "views", "shapes", "--count", "0"): "count is 0; it must be a whole number, at least 1",
    ("data", "show", "shapes", "--columns", "-3"): "columns is -3; it must be a whole number, at least 1",
    ("data", "views", "shapes", "--crop", "round"): "--crop is 'round'; it must be one of 'resized', 'padded'",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes(capsys, words):
    if "shapes" in words:  # a few of them are drawn sooner than all
        store.write(
            "shapes", {name: [store.Batch(*shapes.draw(8, name))] for name in ("train", "test")}, shapes.CLASSES
        )
    assert MISTAKES[words] in refused(capsys, *words)


def test_help_is_a_word_too(capsys):
    assert run(capsys, "help") == run(capsys, "--help")
    assert run(capsys, "help", "data") == run(capsys, "data", "--help")
    with pytest.raises(SystemExit) as caught:
        main(["help", "encoders"])
    assert caught.value.code == 0
    assert "usage: marginlens encoders" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["lens"], ["help", "lens"], ["lens", "--help"]], ids=" ".join)
def test_the_lens_lists_its_commands(capsys, words):
    out = run(capsys, *words)
    assert {name for name in COMMANDS if f"  marginlens {name} " in out} == {
        x for x in COMMANDS if x.startswith("lens ")
    }


def test_words_for_a_command_lead_to_one():
    assert {name.split()[0] for name in cli.SYNONYMS.values() if name != "--version"} <= {*COMMANDS, "data"}
    assert set(cli.SYNONYMS.values()) <= {*COMMANDS, "--version"}
    assert not cli.SYNONYMS.keys() & COMMANDS.keys()


def test_the_installed_command():
    done = subprocess.run([sys.executable, "-m", "marginlens", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("marginlens ")


def imported(code, *names):
    """Which of these modules a process has after some code."""
    code = f"import sys\n{code}\nprint([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_importing_the_loss_imports_nothing_else():
    """Nor Dynamo, which takes as long as torch itself."""
    names = ("PIL", "tyro", "rich", "pooch", "triton", "torch._dynamo")
    assert imported("import marginlens; marginlens.info_nce", *names) == "[]"


@pytest.mark.parametrize("words", [[], ["--version"], ["data"], ["nonsense"]])
def test_help_does_not_wait_for_torch(words):
    code = f"from marginlens.cli import main\ntry:\n    main({words})\nexcept SystemExit:\n    pass"
    assert imported(code, "torch", "tyro") == "[]"


@pytest.mark.parametrize("name", ["tyro", "pydantic", "rich"])
def test_a_laboratory_that_is_not_installed_is_one_line(name):
    code = f"import sys\nsys.modules[{name!r}] = None\nfrom marginlens.cli import main\nmain(['runs'])"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"marginlens: {name} is not installed; run: pip install 'marginlens[lab]'\n"


def test_without_the_laboratory_the_rest_can_be_looked_at():
    code = "import sys, inspect\nsys.modules['pydantic'] = None\nimport marginlens\ninspect.getmembers(marginlens)"
    assert imported(code, "marginlens.loss", "marginlens.options") == "['marginlens.loss']"


WINDOWS = """
import contextlib, inspect, io, sys
import torch._dynamo  # which asks for the real system when it is first imported
sys.modules["fcntl"], sys.platform = None, "win32"
import marginlens as ml
from marginlens.cli import COMMANDS, main
z = torch.randn(4, 3, requires_grad=True)
ml.NTXent()(z, z + 1).backward()
ml.SimCLR(torch.nn.Flatten(), size=2, hidden=4).loss([torch.randn(4, 3, 2, 2)] * 2).backward()
inspect.getmembers(ml)
said = set()
for name in ml.__all__:
    try:
        getattr(ml, name)
    except ImportError as error:
        said.add(f"marginlens: {error}\\n")
for words in [["--help"], ["encoders", "--json"], *(name.split() for name in COMMANDS if name != "encoders")]:
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            main(words)
    except SystemExit as end:
        said.add(heard.getvalue())
        assert end.code == 2, words
print(said)
"""


def test_on_windows_the_loss_works_and_the_laboratory_is_one_line():
    done = subprocess.run([sys.executable, "-c", WINDOWS], check=True, capture_output=True, text=True)
    (line,) = ast.literal_eval(done.stdout.splitlines()[-1])
    assert line.startswith("marginlens: the laboratory needs Linux or macOS; on Windows run it in WSL (")
    assert line.count("\n") == 1
    assert "  marginlens pretrain " in done.stdout


def test_names_may_be_first_used_by_several_threads():
    code = (
        "from threading import Barrier\nfrom concurrent.futures import ThreadPoolExecutor\nimport marginlens as ml\n"
        "together, names = Barrier(3), ('Pretrain', 'embed', 'BYOL')\n"
        "with ThreadPoolExecutor(3) as pool:\n"
        "    list(pool.map(lambda name: (together.wait(), getattr(ml, name)), names))"
    )
    assert imported(code, "marginlens.runs.export") == "['marginlens.runs.export']"


def test_the_overview_says_of_each_command_what_its_help_says(capsys):
    main([])
    said = capsys.readouterr().out
    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        found = importlib.import_module(module)
        first = (getattr(found, function) if function else found).__doc__.strip().splitlines()[0]
        assert f"  marginlens {name:14} {first}\n" in said


def test_submodules_are_names_too():
    code = "import marginlens\nmarginlens.paper.TABLES, marginlens.effects.Row, marginlens.lens"
    assert imported(code, "marginlens.report") == "[]"
    assert not hasattr(ml, "nothing_of_the_kind")


def test_every_public_name():
    assert set(ml.__all__) <= set(dir(ml))
    assert all(getattr(ml, name) is vars(ml)[name] for name in ml.__all__)
    with pytest.raises(AttributeError, match="module 'marginlens' has no attribute 'infonce'"):
        _ = ml.infonce
    assert set(ml.__all__) == {name for names in ml._NAMES.values() for name in names}


def test_the_first_use_may_be_inside_a_compiled_function():
    code = (
        "import torch, marginlens as ml\n"
        "f = torch.compile(lambda q, k: ml.info_nce(q, k, effect=ml.Emphasis(s=2)), fullgraph=True, backend='eager')\n"
        "q, k = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)\n"
        "f(q, k).backward()\n"
        "assert q.grad.isfinite().all()"
    )
    assert imported(code, "marginlens.loss") == "['marginlens.loss']"


def test_the_list_outlives_a_store_that_cannot_be_read(capsys, tmp_path):
    """And names are no markup."""
    for name, held in {"broken": "{", "[red]boo": json.dumps({"kind": "folder", "path": "/x"}), "mini": "{}"}.items():
        (store.root() / name).mkdir(parents=True)
        (store.root() / name / "store.json").write_text(held)
    found = {row["name"]: row["about"] for row in json.loads(run(capsys, "data", "list", "--json"))["data"]}
    assert "damaged" in found["broken"]
    assert "shapes" in found
    assert "[red]boo" in run(capsys, "data", "list")
    assert "there is no data set 'zzz'; there are shapes, cifar10, cifar100, stl10, tinyimagenet, " in refused(
        capsys, "pretrain", "--data", "zzz"
    )


def test_names_that_are_patterns(capsys, tmp_path):
    tree_of_jpegs(tmp_path / "pets")
    for name in ("photos [2024]", "a**b"):
        assert "train" in run(capsys, "data", "prepare", "folder", "--from", str(tmp_path / "pets"), "--as", name)


def test_nothing_to_read_shapes_from(capsys, tmp_path):
    assert "shapes is drawn, and read from nowhere; leave out --from" in refused(
        capsys, "data", "prepare", "shapes", "--from", str(tmp_path)
    )


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "--runs"),
        ("pretrain", "--config"),
        ("data", "prepare", "cifar10", "--from"),
        ("report", "--runs", ".", "--out"),
        ("pretrain", "--data", "shapes", "--weights"),
        ("probe",),
    ],
    ids=" ".join,
)
def test_a_home_that_is_not_there(capsys, drawn, words):
    said = refused(capsys, *words, "~nobody-of-that-name/x")
    assert "the ~ of ~nobody-of-that-name/x stands for no folder" in said


def test_a_user_without_a_home(capsys, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("MARGINLENS_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    said = refused(capsys, "data", "info", "shapes")
    assert "there is no home folder to keep data in; set MARGINLENS_DATA to a folder" in said


@pytest.mark.parametrize("size", [0, 900])
def test_half_a_picture_is_none(capsys, tmp_path, monkeypatch, size):
    """A disk may be full at once, or when the last bytes are flushed."""

    def stop(file):
        file.truncate(size)
        raise OSError(28, "No space left on device")

    store.write("shapes", {name: [store.Batch(*shapes.draw(8, name))] for name in ("train", "test")}, shapes.CLASSES)
    monkeypatch.setattr(files, "flush", stop)
    said = refused(capsys, "data", "show", "shapes", "--out", "new/grid.png", "--columns", "2")
    assert "cannot write new/grid.png (No space left on device); give --out another place" in said
    assert not list((tmp_path / "new").iterdir())


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
SHORT = "--data shapes --encoder tiny --limit 64 --batch 16 --hidden 16 --out 8 --epochs 2 --knn-every 0"


@pytest.fixture(scope="module")
def shapes_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    prepare.load("shapes", root)
    return root


@pytest.fixture
def drawn(shapes_once, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(shapes_once))


@FULL
@pytest.mark.parametrize("heard", ["2>/dev/full", pytest.param("2>&1 >/dev/null | head -1", marks=pytest.mark.slow)])
def test_a_run_does_not_die_of_its_log(tmp_path, drawn, heard):
    command = f"{sys.executable} -m marginlens pretrain {SHORT} --runs {tmp_path / 'runs'} {heard}"
    subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    (path,) = (tmp_path / "runs").iterdir()
    assert json.loads((path / "result.json").read_text())["epochs"] == 2
    assert not (path / "failure.json").exists()


def on_a_terminal(words, seconds=60, stop=False):
    """What a command writes to a terminal, and how it ended; `stop`: Ctrl-C once the bar shows a loss."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "marginlens", *words.split()], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        ready, _, _ = select.select([ours], [], [], 0.5)
        try:
            said += os.read(ours, 4096) if ready else b""
        except OSError:  # it has ended
            break
        if stop and b"loss" in said:
            child.send_signal(signal.SIGINT)
            stop = False
    else:
        child.kill()
    os.close(ours)
    return said.decode(errors="replace"), child.wait()


@pytest.mark.slow
def test_a_bar_on_a_terminal(tmp_path, drawn):
    said, code = on_a_terminal(f"pretrain {SHORT} --runs {tmp_path / 'runs'}")
    assert code == 0
    assert "━" in said
    assert "next: marginlens probe" in said


def test_ctrl_c_on_a_terminal(tmp_path, drawn):
    long = SHORT.replace("--epochs 2", "--epochs 2000")
    said, code = on_a_terminal(f"pretrain {long} --runs {tmp_path / 'runs'}", stop=True)
    assert code == 130
    assert "--resume" in said


@pytest.mark.slow
def test_streams_that_are_closed(tmp_path, drawn):
    command = f"{sys.executable} -m marginlens pretrain {SHORT} --runs {tmp_path / 'runs'} >&- 2>&-"
    subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert list((tmp_path / "runs").glob("*/result.json"))


@pytest.mark.parametrize("stream", [None, io.StringIO(), SimpleNamespace(write=len, flush=lambda: None)])
def test_any_standard_error(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with Display("a run", 2) as display:
        display.say("said")
        display.step(1, lambda: 1.0, lambda: 1.0)
    assert not isinstance(stream, io.StringIO) or stream.getvalue() == "said\n"


@FULL
@pytest.mark.parametrize("words", ["data list", "data list --json"])
def test_a_full_disk_under_the_output_is_one_line(words):
    done = subprocess.run(
        f"{sys.executable} -m marginlens {words} >/dev/full", shell=True, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        "marginlens: the output cannot be written (No space left on device)\n",
    )


def test_a_reader_that_has_read_enough():
    """`marginlens ... | head -1` ends without a traceback."""
    command = f"{sys.executable} -m marginlens pretrain --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("usage: marginlens pretrain")


def test_views_are_of_all_classes(capsys, tmp_path):
    """A folder's files are in the order of their classes."""
    tree_of_jpegs(tmp_path / "pets")
    run(capsys, "data", "prepare", "folder", "--from", "pets", "--workers", "0")
    _, labels, classes = commands._some("pets", 2)
    assert [classes[label] for label in labels] == list(classes)
    assert [len(commands._some("pets", count)[1]) for count in (1, 3, 4, 99)] == [1, 3, 4, 4]
