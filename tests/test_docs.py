"""The documents agree with the code."""

import ast
import contextlib
import doctest
import importlib.util
import inspect
import io
import itertools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import marginlens as ml
from marginlens.cli import COMMANDS, main
from marginlens.data import shapes, sources, store
from marginlens.data.prepare import prepare
from marginlens.effects import EFFECTS
from marginlens.lens import theory
from tests.catalogue import SINGLE, close, random

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md"))),
]
REFERENCE = re.compile(r"\b(Eq|Alg|Fig|Lemma|Theorem|Sec|Appendix)s?\.? ((?:\d[\d.]*\d|\d|[A-Z]\b)(?:, \d+)*)")


def references(text):
    """'Eqs. 8, 9, Alg. 3' -> {'Eq. 8', 'Eq. 9', 'Alg. 3'}"""
    found = set()
    for kind, numbers in REFERENCE.findall(text):
        dot = "." if kind in ("Eq", "Alg", "Fig", "Sec") else ""
        found |= {f"{kind}{dot} {number}" for number in numbers.split(", ")}
    return found


def homes():
    """Every (reference, object) that the first line of a docstring in the package claims."""
    for path in sorted((ROOT / "marginlens").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for prefix, node in walk(ast.parse(path.read_text())):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            for reference in references(first):
                yield reference, f"{module}.{prefix}{node.name}"


def walk(tree, prefix=""):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix, node
            if isinstance(node, ast.ClassDef):
                yield from walk(node, f"{prefix}{node.name}.")


def page_of(name):
    """The page of that name, in whatever section it is."""
    (path,) = (ROOT / "docs").rglob(name)
    return path


def blocks_of(name):
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page_of(name).read_text(), flags=re.S)


def table(page, columns):
    lines = [x for x in page_of(page).read_text().splitlines() if x.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == columns]


def test_equations_both_ways():
    listed = set()
    for reference, names, *_ in table("equations.md", 3):
        if reference != "in the paper":
            listed |= {(reference, name) for name in re.findall(r"`([\w.]+)`", names)}
    assert listed == set(homes())


def test_every_numbered_thing_of_the_paper_has_a_home():
    covered = {reference for reference, _ in homes()}
    wanted = {f"Eq. {i}" for i in range(1, 13)} | {f"Alg. {i}" for i in range(1, 7)}
    wanted |= {"Theorem 4.1", "Lemma 4.2", "Lemma 4.3", "Lemma 4.4", "Fig. 1", "Fig. 2", "Appendix B"}
    assert wanted <= covered


def test_the_table_of_what_each_does_has_every_effect():
    rows = [row[0] for row in table("effects.md", 4) if row[0].startswith("`")]
    assert {name.strip("`").split("(")[0].lower() for name in rows} == set(EFFECTS)


def test_the_composition_table_lists_every_pair():
    pairs = {tuple(sorted(pair.split(" * "))) for pair, _ in table("effects.md", 2) if " * " in pair}
    assert pairs == {tuple(sorted(p)) for p in itertools.combinations_with_replacement(EFFECTS, 2)}


@pytest.mark.parametrize(("pair", "meaning"), [row for row in table("effects.md", 2) if " * " in row[0]])
def test_every_pair_means_what_the_table_says(pair, meaning):
    left, right = ([str(e) for e in SINGLE if type(e).__name__.lower() == name] for name in pair.split(" * "))
    for a, b in {*itertools.product(left, right), *itertools.product(right, left)}:
        if meaning.startswith("refused"):
            with pytest.raises(ValueError, match="both move"):
                ml.effect(f"{a} * {b}")
            continue
        q, k = random(6, 4, seed=0), random(6, 4, seed=1)
        one, other, both = (ml.rows(q, k, effect=e) for e in (a, b, f"{a} * {b}"))
        close(both.w_pos, one.w_pos * other.w_pos, 1e-12)
        close(both.w_neg, one.w_neg * other.w_neg, 1e-12)
        moved = one if a.startswith("margin") else other
        assert (both.loss == moved.loss).all()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_benchmarks_page_is_what_was_measured():
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert page_of("benchmarks.md").read_text() == module.page()


def test_the_readme_runs():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["loss"].isfinite()


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_documents_exist(page):
    """Every line that begins with a command names one, and options that it takes."""
    for line in re.findall(r"^ +marginlens (.+)$", (ROOT / page).read_text(), flags=re.M):
        if line == "centroid RUN":  # the example of a new evaluation, which has a test of its own
            continue
        name = next((name for name in COMMANDS if f"{line} ".startswith(f"{name} ")), None)
        assert name, line
        with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
            main([*name.split(), "--help"])
        for option in re.findall(r"(?<!\S)--[a-z-]+", line.split("#")[0]):
            assert option in said.getvalue(), f"{name} has no {option}"


def test_a_data_set_is_added_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sources, "SOURCES", sources.SOURCES.copy())
    monkeypatch.setattr("marginlens.data.prepare.SOURCES", sources.SOURCES)
    (block,) = blocks_of("adding.md")
    exec(block, {})
    images, labels = shapes.draw(6)
    (tmp_path / "mine").mkdir()
    np.savez(tmp_path / "mine" / "train.npz", images=images, labels=labels % 2)
    found = prepare("mine", tmp_path / "mine")
    assert (found.splits["train"].images == images).all()
    assert found.classes == ("cat", "dog")


def test_the_laboratory_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    few = {split: [store.Batch(*shapes.draw(count, split))] for split, count in (("train", 512), ("test", 64))}
    store.write("shapes", few, shapes.CLASSES)
    (block,) = blocks_of("training.md")
    exec(block, {})
    assert re.fullmatch(r"[\d.]+ [\d.]+\n", capsys.readouterr().out)


def test_a_store_is_read_as_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (kept,) = (ROOT / "tests" / "fixtures" / "run-0.1").glob("mocov3-*")
    shutil.copytree(kept, tmp_path / "runs" / kept.name)
    (block,) = blocks_of("run-folder.md")
    exec(block, {})
    assert kept.name in capsys.readouterr().out
    assert (tmp_path / "home" / kept.name / "config.json").read_bytes() == (kept / "config.json").read_bytes()


def test_the_first_page_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.S)
    names = {}
    exec(block, names)
    assert names["q"].grad.isfinite().all()


def examples():
    """Examples in the docstrings of public names, and of the theory."""
    names = {"ml": ml, "torch": torch}
    for name in ml.__all__:
        yield from doctest.DocTestFinder(recurse=False).find(getattr(ml, name), name, globs=names)
    yield from doctest.DocTestFinder().find(theory, globs=names)


@pytest.mark.parametrize("example", [example for example in examples() if example.examples], ids=lambda x: x.name)
def test_examples_in_docstrings(example):
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize(
    "name",
    ["info_nce", "nt_xent", "positive_only", "rows", "InfoNCE", "NTXent", "effect", *map(str.capitalize, EFFECTS)],
)
def test_every_argument_of_a_loss_and_of_an_effect_is_explained(name):
    public = getattr(ml, name)
    said = re.findall(r"^ +(\w+): \S", public.__doc__.partition("Args:\n")[2].partition("\n\n")[0], flags=re.M)
    assert said == list(inspect.signature(public).parameters)


def test_class_labels_as_positives_are_row_indices():
    """As the reference of info_nce says of this trap: the label names a row of k, whatever that row shows."""
    q, k, labels = random(4, 3, seed=0), random(6, 3, seed=1), torch.tensor([2, 0, 2, 5])
    cosines = torch.nn.functional.cosine_similarity(q, k[labels])
    close(ml.rows(q, k, positives=labels).c, cosines, 1e-12)
    with pytest.raises(ValueError, match="positives"):
        ml.info_nce(q, k, positives=labels + 1)


def test_public_names():
    assert all(hasattr(ml, name) for name in ml.__all__)
    wanted = {"info_nce", "nt_xent", "positive_only", "InfoNCE", "NTXent", "effect", "rows"}
    assert wanted | {cls.__name__ for cls in EFFECTS.values()} <= set(ml.__all__)


def test_the_guide_of_the_lens_runs(capsys):
    names = {}
    blocks = blocks_of("lens.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["found"]["samples"] == 2
    assert len(capsys.readouterr().out.splitlines()) == 3
