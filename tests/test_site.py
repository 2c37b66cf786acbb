"""The documentation as a site: it builds without a warning, lists every public name, and stays short."""

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import marginlens as ml
from marginlens import evals
from marginlens.cli import COMMANDS
from marginlens.lens import theory
from marginlens.paper import __all__ as of_the_paper
from marginlens.runs.config import Pretrain
from tests.test_interface import options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def build(source, out, **environment):
    """Build a site as `make docs` does; its warnings are in stderr."""
    words = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q", source, out]
    return subprocess.run(
        words, check=False, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def shown(path):
    """The words of a built page, without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", path.read_text()))


def test_the_site(tmp_path):
    """One test, because the site is built once for all that is asked of it."""
    done = build(DOCS, tmp_path / "site", MARGINLENS_REPOSITORY="")
    assert (done.returncode, done.stderr) == (0, "")
    reference = tmp_path / "site" / "reference"

    names = set(re.findall(r'id="(marginlens\.[\w.]+)"', (reference / "api.html").read_text()))
    wanted = {f"marginlens.{name}" for name in ml.__all__}
    wanted |= {f"marginlens.Rows.{field}" for field in ml.Rows._fields}
    wanted |= {f"marginlens.Run.{name}" for name in public(ml.Run)}
    wanted |= {f"marginlens.nets.{name}" for name in ml.nets.__all__ if callable(getattr(ml.nets, name))}
    wanted |= {f"marginlens.lens.theory.{name}" for name in functions(theory)}
    wanted |= {f"marginlens.paper.{name}" for name in of_the_paper}
    assert wanted - names == set()

    page = shown(reference / "api.html")
    assert "These are NOT class labels" in page
    assert "the positive is repelled where it is negative" in page
    assert '<abbr title="marginlens/effects.py">' in (reference / "effects.html").read_text()

    page = shown(reference / "commands.html")
    for name in COMMANDS:
        assert f"marginlens {name}" in page, name
        for option in options(name):
            assert (option.split()[0] if option.startswith("-") else option.upper()) in page, (name, option)

    page = shown(reference / "settings.html")
    for model in (Pretrain, *(evals.get(name).settings for name in evals.MODULES)):
        for name, field in model.model_fields.items():
            assert field.description.split(";")[0] in page, (model.__name__, name)


def public(cls):
    """Names of a class that are its own: fields, properties and methods."""
    return {name for name in (*cls.__annotations__, *vars(cls)) if not name.startswith("_")}


def functions(module):
    """Names of a module's own public functions and classes."""
    own = {name: thing for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__}
    return {name for name in own if not name.startswith("_")}


def test_links_to_nowhere_fail_and_links_to_files_do_not(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("conf.py", "generate.py", "static"):
        copy = shutil.copytree if (DOCS / name).is_dir() else shutil.copy
        copy(DOCS / name, docs / name)
    (tmp_path / "kept.py").write_text("")
    (docs / "index.md").write_text(
        "# Links\n\n[file](../kept.py), [page](gone.md), [gone](../gone.py), [part](#gone)\n"
    )
    done = build(docs, tmp_path / "site", MARGINLENS_REPOSITORY="https://example.org/blob/main")
    assert done.returncode != 0
    assert re.findall(r"'([^']*gone[^']*)'", done.stderr) == ["gone.md", "../gone.py", "gone"]
    assert 'href="https://example.org/blob/main/kept.py"' in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_the_first_sentence_says_what_the_page_is_for(page):
    title, first = re.split(r"\n\s*\n", (DOCS / page).read_text().strip(), maxsplit=2)[:2]
    assert re.fullmatch(r"# \S.*", title)
    assert re.match(r"[A-Z`*]", first), first
    assert re.search(r"[.?:](\s|$)", first), first


LIMIT = 18_000
"""Words of all pages that somebody wrote: a reader has an hour and a half."""
GENERATED = ("results.md", "paper/claims.md")
"""Pages that a command writes."""
HELD = ("developing/benchmarks.md", "paper/appendix.md", "paper/equations.md", "paper/findings.md")
"""Pages whose tables a script writes, or a test compares with records or code."""


def words(page):
    """Return the words of a page that somebody wrote."""
    lines = [] if page in GENERATED else (DOCS / page).read_text().splitlines()
    if page in HELD:
        lines = [line for line in lines if not line.startswith("|")]
    return sum(any(c.isalnum() for c in word) for word in " ".join(lines).split())


def test_the_pages_are_short():
    counts = {page: words(page) for page in PAGES}
    longest = sorted(counts.items(), key=lambda item: -item[1])[:5]
    assert sum(counts.values()) <= LIMIT, longest
