"""The page on adding an evaluation is true: a new file, one line, and every command knows it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.train.conftest import data_root, prepared, whole  # noqa: F401

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "developing" / "evaluations.md").read_text()

SCRIPT = """
import contextlib, io, json, sys
from marginlens.cli import COMMANDS, main

run, store, card = sys.argv[1:]
said = {"overview": COMMANDS["centroid"]}
for name, words in {
    "measured": ["centroid", run, "--json"],
    "again": ["centroid", run, "--holdout", "8"],
    "listed": ["runs", "--runs", store, "--where", "centroid>=0", "--sort", "centroid"],
    "rows": ["runs", "--runs", store, "--json"],
    "planned": ["sweep", "--data", "little", "--runs", store, "--grid", "seed=0|1", "--also", "centroid", "--dry-run",
                "--json"],
    "card": ["export", run, "--out", card],
    "report": ["report", "--runs", store, "--out", store + "-report"],
}.items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(words)
    said[name] = out.getvalue()
print(json.dumps(said))
"""


def block(file):
    """The code that the page gives for a file."""
    return re.search(rf"<!-- {re.escape(file)} -->\n```python\n(.*?)```", PAGE, re.S)[1]


def test_a_new_file_and_one_line(tmp_path, whole):  # noqa: F811
    package, store = tmp_path / "src" / "marginlens", tmp_path / "runs"
    shutil.copytree(ROOT / "marginlens", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "evals" / "centroid.py").write_text(block("marginlens/evals/centroid.py"))
    register = package / "evals" / "__init__.py"
    register.write_text(
        register.read_text().replace("MODULES = {\n", "MODULES = {\n" + block("marginlens/evals/__init__.py"))
    )
    run = shutil.copytree(whole.path, store / whole.path.name, ignore=shutil.ignore_patterns("evaluations"))
    words = [sys.executable, "-c", SCRIPT, str(run), str(store), str(tmp_path / "backbone.safetensors")]
    told = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path / "src")}}
    done = subprocess.run(words, capture_output=True, text=True, check=False, **told)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    found = json.loads(said["measured"])
    assert (found["kind"], found["train_images"], 0 <= found["top1"] <= 100) == ("centroid", 32, True)
    assert "8 images kept back" in said["again"]
    assert len(list((run / "evaluations").glob("centroid-little-*.json"))) == 2
    assert "centroid" in said["listed"].splitlines()[1]
    assert json.loads(said["rows"])["runs"][0]["centroid"] == found["top1"]
    assert [step["evaluations"] for step in json.loads(said["planned"])["plan"]] == [["probe", "centroid"]] * 2
    assert "nearest class mean" in (tmp_path / "backbone.md").read_text()
    table = (tmp_path / "runs-report" / "tables.md").read_text()
    assert re.search(r"^\|.*\bcentroid\b", table, re.M), table
