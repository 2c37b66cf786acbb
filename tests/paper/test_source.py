"""The registry against the paper's LaTeX source, number by number, both ways. Skipped without the source."""

import re
from pathlib import Path

import pytest

from marginlens.paper import TABLES, figures, hyper, recipe
from tests.paper import latex

SOURCE = Path(__file__).parents[3] / "shared" / "paper" / "paper.tex"
HEADERS = {"tab1": 2, "tab2": 1, "tab3": 1, "tab4": 2, "tab9": 2, "tab10": 2}
"""How many columns of a table say what a row is."""
EQUATIONS = {"eq:generalized-eq": "3", "eq:delta": "4", "eq:scales": "6", "eq:pos-emp": "8", "eq:curve-control": "11"}
OF_KIND = {
    kind: [key for key, t in TABLES.items() if t.kind == kind] for kind in ("table", "hyper-parameters", "figure")
}


@pytest.fixture(scope="module")
def source():
    if not SOURCE.exists():
        pytest.skip(f"{SOURCE.name} is not at hand (looked in ../shared/paper): compared with a checksum only")
    return SOURCE.read_text()


@pytest.fixture(scope="module")
def floats(source):
    return {f"{found.kind[:3]}{found.number}": found for found in latex.floats(source)}


def says(source, text):
    """Whether the source has these words in one run, whatever its line breaks."""
    return " ".join(text.split()) in " ".join(source.split())


def stored(table):
    """What the registry says a table prints."""
    if table.values:
        return {(v.row, v.column): v.value for v in table.values}
    return {(cell.row, cell.column): str(cell.published) for cell in table.cells}


def test_all_tables_and_figures_are_here(floats):
    assert set(floats) == set(TABLES)
    assert {key: found.label for key, found in floats.items()} == {key: t.label for key, t in TABLES.items()}


def test_two_tables_share_a_label(floats):
    labels = [found.label for found in floats.values()]
    assert {label for label in labels if labels.count(label) > 1} == {"tab:hparam_pos_curv"}


@pytest.mark.parametrize("key", OF_KIND["table"])
def test_results_both_ways(key, floats):
    assert stored(TABLES[key]) == latex.results(floats[key], HEADERS[key])


@pytest.mark.parametrize("key", OF_KIND["hyper-parameters"])
def test_hyper_parameters_both_ways(key, floats):
    printed = latex.results(floats[key], 2)
    assert stored(TABLES[key]) == {at: None if text == "-" else float(text) for at, text in printed.items()}


@pytest.mark.parametrize("key", OF_KIND["table"] + OF_KIND["hyper-parameters"])
def test_no_number_of_a_table_is_left_out(key, floats):
    """Counted apart from rows and columns: the numbers in row headers are somewhere in the registry, too."""
    cells, values = TABLES[key].cells, TABLES[key].values
    mine = [x for cell in cells for x in str(cell.published).split(" ± ")]
    mine += [x for row in dict.fromkeys(cell.row for cell in cells) for x in re.findall(r"(?<= = )[\d.]+", row)]
    mine += [str(v.value) for v in values if v.value is not None]
    assert sorted(map(float, mine)) == sorted(map(float, latex.numbers(floats[key])))


@pytest.mark.parametrize("key", TABLES)
def test_captions(key, floats):
    labels = {found.label: str(found.number) for found in floats.values()} | EQUATIONS | {"ssec:ratio": "5.4"}
    caption = TABLES[key].caption.replace("m1", "m_1")
    assert latex.words(caption, {}) == latex.words(floats[key].caption, labels)


@pytest.mark.parametrize("key", OF_KIND["table"])
def test_addresses_lead_to_the_number(key, floats):
    printed = latex.results(floats[key], HEADERS[key])
    for cell in TABLES[key].cells:
        place, row, column = re.fullmatch(r"(Tab\. \d+), row (.*), column (.*)", cell.address).groups()
        assert place == f"Tab. {floats[key].number}"
        assert printed[row, column] == str(cell.published)


def test_no_figure_has_its_values_in_the_source(source, floats):
    """Should a figure's file or values turn up, the registry must learn them."""
    assert all(r"\includegraphics" not in t.rest for key, t in floats.items() if key.startswith("tab"))
    assert set(re.findall(r"\\includegraphics(?:\[[^]]*\])?\{([^}]*)\}", source)) == {" "}
    assert all(cell.published is None for key in OF_KIND["figure"] for cell in TABLES[key].cells)


def test_grids_that_the_text_gives(source):
    assert says(
        source,
        "three convex ($c$ is 1/3, 0.5, 0.7), three concave ($c$ is 1.5, 2.5, 5), and linear ($c$ is 1) curves",
    )
    assert figures.CURVATURES == (1 / 3, 0.5, 0.7, 1, 1.5, 2.5, 5)
    given = ", ".join(f"{m1:g}" for m1 in figures.RATIO_MARGINS[:-1])
    assert says(source, f"using $m_1$ of {given}, and {figures.RATIO_MARGINS[-1]:g}.")
    assert says(source, "emphasizing positive samples on both MoCo and SimCLR")


def test_what_the_appendix_states(source):
    pre, probe, tau = recipe.STATED, recipe.STATED_PROBE, recipe.STATED_TAU
    assert says(source, f"for {recipe.EPOCHS} epochs and then fine-tuned it on a target dataset for {probe['epochs']}")
    assert tau["MoCo"] == tau["SimCLR"]
    assert says(source, f"batch size to {pre['batch']} and $\\tau$ to {tau['MoCo']} (for MoCov3 and SimCLR)")
    assert says(source, f"latent feature dimension was set to {pre['out']}, while the hidden dimension")
    assert says(source, f"(including projection heads and predictors) was set to {pre['hidden']}")
    assert pre["momentum"] == probe["momentum"]
    assert says(source, f"SGD with a momentum of {pre['momentum']} for both pretraining and evaluation")
    assert says(source, f"set to {pre['lr']} for pretraining the backbone model and {probe['lr']} for fine-tuning")


def test_imagenet_settings(source):
    (moco, simclr), stated = hyper.IMAGENET.values(), hyper.IMAGENET_STATED
    assert says(
        source,
        f"for MoCov3, we set $s$ to {moco['s']:g} and $c$ to {moco['c']:g}, "
        f"while for SimCLR, $s$ was set to {simclr['s']:g} and $c$ to {simclr['c']:g}.",
    )
    assert says(source, f"a batch size of {stated['batch']:,}.")
    assert says(
        source, f"for {stated['epochs']} epochs and fine-tuned a linear layer for {stated['probe_epochs']} epochs"
    )
    assert says(source, "For ImageNet, we used ResNet-50")


def test_seeds_and_spread_are_not_stated(source):
    """Should they be found after all, the notes of the tables must say so."""
    assert not re.search(
        r"\bseeds?\b|standard (?:deviation|error)|confidence|\b(?:three|five|\d+) (?:runs|trials)", source
    )


def test_a_changed_number_is_seen(source, floats):
    """The comparison can fail: one digit in any cell of the source, and it differs."""
    for key in OF_KIND["table"]:
        for text in {str(cell.published).split(" ± ")[0] for cell in TABLES[key].cells}:
            found = floats[key]
            rest = found.rest.replace(text, text[:-1] + str((int(text[-1]) + 1) % 10))
            assert rest != found.rest
            other = latex.Float(found.kind, found.number, found.caption, found.label, rest)
            assert stored(TABLES[key]) != latex.results(other, HEADERS[key])
