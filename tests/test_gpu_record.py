"""The record of the GPU tests against the current code: every change since is listed, and has a CPU test."""

import json
import re
import sys

import pytest

from tests.gpu import sources
from tests.gpu.pending import main
from tests.gpu.sources import REPOSITORY, cpu_tests, definitions, gpu_files, hashed, moved, pending, record, summary


def test_what_changed_since_is_listed():
    listed, changed = {one["name"] for one in pending()}, set(moved())
    assert changed - listed == set(), "changed since it was tested on a GPU: run `make gpu` there, or make gpu-pending"
    assert listed - changed == set(), "no longer changed: make gpu-pending"
    assert all(one["verified"] == record()["commit"] and one["why"].strip() for one in pending())


def test_what_is_listed_has_a_test_without_a_gpu():
    for file in sorted({one["file"] for one in pending()}):
        assert cpu_tests(file), f"{file} waits for a GPU, and no test runs it by the interpreter or beside a twin"


def test_everything_passed():
    assert set(record()["outcomes"].values()) == {"passed"}


def test_every_gpu_test_is_in_the_record():
    ran = {name.partition("[")[0] for name in record()["outcomes"]}
    for path in sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M):
            assert f"{path.name}::{name}" in ran, f"{path.name}::{name} has never run on a GPU"


def test_the_page_says_what_was_verified():
    assert summary() in (REPOSITORY / "docs" / "developing" / "performance.md").read_text()


def test_the_files_are_found():
    """All of the kernels' room, what imports triton, what captures graphs, and what chooses between kernels."""
    found = set(gpu_files())
    for path in (REPOSITORY / "marginlens").rglob("*.py"):
        name = path.relative_to(REPOSITORY).as_posix()
        text = path.read_text()
        if re.search(r"^\s*(import triton|from triton)\b", text, re.M) or "/kernels/" in name or "CUDAGraph(" in text:
            assert name in found
    assert {"marginlens/layouts.py", "marginlens/kernels/__init__.py"} <= found
    assert not {"marginlens/effects.py", "marginlens/cli.py", "marginlens/data/store.py"} & found


KERNEL = """
'''A module.'''
import triton
from somewhere import helper

BLOCK = 64
'''A text.'''


@triton.jit
def kernel(x, n: int):
    '''A docstring.'''
    from elsewhere import other
    # a comment
    return helper(x) + BLOCK + n


class Both:
    '''Another.'''

    size = 3
    '''Of it.'''

    def grow(self):
        '''Yet another.'''
        return self.size
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A docstring.", "Better words."),
        ("# a comment", "# because of this"),
        ("from somewhere import helper", "from marginlens.kernels.moved import longer as helper"),
        ("from elsewhere import other", "from far import other"),
        ("A text.", "Another text."),
        ("Of it.", "Of this."),
        ("return self.size", "return (self.size)"),
        ("\n\n\n", "\n\n"),
    ],
)
def test_words_and_moves_need_no_gpu(old, new):
    assert old in KERNEL
    assert dict(hashed(KERNEL)) == dict(hashed(KERNEL.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("+ BLOCK", "- BLOCK", "kernel"),
        ("BLOCK = 64", "BLOCK = 32", "BLOCK"),
        ("n: int", "n", "kernel"),
        ("@triton.jit\n", "", "kernel"),
        ("size = 3", "size = 4", "Both"),
        ("helper(x)", "helper2(x)", "kernel"),
    ],
)
def test_another_operation_does(old, new, name):
    before, after = dict(hashed(KERNEL)), dict(hashed(KERNEL.replace(old, new)))
    assert {key for key in before if before[key] != after[key]} == {name}


def test_a_definition_that_moves_to_another_file_is_the_same(monkeypatch, tmp_path):
    folder = tmp_path / "marginlens" / "kernels"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text(KERNEL)
    before = definitions(tmp_path)
    (folder / "one.py").write_text(KERNEL.partition("\n\nclass")[0] + "\n")
    (folder / "two.py").write_text("import torch\n\n\nclass" + KERNEL.partition("\n\nclass")[2])
    assert definitions(tmp_path) == before


def test_a_change_must_be_listed_with_a_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sources, "PENDING", tmp_path / "pending.json")
    monkeypatch.setattr("tests.gpu.pending.PENDING", tmp_path / "pending.json")
    known = {name: held for name, held in record()["definitions"].items() if name != "neg_lse"}
    monkeypatch.setattr(sources, "record", lambda: record() | {"definitions": known})
    monkeypatch.setattr(sys, "argv", ["pending"])
    with pytest.raises(SystemExit, match=r"neg_lse in marginlens/kernels/lse\.py"):
        main()
    assert not (tmp_path / "pending.json").exists()
    monkeypatch.setattr(sys, "argv", ["pending", "--why", "another sum"])
    main()
    listed = json.loads((tmp_path / "pending.json").read_text())
    assert {"name": "neg_lse in marginlens/kernels/lse.py", "file": "marginlens/kernels/lse.py"}.items() <= next(
        one for one in listed if one["file"].endswith("lse.py")
    ).items()
    assert all(one["why"] == "another sum" for one in listed)
    assert re.search(r"GPU-verified at \w+; \d files pending", capsys.readouterr().out)


def test_the_syntax_tree_is_the_same_in_every_python():
    """Of a definition with all that Pythons dump in their own ways."""
    text = "def f[T](x): ..." if sys.version_info >= (3, 12) else "def f(x): ..."
    assert [digest for _, digest in hashed(text)] == [digest for _, digest in hashed("def f(x): ...")]
