"""A checkpoint exists whole or not at all, and nothing else is taken for one."""

import errno
import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save

from marginlens.runs import checkpoint
from marginlens.runs.checkpoint import Damaged
from tests.train.conftest import small_files, snapshot

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def tensors(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(3, 4, generator=rng), "n": torch.tensor(seed), "rng": torch.get_rng_state()}


def write(folder, step, run="me", **facts):
    return checkpoint.write(folder, step, tensors(step), {"run": run, "metrics": 10 * step, **facts})


def named(folder, content, step=3):
    """A file whose name fits its content."""
    path = folder / f"step-{step:08d}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(tmp_path, dtype):
    given = {"x": torch.arange(-3, 9).reshape(3, 4).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    given |= {"none": torch.empty(0, 2, dtype=dtype), "across": given["x"].T}
    found = checkpoint.read(checkpoint.write(tmp_path, 7, given, {"run": "me", "scaler": {"scale": 0.5}}), "me")
    assert found.tensors.keys() == given.keys()
    for name, tensor in given.items():
        assert found.tensors[name].dtype == dtype
        assert found.tensors[name].shape == tensor.shape
        assert torch.equal(found.tensors[name], tensor)
    assert found.facts == {"format": 1, "step": 7, "run": "me", "scaler": {"scale": 0.5}}


def test_bits_that_compare_oddly_come_back(tmp_path):
    odd = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45])
    found = checkpoint.read(checkpoint.write(tmp_path, 1, {"x": odd}, {}))
    assert found.tensors["x"].numpy().tobytes() == odd.numpy().tobytes()


def test_memory_layout_does_not_matter(tmp_path):
    weight = torch.randn(4, 3, 2, 2)
    last = weight.to(memory_format=torch.channels_last)
    paths = [checkpoint.write(tmp_path, 1, {"w": w.requires_grad_()}, {}) for w in (weight, last)]
    assert paths[0] == paths[1]


def test_the_name_carries_the_checksum(tmp_path):
    path = write(tmp_path, 12)
    assert path.name == f"step-00000012-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}.safetensors"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_last_two_are_kept(tmp_path):
    paths = [write(tmp_path, step) for step in (1, 2, 9, 10, 100_000_000)]
    assert checkpoint.names(tmp_path) == [paths[4], paths[3]]
    assert sorted(tmp_path.iterdir()) == sorted(paths[3:])


def test_other_files_are_let_be(tmp_path):
    for name in ("notes.txt", "step-5.safetensors", "step-00000005-abc.safetensors"):
        (tmp_path / name).write_text("mine")
    for step in range(4):
        write(tmp_path, step)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 5


HARMS = {
    "one bit in the header": lambda content: flipped(content, 20),
    "one bit in the middle": lambda content: flipped(content, len(content) // 2),
    "one bit at the end": lambda content: flipped(content, len(content) - 1),
    "one byte too few": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "one byte too many": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, harm):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    newer.write_bytes(HARMS[harm](newer.read_bytes()))
    with pytest.raises(Damaged, match=newer.name):
        checkpoint.read(newer)
    found, damaged = checkpoint.newest(tmp_path, "me")
    assert found.path == older
    assert found.facts["step"] == 1
    assert torch.equal(found.tensors["a.weight"], tensors(1)["a.weight"])
    assert len(damaged) == 1
    assert newer.name in damaged[0]


def test_a_folder_of_the_name_is_damage(tmp_path):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    newer.unlink()
    newer.mkdir()
    found, damaged = checkpoint.newest(tmp_path, "me")
    assert found.path == older
    assert newer.name in damaged[0]


def test_all_damaged(tmp_path):
    for step in (1, 2):
        path = write(tmp_path / "checkpoints", step)
        path.write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        checkpoint.newest(tmp_path / "checkpoints", "me")
    line = str(caught.value)
    assert path.name in line
    assert f"remove {tmp_path} to start over" in line
    assert "\n" not in line


def test_no_checkpoint(tmp_path):
    assert checkpoint.newest(tmp_path / "nowhere", "me") == (None, [])


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("kind", ["torch.save", "pickle", "legacy"])
def test_a_pickle_is_refused_and_nothing_runs(tmp_path, kind):
    sprung, source = tmp_path / "sprung", tmp_path / "source"
    if kind == "pickle":
        source.write_bytes(pickle.dumps(Trap(str(sprung))))
    else:
        torch.save({"x": Trap(str(sprung))}, source, _use_new_zipfile_serialization=kind == "torch.save")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path = named(folder, source.read_bytes())
    with pytest.raises(Damaged, match=path.name):
        checkpoint.read(path)
    with pytest.raises(ValueError, match="no older checkpoint is whole"):
        checkpoint.newest(folder, "me")
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(str(sprung)))).close()
    assert sprung.exists()  # the trap does work


FOREIGN = {
    "no metadata": None,
    "others' metadata": {"format": "pt"},
    "another version": {"marginlens": json.dumps({"format": 2, "run": "me", "step": 1})},
    "no format": {"marginlens": "{}"},
    "a list": {"marginlens": "[]"},
    "a number": {"marginlens": "1"},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_safetensors_are_refused(tmp_path, kind):
    path = named(tmp_path, save(tensors(), FOREIGN[kind]))
    with pytest.raises(ValueError, match=path.name):
        checkpoint.read(path, "me")


def test_metadata_that_is_not_json(tmp_path):
    path = named(tmp_path, save(tensors(), {"marginlens": "{"}))
    with pytest.raises(Damaged, match=path.name):
        checkpoint.read(path)


@pytest.mark.parametrize("name", ["model.safetensors", "step-1.safetensors", "step-00000001-XYZ.safetensors"])
def test_other_names_are_refused(tmp_path, name):
    path = write(tmp_path, 1).rename(tmp_path / name)
    with pytest.raises(ValueError, match="is not a checkpoint of marginlens"):
        checkpoint.read(path)


def test_another_runs_checkpoint_is_refused(tmp_path):
    write(tmp_path, 1, run="other")
    with pytest.raises(ValueError, match=r"belongs to another run \(other, not me\)"):
        checkpoint.newest(tmp_path, "me")
    own = write(tmp_path / "own", 1)
    shutil.copy(write(tmp_path / "theirs", 2, run="theirs"), own.parent)
    with pytest.raises(ValueError, match=r"belongs to another run \(theirs, not me\)") as caught:
        checkpoint.newest(own.parent, "me")
    assert not isinstance(caught.value, Damaged)


MISFITS = {
    "another shape": {"b": torch.ones(3, 2)},
    "another dtype": {"b": torch.ones(2, 3, dtype=torch.float64)},
    "one too few": {"b": None},
    "one too many": {"c": torch.ones(1)},
    "another name": {"b": None, "B": torch.ones(2, 3)},
    "same numel": {"b": torch.ones(6)},
    "broadcastable": {"b": torch.ones(1, 3)},
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_changes_nothing(tmp_path, kind):
    given = {"a": torch.full((2,), 5.0), "b": torch.full((2, 3), 5.0)} | MISFITS[kind]
    path = checkpoint.write(tmp_path, 1, {k: v for k, v in given.items() if v is not None}, {})
    own = {"a": torch.zeros(2), "b": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=r"does not fit this model in (b|c|B) ") as caught:
        checkpoint.fill(own, checkpoint.read(path))
    assert path.name in str(caught.value)
    assert all(not tensor.any() for tensor in own.values())


def test_what_fits_is_filled_in_place(tmp_path):
    path = checkpoint.write(tmp_path, 1, tensors(1), {})
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    held = dict(own)
    own["a.weight"].requires_grad_()
    checkpoint.fill(own, checkpoint.read(path))
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors(1).items())


def test_leftovers_are_swept(tmp_path):
    path = write(tmp_path, 1)
    left, strange = path.with_name(f"step-00000002-{'01' * 16}.partial"), path.with_name("mine.partial")
    left.write_bytes(b"half")
    strange.write_bytes(b"not ours")
    found, damaged = checkpoint.newest(tmp_path, "me")
    assert found.path == path
    assert damaged == []
    assert sorted(tmp_path.iterdir()) == [strange, path]


@pytest.mark.parametrize("where", ["flush", "rename"])
def test_an_error_in_writing_leaves_the_others(tmp_path, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path, 1)
    write(tmp_path, 2)
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(*((checkpoint, "flush", full) if where == "flush" else (checkpoint.Path, "rename", full)))
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 3)
    assert snapshot(tmp_path) == before
    write(tmp_path, 3)
    assert checkpoint.newest(tmp_path, "me")[0].facts["step"] == 3


def test_a_file_that_the_system_cuts_short(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    before = snapshot(tmp_path)
    with small_files(100), pytest.raises(OSError, match="File too large"):
        write(tmp_path, 3)
    assert snapshot(tmp_path) == before
