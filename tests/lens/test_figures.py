"""The paper's figures and claims: files that are the same each time, and verdicts that the numbers give."""

import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from marginlens.cli import main
from marginlens.lens import claims, figures, theory


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    out = tmp_path_factory.mktemp("lens") / "new"
    main(["lens", "figures", str(out)])
    return out


def test_every_figure_is_there_in_three_forms(drawn):
    names = {*figures.FIGURES, *(f"claim-{name}" for name in claims.CLAIMS)}
    assert {p.name for p in drawn.iterdir()} == {f"{n}.{k}" for n in names for k in figures.KINDS} | {"claims.md"}
    for name in names:
        with Image.open(drawn / f"{name}.png") as image:
            assert image.width >= 600
            assert len(image.convert("RGB").resize((60, 40)).getcolors(2400)) > 20  # not an empty sheet
        assert (drawn / f"{name}.pdf").read_bytes().startswith(b"%PDF-")


def test_they_are_drawn_alike_each_time(drawn, tmp_path):
    for kind in figures.KINDS:
        again = figures.drawn(figures.FIGURES["fig1"], "fig1", kind)
        assert again == (drawn / f"fig1.{kind}").read_bytes()
    figures.save(drawn, {"fig1": figures.FIGURES["fig1"]})  # ours is replaced


def test_the_axes_are_those_of_the_captions(drawn):
    def texts(name):
        return re.findall(r"<!-- (.*?) -->", (drawn / f"{name}.svg").read_text()) + re.findall(
            r"<text[^>]*>([^<]+)</text>", (drawn / f"{name}.svg").read_text()
        )

    assert {"positive", "negative"} <= set(texts("fig1"))
    assert {"on positives alone", "on the whole row"} <= set(texts("fig2"))
    titles = {f"m1 = {m1:g}, tau = {tau:g}" for m1 in figures.FIG8_M1 for tau in figures.FIG8_TAU}
    assert titles <= set(texts("fig8"))
    assert "beta = 1, tau = 0.25, m1 = 0.4" in figures.CAPTIONS["fig2"]


def test_the_line_is_where_the_weight_is_one():
    """Of the ratio: at theta = pi - m1 / 2, whatever the probability; of the sine factor: at (pi - m1) / 2."""
    for m1 in figures.FIG8_M1:
        at = theory.sum_ratio(math.pi - m1 / 2, torch.tensor([0.1, 0.9], dtype=torch.float64), m1)
        assert at.tolist() == pytest.approx([1.0, 1.0])
        assert float(theory.angular_factor((math.pi - m1) / 2, m1)) == pytest.approx(1.0)


def test_verdicts(drawn):
    """Those that `theory`'s own tests prove by algebra."""
    found = {name: claim.check()[0] for name, claim in claims.CLAIMS.items()}
    assert found == {
        "peak": True,
        "centre": True,
        "broadens": False,
        "small-angles": True,
        "grows": False,
        "limit": True,
        "one-ratio": False,
        "as-printed": False,
        "byol": False,
    }
    page = (drawn / "claims.md").read_text()
    assert page.count("| no |") == 5
    assert "0.97, 0.94, 0.87, 0.75, 0.51" in page  # 1 - m1 / (2 pi)
    assert [round(1 - m1 / (2 * math.pi), 2) for m1 in claims.M1] == [0.97, 0.94, 0.87, 0.75, 0.51]
    for image in re.findall(r"\]\(([\w-]+\.\w+)\)", page):
        assert (drawn / image).is_file()


@pytest.mark.parametrize("name", ["fig1.png", "fig2.svg", "fig8.pdf", "claims.md"])
def test_a_strangers_file_is_left_alone(tmp_path, capsys, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(SystemExit) as end:
        main(["lens", "figures", str(tmp_path)])
    assert end.value.code == 2
    assert name in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "x").write_text("")
    with pytest.raises(SystemExit):
        main(["lens", "figures", str(tmp_path / "x")])
    assert "is a file" in capsys.readouterr().err


def test_the_page_of_the_documents_is_what_is_computed():
    """The page and its pictures are written anew by `marginlens lens figures`."""
    docs = Path(__file__).parents[2] / "docs" / "paper"
    assert (docs / "claims.md").read_text() == claims.page(), "run: marginlens lens figures OUT, and copy its claims.md"
    for image in re.findall(r"\]\(([\w-]+\.\w+)\)", claims.page()):
        assert (docs / image).is_file()
