"""The committed tables follow from the committed records: nothing in them is typed by hand."""

from pathlib import Path

from marginlens.report.commands import read
from marginlens.report.rates import rates_picture
from marginlens.report.tables import markdown

ROOT = Path(__file__).parents[2]
AGAIN = "run: marginlens report --runs results/runs --markdown docs/results.md"
DRAW = "run: marginlens report --runs results/runs --only tab2 tab3 --rates docs/rates.svg"


def test_the_results_are_those_of_the_records():
    found = read([ROOT / "results" / "runs"])
    assert not found.bad
    page = ROOT / "docs" / "results.md"
    assert page.read_text() == markdown(found, page), AGAIN


def test_so_is_the_picture_of_learning_rates():
    assert (ROOT / "docs" / "rates.svg").read_text() == rates_picture(
        read([ROOT / "results" / "runs"], ["tab2", "tab3"])
    ), DRAW
