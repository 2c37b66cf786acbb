"""Processes that decode images end with their parent, whenever it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from marginlens.data.folder import prepare_folder
from tests.data.conftest import jpeg

PREPARE = (
    "from marginlens.cli import main; main(['data', 'prepare', 'folder', '--from', '{0}', '--as', 'm{1}', "
    "'--workers', '2'])"
)
PRETRAIN = (
    "from marginlens.cli import main; main('pretrain --data many --encoder tiny --hidden 8 --out 8 --batch 8 --size 8 "
    "--epochs 1000 --runs {0}/runs{1}'.split())"
)


@pytest.fixture
def many(tmp_path):
    for i in range(200):
        jpeg(tmp_path / "many" / f"{i:03d}.jpg", np.random.default_rng(i), size=(300, 300))
    prepare_folder(tmp_path / "many", "many", workers=0)
    return tmp_path


def family(mark):
    """Return the numbers of living processes whose environment has this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


MOMENTS = {"at their start": 0.0, "while they import": 0.7, "at work": 2.5}
CASES = [
    (what, moment, how) for what in ("prepare", "pretrain") for moment in MOMENTS for how in ("SIGKILL", "SIGTERM")
]
FAST = ("prepare", "while they import", "SIGKILL")


@pytest.mark.parametrize(
    ("what", "moment", "how"), [pytest.param(*c, marks=() if c == FAST else pytest.mark.slow) for c in CASES]
)
def test_no_worker_outlives_its_parent(many, what, moment, how):
    mark = f"{os.getpid()}-{what}-{moment}-{how}"
    code = (PREPARE if what == "prepare" else PRETRAIN).format(many / ("many" if what == "prepare" else ""), 0)
    if what == "prepare":  # so long that it is at work when it is killed
        code = "import marginlens.data.folder as f, time; f._CHUNK = 2\n" + code
    environment = os.environ | {"MARK": mark, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=-1, stderr=-1, cwd=many)
    try:
        end = time.monotonic() + 60
        while len(family(mark)) < 3 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(MOMENTS[moment])
        process.send_signal(signal.Signals[how])
        process.communicate(timeout=60)
        end = time.monotonic() + 20
        while (left := family(mark)) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == []
    finally:
        for number in family(mark):
            os.kill(number, signal.SIGKILL)


def test_sigterm_leaves_nothing_half_written(many, data_root):
    slow = "f.flush = lambda *_: (print('writing', flush=True), time.sleep(60))\n"
    code = "import marginlens.data.folder as f, time\n" + slow + PREPARE.format(many / "many", 1)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "marginlens: stopped by SIGTERM\n")
    assert [p.name for p in data_root.iterdir()] == ["many"]
