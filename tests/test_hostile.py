"""Malicious files and broken systems: each gives one line that names the file, in bounded time and memory."""

import io
import json
import lzma
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from contextlib import closing

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

import marginlens as ml
from marginlens import files, output
from marginlens.cli import main
from marginlens.data import images
from marginlens.data import store as stores
from marginlens.data.folder import crop_file, prepare_folder
from marginlens.errors import DataError
from tests.data.conftest import jpeg, small, tinyimagenet, tree_of_jpegs, zip_of  # noqa: F401
from tests.runs.conftest import ask, content, put, store, trained  # noqa: F401
from tests.train.conftest import data_root, prepared, settings, whole  # noqa: F401


def one_line(said):
    assert said.startswith("marginlens: ")
    assert said.count("\n") == 1
    return said


def png_of(width, height, bits, path):
    """Write a PNG of zeros, which takes some kilobytes however large it is."""
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    rows = zlib.compressobj(9)
    body = b"".join(rows.compress(bytes(1 + (width * bits + 7) // 8)) for _ in range(height)) + rows.flush()
    parts = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    chunks = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def peak():
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_an_image_of_too_many_pixels(tmp_path, ask):  # noqa: F811
    (tmp_path / "photos").mkdir()
    png_of(10_000, 10_000, 1, tmp_path / "photos" / "large.png")
    jpeg(tmp_path / "photos" / "ok.jpg", np.random.default_rng(0))
    before = peak()
    code, _, said = ask("data", "prepare", "folder", "--from", tmp_path / "photos", "--as", "p", "--workers", "0")
    assert (code, peak() - before < 50e6) == (2, True)
    assert "large.png (it has 10000 x 10000 pixels; at most 64,000,000 " in one_line(said)
    with pytest.raises(DataError, match="at most 64,000,000 are read"):
        crop_file(tmp_path / "photos" / "large.png", (0, 0, 8, 8), 8)


def test_a_large_image_takes_memory_in_proportion(tmp_path):
    """A hundred bytes a pixel once; the largest that is read has under a gigabyte."""
    (tmp_path / "photos").mkdir()
    png_of(5_000, 5_000, 8, tmp_path / "photos" / "large.png")
    code = "from marginlens.data.folder import index_folder; from pathlib import Path; import resource\n"
    code += "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    code += f"index_folder(Path({str(tmp_path / 'photos')!r}), 'p')\n"
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 16 * 25e6


def test_text_in_an_archive_that_is_too_long(tmp_path, ask, tinyimagenet):  # noqa: F811
    folder, _ = tinyimagenet
    archive = zip_of(folder, tmp_path / "t.zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file, file.open("t/wnids.txt", "w") as member:
        for _ in range(200):
            member.write(b"n\n" * (1 << 19))
    before = peak()
    code, _, said = ask("data", "prepare", "tinyimagenet", "--from", archive)
    assert (code, peak() - before < 150e6) == (2, True)
    assert "t.zip: wnids.txt has more than 16 MiB" in one_line(said)


@pytest.mark.parametrize("kind", ["long header", "huge member", "many members"])
def test_archives_that_hold_too_much(tmp_path, ask, kind, monkeypatch):  # noqa: F811
    path = tmp_path / "a.tar.xz"
    monkeypatch.setattr("marginlens.data.archives.MOST_MEMBERS", 100)
    with lzma.open(path, "wb", preset=0) as file:
        if kind == "many members":
            for i in range(200):
                file.write(tarfile.TarInfo(f"m{i}").tobuf())
        else:
            member = tarfile.TarInfo("m")
            member.type = tarfile.XHDTYPE if kind == "long header" else tarfile.REGTYPE
            member.size = 1 << (30 if kind == "long header" else 40)
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            for _ in range(64):
                file.write(bytes(1 << 20))
    before = peak()
    code, _, said = ask("data", "prepare", "cifar10", "--from", path)
    assert (code, peak() - before < 150e6) == (2, True)
    assert "a header of 1,073,741,824 bytes" in said or "holds too much: at most" in one_line(said)


@pytest.mark.parametrize("kind", ["encrypted", "method", "crc", "truncated", "xz"])
def test_archives_that_are_damaged(tmp_path, ask, kind, tinyimagenet):  # noqa: F811
    path = zip_of(tinyimagenet[0], tmp_path / "t.zip")
    held = bytearray(path.read_bytes())
    if kind == "xz":
        path = tmp_path / "t.tar.xz"
        packed = lzma.compress(np.random.default_rng(0).bytes(1 << 16))
        held = bytearray(packed)
        held[len(held) // 2] ^= 1
    elif kind == "truncated":
        held = held[:-30]
    else:
        at = held.index(b"PK\x01\x02", held.rindex(b"wnids.txt") - 60)
        local = held.index(b"wnids.txt") - 30
        for head, flags, method, crc in ((at, 8, 10, 16), (local, 6, 8, 14)):
            if kind == "encrypted":
                held[head + flags] |= 1
            elif kind == "method":
                held[head + method] = 97
            else:
                held[head + crc] ^= 1
    path.write_bytes(held)
    code, _, said = ask("data", "prepare", "tinyimagenet", "--from", path)
    assert (code, f"{path}" in one_line(said), "fetch it again" in said) == (2, True, True)


BOMB = (
    "a: &a ["
    + ",".join(["x"] * 9)
    + "]\n"
    + "".join(f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True))
)
MERGE = (
    "a: &a {"
    + ",".join(f"k{i}: 1" for i in range(9))
    + "}\n"
    + "".join(f"{n}: &{n} {{<<: [{','.join([f'*{p}'] * 9)}]}}\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True))
)


CONFIGURATIONS = {
    "aliases.yaml": f"{BOMB}epochs: *i\n",
    "merges.yaml": f"{MERGE}<<: *i\n",
    "deep.yaml": "epochs: " + "[" * 5000,
    "deep.json": '{"epochs": ' + "[" * 100_000,
    "deep2.json": '{"epochs": ' + "[" * 500 + "]" * 500 + "}",
    "long.yaml": "# \n" * 2**20,
    "name.yaml": f"? {[1] * 50}\n: 2\n",
    "bytes.yaml": "epochs: !!binary aGVsbG8=\n",
    "set.yaml": "epochs: !!set {a, b}\n",
    "digits.json": '{"epochs": ' + "1" * 5000 + "}",
    "value.json": json.dumps({"method": "x" * 100_000}),
    "nul.yaml": "epochs: \0",
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(tmp_path, ask, name):  # noqa: F811
    (tmp_path / name).write_text(CONFIGURATIONS[name])
    before = peak()
    code, out, said = ask("pretrain", "--config", tmp_path / name, "--print-config")
    assert (code, out, len(one_line(said)) < 1500, peak() - before < 100e6) == (2, "", True, True)


def test_merges_that_people_write(tmp_path):
    held = "base: &base {epochs: 3}\n"
    (tmp_path / "a.yaml").write_text("<<: {epochs: 3}\nseed: 4\n")
    from marginlens.options import read_config

    assert read_config(tmp_path / "a.yaml") == {"epochs": 3, "seed": 4}
    assert yaml.safe_load(held) == {"base": {"epochs": 3}}


SPECIAL = ("pipe", "zero", "folder", "socket")


def special(path, kind):
    """Put something else than a file at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        near = os.open(path.parent, os.O_RDONLY)
        with closing(socket.socket(socket.AF_UNIX)) as end:  # a socket's name must be short
            end.bind(f"/proc/self/fd/{near}/{path.name}")
        os.close(near)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "words",
    [
        ("data", "prepare", "cifar10", "--from", "{at}"),
        ("pretrain", "--config", "{at}", "--print-config"),
        ("pretrain", "--data", "little", "--batch", "8", "--weights", "{at}"),
        ("report", "--runs", "{runs}", "--out", "{out}", "--insert", "{at}"),
    ],
    ids=lambda words: words[-2] if words[-1] != "--print-config" else "--config",
)
def test_what_is_no_file_is_not_read(tmp_path, ask, kind, words, store):  # noqa: F811
    if kind == "folder" and words[1] == "prepare":
        pytest.skip("a folder may be given there")
    special(tmp_path / "at.yaml", kind)
    put(store)
    code, _, said = ask(*(w.format(at=tmp_path / "at.yaml", runs=store, out=tmp_path / "out") for w in words))
    assert (code, "must be a regular file" in one_line(said), "at.yaml" in said) == (2, True, True)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "metrics.jsonl",
        "result.json",
        "environment.jsonl",
        "lock",
        "evaluations/knn-shapes-0123456789.json",
    ],
)
def test_one_bad_folder_never_hides_the_others(store, ask, kind, name, tmp_path):  # noqa: F811
    good, bad = put(store), put(store, 1)
    special(bad / name, kind)
    code, out, _ = ask("runs", "--runs", store, "--json")
    found = json.loads(out)
    assert [run["name"] for run in found["runs"]] == sorted([good.name] + [bad.name] * (name == "lock"))
    assert code == (0 if name == "lock" else 2)
    assert ask("report", "--runs", store, "--out", tmp_path / "out")[0] == code
    assert good.name in (tmp_path / "out" / "report.html").read_text()


def test_a_checkpoint_that_is_no_file(trained, ask, tmp_path):  # noqa: F811
    for path in list((trained.path / "checkpoints").iterdir()):
        special(path, "pipe")
    code, _, said = ask("export", trained.path, "--out", tmp_path / "x.safetensors")
    assert (code, "it is a named pipe, and must be a regular file" in one_line(said)) == (2, True)
    assert ask("runs", "--runs", trained.path.parent)[0] == 0


NAMES = ["a\x1b[31mred", "[/b]", "[red]", "caf\udce9", "bidi\u202e", "c\x9b1m", "del\x7f"]


@pytest.mark.parametrize("name", NAMES)
def test_names_do_not_reach_the_terminal_as_control_characters(tmp_path, capsys, name, monkeypatch):
    folder = tmp_path / "stores"
    monkeypatch.setenv("MARGINLENS_DATA", str(folder))
    some = [stores.Batch(np.zeros((2, 3, 8, 8), np.uint8), np.array([0, 1]))]
    stores.write("x", {"train": some}, [name, "other"])
    for stranger in (name, f"{name}2"):
        path = os.path.join(os.fsencode(folder), os.fsencode(stranger))
        os.makedirs(path)
        shutil.copy(folder / "x" / "store.json", os.path.join(path, b"store.json"))
    for words in (["data", "list"], ["data", "info", "x"], ["data", "list", "--json"], ["data", "info", "x", "--json"]):
        main(words)
        said = capsys.readouterr()
        text = (said.out + said.err).replace("\n", "")
        assert text == output.legible(text)
        if words == ["data", "list", "--json"]:
            assert {f"{name}2", name} <= {row["name"] for row in json.loads(said.out)["data"]} or "/" in name
        elif "--json" in words:
            assert json.loads(said.out)["classes"] == [name, "other"]
        elif "info" in words:
            assert output.legible(name) in said.out
    with pytest.raises(SystemExit):
        main(["data", "info", name + "?"])
    said = one_line(capsys.readouterr().err)
    assert output.legible(said) == said


@pytest.mark.parametrize("name", NAMES)
def test_a_stray_folder_breaks_neither_list_nor_report(store, ask, tmp_path, name):  # noqa: F811
    good = put(store)
    os.makedirs(os.path.join(os.fsencode(store), os.fsencode(name)))
    for words in (("runs", "--runs", store), ("report", "--runs", store, "--out", tmp_path / "out")):
        code, _, said = ask(*words)
        assert code == 2
        assert one_line(said)[:-1] == output.legible(said[:-1])
    page = (tmp_path / "out" / "report.html").read_text()
    assert good.name in page
    assert "\x1b" not in page


def test_with_standard_error_closed_nothing_goes_to_standard_output():
    for closed in ("2>&-",):
        line = f'"$0" -m marginlens data inof {closed}'
        done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_text_that_a_stream_cannot_hold():
    """In the C locale an error about a name with an umlaut is still one line."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "marginlens", "data", "info", "\u00fcber\u202e"]
    done = subprocess.run(words, capture_output=True, env=environment, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
    assert done.stderr.isascii()


SEVERAL = """
import json, sys
from marginlens.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
        print("code 0", file=sys.stderr)
    except SystemExit as end:
        print("code", end.code, file=sys.stderr)
"""


def unprivileged(commands, limit=0):
    """Give commands in a process that may not read everything, though root runs the tests; return what each said."""
    command = [sys.executable, "-c", SEVERAL, json.dumps([[str(word) for word in words] for words in commands])]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root reads everything here, and there is no setpriv")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    if limit:
        command = ["sh", "-c", f'ulimit -n {limit}; exec "$0" "$@"', *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return re.findall(r"((?:.*\n)*?)code (\d+)\n", done.stderr)


def test_folders_that_may_not_be_read(tmp_path, store):  # noqa: F811
    tree_of_jpegs(tmp_path / "photos")
    tree_of_jpegs(tmp_path / "whole")
    put(store)
    others = shutil.copytree(store, tmp_path / "others")
    prepare = ("data", "prepare", "folder", "--as", "p", "--workers", "0", "--from")
    cases = [
        (tmp_path / "photos", (*prepare, tmp_path / "photos")),
        (tmp_path / "whole" / "train" / "cat", (*prepare, tmp_path / "whole")),
        (next(store.iterdir()), ("runs", "--runs", store)),
        (others, ("runs", "--runs", others)),
        (others, ("report", "--runs", others, "--out", tmp_path / "out")),
        (others, ("pretrain", "--data", "little", "--batch", "8", "--runs", others / "below")),
    ]
    for place, _ in cases:
        place.chmod(0)
    try:
        found = unprivileged([words for _, words in cases])
        for (place, _), (said, code) in zip(cases, found, strict=True):
            assert (code, str(place) in one_line(said), "Permission denied" in said) == ("2", True, True), said
    finally:
        for place, _ in cases:
            place.chmod(0o755)


@pytest.mark.parametrize("limit", [20, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (12, 16, 32))])
def test_few_open_files(limit, store, tmp_path):  # noqa: F811
    for i in range(3):
        put(store, i)
    commands = [("runs", "--runs", store), ("data", "list"), ("report", "--runs", store, "--out", tmp_path / "out")]
    for said, code in unprivileged(commands, limit):
        assert "Traceback" not in said
        assert code == "0" or one_line(said)


def test_exports_are_byte_reproducible(trained, tmp_path):  # noqa: F811
    held = []
    for i in range(6):
        ml.export(trained, tmp_path / str(i) / "b.safetensors")
        ml.embed(trained, "little", tmp_path / str(i) / "f.safetensors")
        held.append(content(tmp_path / str(i)))
    assert all(one == held[0] for one in held)
    found = load_file(tmp_path / "0" / "b.safetensors")
    own = ml.open_run(trained.path).checkpoint().tensors
    assert all(torch.equal(x, own[f"method.student.backbone.{name}"]) for name, x in found.items())


def test_model_cards_escape_names():
    from marginlens.runs.export import _escaped

    assert _escaped("cifar10") == "cifar10"
    assert _escaped("my-photos_2024") == "my-photos_2024"
    assert _escaped("a|b") == r"a\|b"
    assert _escaped("x](http://e.com)\n# Title") == r"x\]\(http://e.com\)\\n\# Title"
    assert "<script>" not in _escaped("<script>").replace("\\<", "")
    assert "\x1b" not in _escaped("\x1b[31m")


def test_weights_of_integers_are_refused(trained, tmp_path):  # noqa: F811
    ml.export(trained, tmp_path / "b.safetensors")
    held = load_file(tmp_path / "b.safetensors")
    save_file({name: x.round().to(torch.int8) for name, x in held.items()}, tmp_path / "q.safetensors")
    with pytest.raises(ValueError, match=r"do not fit this encoder: not floating: \S+ is torch.int8"):
        ml.pretrain(settings(weights=str(tmp_path / "q.safetensors")), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_advice_on_memory_fits_the_device():
    from marginlens.runs.evaluate import to_lower

    assert "--device cpu" not in to_lower(torch.device("cpu"))
    assert "--device cpu" in to_lower(torch.device("cuda"))


def test_reading_files(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes, and no more is read"):
        files.read(tmp_path / "x", 4)
    for deep in ("[" * 33 + "]" * 33, '{"a":' * 33 + "1" + "}" * 33, "[" * 100_000):
        with pytest.raises(ValueError, match="nested more than 32 levels deep"):
            files.parse(deep)
    assert files.parse("[" * 32 + "]" * 32) is not None
    assert files.parse('["' + "[" * 100 + '"]') == ["[" * 100]
    assert files.parse('["\\"' + "[" * 100 + '"]') == ['"' + "[" * 100]
    assert [files.spoken(x) for x in (5, 2048, 64 << 20, 5000 << 30)] == ["5 bytes", "2 KiB", "64 MiB", "5,000 GiB"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_format_that_is_listed_is_read(kind):
    held = io.BytesIO()
    Image.new("RGB", (9, 7)).save(held, kind)
    assert images.decode(held.getvalue(), "x").shape == (3, 7, 9)


def test_a_bomb_that_took_the_place_of_an_image(tmp_path, ask, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "stores"))
    for i in range(3):
        jpeg(tmp_path / "photos" / f"{i}.jpg", np.random.default_rng(i))
    index, _ = prepare_folder(tmp_path / "photos", "p")
    png_of(20_000, 20_000, 1, tmp_path / "photos" / "1.jpg")
    with pytest.raises(DataError, match=r"1\.jpg has changed since its folder was prepared"):
        crop_file(tmp_path / "photos" / "1.jpg", (0, 0, 8, 8), 8, index.splits["train"].known(1))
    with pytest.raises(DataError, match=r"1\.jpg cannot be decoded"):
        crop_file(tmp_path / "photos" / "1.jpg", (0, 0, 8, 8), 8)
    code, out, _ = ask("data", "prepare", "folder", "--from", tmp_path / "photos", "--as", "p", "--skip-bad")
    assert (code, "skipped: 1.jpg" in out) == (0, True)
