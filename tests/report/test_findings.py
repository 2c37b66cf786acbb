"""The findings and the README's table, held against the records: each number is recomputed here."""

import re
import statistics

import pytest
from scipy import stats

from tests.report import measured as m

PAGE = "docs/paper/findings.md"
HEAD = ("plain", "margins", "pos.", "pos. & curv.")
DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}


@pytest.fixture(scope="module")
def runs():
    return m.records()


def test_the_best_rates_of_plain_and_pos(runs):
    table = m.rows(PAGE, "At each backbone's best rate")
    rows = {(row["measured on"], row["batch norms"]): row for row in table if "pos." in row}
    assert list(rows) == [(column, norms) for column in m.MEASURED for norms in m.NORMS]
    pairs = 0
    for (column, norms), row in rows.items():
        plain, pos = (m.at_best(m.curves(runs, name, column, **m.NORMS[norms])) for name in ("plain", "pos."))
        assert (row["plain"], row["pos."]) == (m.shown(m.mean(plain)), m.shown(m.mean(pos)))
        difference = m.signed(m.gain(pos, plain))
        if min(len(plain), len(pos)) > 1:
            test = stats.ttest_ind(list(pos.values()), list(plain.values()), equal_var=False)
            low, high = test.confidence_interval(0.95)
            difference += f" ± {m.shown((high - low) / 2)}"
        assert row["pos. - plain"] == difference
        by_seed = [pos[seed] - plain[seed] for seed in sorted(pos.keys() & plain.keys())]
        assert row["seed by seed"].split(", ") == [m.signed(one) for one in by_seed]
        assert max(by_seed) < 0
        pairs += len(by_seed)
    assert f"All {pairs} differences seed by seed are negative" in (m.ROOT / PAGE).read_text().replace("\n", " ")


def test_what_every_effect_gains_at_the_best_rate(runs):
    name = "best rate, gain over plain"
    rows = {row[name]: row for row in m.rows(PAGE, "At each backbone's best rate") if name in row}
    assert list(rows) == list(m.EFFECTS)[1:]
    for effect, row in rows.items():
        for column in m.MEASURED:
            gains = []
            for norms in m.NORMS.values():
                ours, plain = (m.curves(runs, one, column, **norms) for one in (effect, "plain"))
                gains.append((m.signed(m.gain(m.at_best(ours), m.at_best(plain))) or "one rate") if ours else "")
            assert row[column] == " / ".join(filter(None, gains))


def test_seeds_before_and_after_the_choice(runs):
    """Gains seed by seed at rate 1; each seed of the one column began before every one of the other."""
    before, after = [], []
    for row in m.rows(PAGE, "Choices made on test accuracy"):
        if "seeds run after it" not in row:
            continue
        column = row["measured on"]
        plain, pos = (m.at_rate_1(m.curves(runs, name, column)) for name in ("plain", "pos."))
        table = "tab3" if "to" in column else "tab2"
        printed = [m.published(table, name, column).mean for name in ("pos.", "plain")]
        assert row["published"] == m.signed(printed[0] - printed[1])
        seeds = {}
        for name, times in (("seeds known at the choice", before), ("seeds run after it", after)):
            found = {int(seed): said for seed, said in re.findall(r"(\d): (\S\d+\.\d\d)", row[name])}
            data = m.MEASURED[column][0]
            for effect in ("plain", "pos."):
                by_seed = m.chosen(runs, m.spelled(effect, data), data)
                times += [by_seed[seed].started for seed in found]
            seeds |= found
        assert seeds == {seed: m.signed(pos[seed] - plain[seed]) for seed in pos.keys() & plain.keys()}
    assert max(before) < min(after)


@pytest.mark.parametrize(
    ("title", "number"),
    [
        ("Size of the features", lambda run: _probe(run).feature_norm),
        ("Nearest neighbours", lambda run: run.result.knn),
    ],
)
def test_features_and_neighbours(runs, title, number):
    rows = {(row["data"], row["batch norms"]): row for row in m.rows(PAGE, title)}
    assert list(rows) == [(data, norms) for data in DATA for norms in m.NORMS]
    for (data, norms), row in rows.items():
        for name in HEAD:
            effect = m.spelled(name, DATA[data])
            found = m.chosen(runs, effect, DATA[data], **m.NORMS[norms]).values()
            assert row[name] == m.shown(statistics.fmean(number(run) for run in found))


def _probe(run):
    return next(one for one in run.evaluations if one.kind == "probe" and one.data == run.settings.data)


def test_other_methods(runs):
    for row in m.rows(PAGE, "Other methods"):
        method, column = row["method"], row["data"]
        found = m.curves(runs, "plain", column, method=method.lower())
        (run,) = m.chosen(runs, "plain", DATA[column], method=method.lower()).values()
        assert row["published"] == str(m.published("tab2", "plain", column, method))
        assert row["rate 1"] == m.shown(m.mean(m.at_rate_1(found)))
        assert row["best rate"] == m.shown(m.mean(m.at_best(found)))
        assert row["kNN"] == m.shown(run.result.knn)


def test_transfers(runs):
    """How far they are above the paper, from and to."""
    said = re.search(r"cells are ([\d.]+) to ([\d.]+) points.*by ([\d.]+) to ([\d.]+)\.", _flat("Transfers"))
    for norms, low, high in zip(m.NORMS.values(), said.groups()[::2], said.groups()[1::2], strict=True):
        above = [
            m.mean(m.at_rate_1(m.curves(runs, row, column, **norms))) - m.published("tab3", row, column).mean
            for row in (*HEAD, "ratio")
            for column in ("to CIFAR-10", "to CIFAR-100")
        ]
        assert min(above) == pytest.approx(float(low), abs=0.06)
        assert max(above) == pytest.approx(float(high), abs=0.06)


def _flat(title):
    return (m.ROOT / PAGE).read_text().split(f"\n## {title}")[1].split("\n## ")[0].replace("\n", " ")


def test_the_readme(runs):
    """The four rows: published, ours at the paper's rate, ours at each backbone's best rate."""
    rows = m.rows("README.md", "Results")
    assert [row["MoCo v3"] for row in rows] == list(HEAD)
    for row in rows:
        effect = row["MoCo v3"]
        cells = []
        for column in DATA:
            found = m.curves(runs, effect, column)
            cells += [str(m.published("tab2", effect, column)), m.with_spread(m.at_rate_1(found))]
            cells += [m.shown(m.mean(m.at_best(found)))]
        assert [row[i] for i in range(1, 7)] == cells
        assert {row["seeds"]} == {str(len(m.curves(runs, effect, column))) for column in DATA}


def test_the_evidence_in_the_readme(runs):
    """Each gain over plain in the table of situations, in the order of its row."""

    def gain(row, column, rate=m.at_rate_1):
        return m.signed(m.gain(rate(m.curves(runs, row, column)), rate(m.curves(runs, "plain", column))))

    def neighbours(row, column):
        ours, plain = (m.chosen(runs, m.spelled(one, DATA[column]), DATA[column]) for one in (row, "plain"))
        return m.signed(m.gain(*({seed: run.result.knn for seed, run in some.items()} for some in (ours, plain))))

    def long(data):
        cells = {cell.path: cell.published for cell in m.TABLES["tab9"].cells}
        return m.signed(cells[f"MoCo/{data}/s=20"].mean - cells[f"MoCo/{data}/s=1"].mean)

    transfers = ("to CIFAR-10", "to CIFAR-100")
    known = {
        "The probe has a fixed": [gain("pos.", "CIFAR-100"), gain("pos.", "CIFAR-10")],
        "You tune": [gain("pos.", "CIFAR-100", m.at_best), gain("pos.", "CIFAR-10", m.at_best)],
        "The same": [gain("pos. & curv.", "CIFAR-10", m.at_best), gain("pos. & curv.", "CIFAR-100", m.at_best)],
        "Transfer": [gain("pos.", column, rate) for rate in (m.at_rate_1, m.at_best) for column in transfers],
        "Retrieval": [neighbours(row, column) for row in ("pos.", "margins") for column in ("CIFAR-100", "CIFAR-10")],
        "Long training": [long("CIFAR100"), long("CIFAR10")],
    }
    for row in m.rows("README.md", "Which effect should I use?"):
        numbers = re.findall(r"[+-]\d+\.\d\d", row["evidence"])
        name = next((name for name in known if row["situation"].startswith(name)), None)
        assert numbers == (known.pop(name) if name else []), row["situation"]
    assert not known


def test_seconds_an_epoch(runs):
    """Medians of MoCo v3's full runs; a run that shared the GPU took 0.8 s and more."""
    medians = {
        norms: sorted(
            (statistics.median(speed.seconds for speed in run.speeds), run.started[:10], run.settings.data)
            for run in runs
            if (run.settings.method, run.settings.epochs, run.settings.predictor_bn) == ("mocov3", 200, True)
            and run.settings.bn_splits == splits
        )
        for norms, splits in (("whole", 1), ("quarters", 4))
    }
    alone = {norms: [one for one in found if one[0] < 0.8] for norms, found in medians.items()}
    first = [one for one in alone["quarters"] if one[0] < 0.73]
    expected = [alone["whole"], first, [one for one in alone["quarters"] if one not in first]]
    table = [row for row in m.rows("docs/developing/performance.md", "The training step") if "median epoch" in row]
    for row, group in zip(table, expected, strict=True):
        assert row["runs"] == str(len(group))
        assert row["median epoch"] == f"{m.shown(group[0][0], '0.001')} to {m.shown(group[-1][0], '0.001')} s"
    seconds = [m.shown(one[0]) for one in alone["quarters"] if one[2] == "cifar10"]
    readme = (m.ROOT / "README.md").read_text()
    assert f"an epoch of CIFAR-10 takes {seconds[0]} to {seconds[-1]} s by the recipe" in readme


def test_the_spread_changed_its_meaning(runs):
    """At commit add0d3b, of that time; `numerics` is 1 on both sides."""
    changed = "2026-11-16T08:24"
    full = [run for run in runs if run.settings.epochs == 200]
    for row in m.rows("docs/paper/appendix.md", "How the runs were made"):
        if "since" not in row:
            continue
        own = [run for run in full if run.settings.data == DATA[row["data"]]]
        for name, of in (("before", lambda run: run.started < changed), ("since", lambda run: run.started >= changed)):
            group = [run.result.spread for run in own if of(run)]
            assert row[name] == f"{m.shown(min(group))} to {m.shown(max(group))} ({len(group)} runs)"
    assert {run.numerics for run in full} == {1}
