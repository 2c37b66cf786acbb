"""Probes that differ only in their learning rate have a table of their own, and appear nowhere else."""

import json
import re
from xml.etree import ElementTree

import pytest

from marginlens.paper import TABLES
from marginlens.report.gather import gather
from marginlens.report.page import page
from marginlens.report.rates import rates_figure, rates_grid, rates_picture
from marginlens.report.tables import brief, grids, settings_grid
from marginlens.runs.store import scan
from tests.report.folders import CONTENT, evaluate, write_run


def rates(path, tops, data="cifar100", kind="probe", content=None, **settings):
    for rate, top1 in tops.items():
        evaluate(path, kind, data, content or CONTENT[data], top1, {"lr": rate, **settings})


def read(store):
    return gather(scan(store), TABLES)


def texts(grid):
    return [dict(zip(grid.head, (item.text for item in row), strict=True)) for row in grid.rows]


@pytest.fixture
def store(tmp_path):
    for seed in (0, 1):
        path = write_run(tmp_path, data="cifar100", seed=seed, probe=60.0 + seed)
        rates(path, {0.1: 40.0 + seed, 10.0: 64.0 + 3 * seed})
        rates(path, {1.0: 78.0, 10.0: 80.0}, data="cifar10", kind="transfer")
    path = write_run(tmp_path, data="cifar100", effect="emphasis(s=7)", bn_splits=8, probe=65.0)
    rates(path, {10.0: 64.5})
    rates(path, {1.0: 50.0}, holdout=5000)
    return tmp_path


def test_a_row_for_the_seeds_of_a_setting_and_a_kind_of_probe(store):
    found = {(row["pre-training"], row["evaluation"]): row for row in texts(rates_grid(read(store)))}
    assert set(found) == {
        ("mocov3 cifar100 plain, 200 epochs", "probe cifar100"),
        ("mocov3 cifar100 plain, 200 epochs", "transfer cifar10"),
        ("mocov3 cifar100 emphasis(s=7), 200 epochs, bn_splits=8", "probe cifar100"),
    }
    plain = found["mocov3 cifar100 plain, 200 epochs", "probe cifar100"]
    assert plain["runs"] == "seed 0, seed 1"
    assert (plain["lr 0.1"], plain["lr 1"], plain["lr 10"]) == ("40.50 ± 0.71", "60.50 ± 0.71", "65.50 ± 2.12")
    assert plain["highest at"] == "10"
    strong = found["mocov3 cifar100 emphasis(s=7), 200 epochs, bn_splits=8", "probe cifar100"]
    assert (strong["lr 0.1"], strong["lr 1"], strong["highest at"]) == ("", "65.00", "1")


def best(store):
    """The brief table's last column, by the paper's column."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in brief(read(store), store / "x.md").splitlines()
    ]
    return {row[2]: row[-1] for row in rows[2:]}


def test_the_brief_table_has_what_the_rate_that_suits_best_gives(store):
    """For plain, of both seeds: the mean of 64 and 67 at 10, the transfer's 80; with a holdout it is another probe."""
    path = next(store.glob("*plain-seed0*"))
    rates(path, {30.0: 90.0})  # one of two seeds: no mean over seeds
    rates(path, {10.0: 95.0, 1.0: 94.0}, holdout=5000)
    assert best(store) == {
        "CIFAR100": "65.50 at 10 (the highest that all seeds have)",
        "CIFAR100 → CIFAR10": "80.00 at 10 (the highest tried)",
    }


def test_the_brief_table_says_of_how_many_seeds_where_some_have_one_rate(store):
    """They are left out, not taken for the best rate of the others."""
    path = write_run(store, data="cifar100", seed=2, probe=99.0)
    for earlier in store.glob("*plain-seed[01]*"):
        rates(earlier, {30.0: 61.0})
    rates(path, {1.0: 99.0}, data="cifar10", kind="transfer")
    assert best(store) == {
        "CIFAR100": "65.50 at 10 (2 of 3 seeds)",
        "CIFAR100 → CIFAR10": "80.00 at 10 (the highest tried, 2 of 3 seeds)",
    }


def test_the_brief_table_says_nothing_where_all_have_one_rate(tmp_path):
    write_run(tmp_path, data="cifar100", probe=62.0)
    assert best(tmp_path) == {"CIFAR100": ""}


def test_a_rate_that_diverged_is_not_the_best(tmp_path):
    path = write_run(tmp_path, data="cifar100", probe=60.0)
    rates(path, {3.0: 62.0, 100.0: 67.0})
    for file in (path / "evaluations").iterdir():
        known = json.loads(file.read_text())
        file.write_text(json.dumps(known | {"loss": 50.0} if known["settings"]["lr"] == 100 else known))
    assert best(tmp_path) == {"CIFAR100": "62.00 at 3"}
    (row,) = texts(rates_grid(read(tmp_path)))
    assert (row["lr 100"], row["highest at"]) == ("67.00 (diverged)", "3")


def test_only_the_probes_beside_the_one_that_counts(tmp_path):
    """Transfers to data of another content stand aside, whichever comes first."""
    for seed in (0, 1):
        path = write_run(tmp_path, data="cifar100", seed=seed, probe=60.0)
        rates(path, {1.0: 78.0, 10.0: 80.0, 30.0: 79.0}, data="cifar10", kind="transfer")
        if not seed:
            rates(path, {1.0: 50.0, 10.0: 55.0}, data="cifar10", kind="transfer", content="a" * 64)
    assert best(tmp_path)["CIFAR100 → CIFAR10"] == "80.00 at 10"


def test_a_record_from_before_an_option_is_in_its_series(tmp_path):
    path = write_run(tmp_path, data="cifar100", probe=60.0)
    rates(path, {3.0: 66.0, 10.0: 65.0})
    for file in (path / "evaluations").iterdir():
        known = json.loads(file.read_text())
        if known["settings"]["lr"] == 1:
            del known["settings"]["resize"]
            file.write_text(json.dumps(known))
    assert best(tmp_path) == {"CIFAR100": "66.00 at 3"}


def test_the_highest_that_was_tried_may_have_been_lost(tmp_path):
    path = write_run(tmp_path, data="cifar100", probe=60.0)
    rates(path, {30.0: 66.0})
    assert best(tmp_path) == {"CIFAR100": "66.00 at 30 (the highest tried)"}
    for file in (path / "evaluations").iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lost": [100.0]}))
    assert best(tmp_path) == {"CIFAR100": "66.00 at 30"}


def test_of_two_probes_alike_the_one_that_counts_is_in_the_series(tmp_path):
    path = write_run(tmp_path, data="cifar100", probe=60.0)
    rates(path, {10.0: 64.0})
    for file in list((path / "evaluations").iterdir()):
        known = json.loads(file.read_text())
        known |= {"top1": 10.0, "environment": known["environment"] | {"numerics": 0}}
        file.with_name(f"z{file.name}").write_text(json.dumps(known))
    (row,) = texts(rates_grid(read(tmp_path)))
    assert (row["lr 1"], row["lr 10"]) == ("60.00", "64.00")
    assert best(tmp_path) == {"CIFAR100": "64.00 at 10 (the highest tried)"}


def test_the_recipes_rate_may_be_the_best(tmp_path):
    rates(write_run(tmp_path, data="cifar100", probe=60.0), {10.0: 59.0})
    assert best(tmp_path) == {"CIFAR100": "60.00 at 1"}


def drawn(store):
    """Of each panel, by its name and the length of pre-training: its lines in their order, what its points say.

    What is drawn last lies on top, so the points of the first line, plain's, come last: no other line hides it."""
    found = {}
    for made in rates_figure(read(store)).split('<figure class="panel">')[1:]:
        on = re.search(r"learning rate \(([^<>]*) of pre-training\)</text>", made)[1]
        lines = re.findall(r'<i class="k\d"></i>(.*?)</span>', made)
        found[re.search(r'class="name"[^>]*>(.*?)<', made)[1], on] = lines, re.findall("<title>(.*?)</title>", made)
    return found


def test_a_line_for_each_effect_over_the_rates(store):
    found, of = drawn(store), ("mocov3 cifar100: probe cifar100", "200 epochs")
    assert set(found) == {of, ("mocov3 cifar100: transfer cifar10", "200 epochs")}
    lines, points = found[of]
    assert lines == ["plain", "emphasis(s=7), bn_splits=8"]
    assert points == [
        "emphasis(s=7), bn_splits=8, lr 1: 65.00",
        "emphasis(s=7), bn_splits=8, lr 10: 64.50",
        "plain, lr 0.1: 40.50 ± 0.71",
        "plain, lr 1: 60.50 ± 0.71",
        "plain, lr 10: 65.50 ± 2.12",
    ]
    keys = {seen.key for seen in read(store).runs if seen.settings.seed == 0}
    assert set(re.findall(r'href="#([^"]+)"', rates_figure(read(store)))) == keys


def test_plain_by_the_recipe_comes_first(tmp_path):
    """And MoCo v3 before the other methods."""
    for more in ({"method": "byol", "last_bn": True}, {"method": "byol"}, {"effect": "ratio(m1=0.4)"}, {}):
        rates(write_run(tmp_path, data="cifar100", probe=60.0, **more), {10.0: 61.0})
    assert [(name.split()[0], lines) for (name, _), (lines, _) in drawn(tmp_path).items()] == [
        ("mocov3", ["plain", "ratio(m1=0.4)"]),
        ("byol", ["plain", "plain, last_bn=yes"]),
    ]


def test_a_line_goes_over_the_rates_of_all_its_seeds(store):
    """A point of one seed beside the means of two would show the seed for the rate; the table has it, and says so."""
    rates(next(store.glob("*plain-seed0*")), {30.0: 90.0})
    of = "mocov3 cifar100: probe cifar100", "200 epochs"
    assert [said.split(":")[0] for said in drawn(store)[of][1][-3:]] == [
        f"plain, lr {rate}" for rate in ("0.1", "1", "10")
    ]
    assert len(drawn(store)[of][1]) == 5
    row = next(
        row
        for row in texts(rates_grid(read(store)))
        if row["evaluation"] == "probe cifar100" and "plain" in row["pre-training"]
    )
    assert row["lr 30"] == "90.00 (1 of 2 seeds)"


def test_seeds_with_no_rate_in_common_are_drawn_all(tmp_path):
    for seed, tops in enumerate(({0.1: 40.0, 3.0: 62.0}, {10.0: 64.0, 30.0: 66.0})):
        rates(write_run(tmp_path, data="cifar100", seed=seed), tops)
    ((_, points),) = drawn(tmp_path).values()
    assert [said.split(":")[0] for said in points] == [f"plain, lr {rate}" for rate in ("0.1", "3", "10", "30")]


def test_a_rate_at_which_a_probe_diverged_is_a_cross_beside_the_line(tmp_path):
    path = write_run(tmp_path, data="cifar100", probe=60.0)
    rates(path, {3.0: 64.0, 10.0: 66.0, 30.0: 12.0})
    (file,) = (f for f in (path / "evaluations").iterdir() if json.loads(f.read_text())["settings"]["lr"] == 30.0)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"loss": 99.0}))
    made = rates_figure(read(tmp_path))
    assert "plain, lr 30: 12.00 (diverged)</title></path>" in made
    assert made.count("</title></circle>") == 3
    assert "</b> diverged</span>" in made
    assert re.search(r'class="line[^>]*d="([^"]*)"', made)[1].count("L") == 2


def test_a_point_lies_where_its_numbers_are(store):
    """Rates a hundredfold apart twice as far as tenfold ones; 25 points of accuracy as high as 20 and 5 together."""
    made = rates_figure(read(store)).split('<figure class="panel">')[1]
    spots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', made)[-3:]
    (x0, y0), (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in spots)
    assert x2 - x1 == pytest.approx(x1 - x0, abs=0.2)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(20 / 25, abs=0.01)


def test_runs_that_differ_in_their_data_are_lines_of_their_own(tmp_path):
    for content in ("a", "b"):
        path = write_run(tmp_path / content, data="cifar100", probe=60.0, content=content)
        rates(path, {10.0: 64.0}, content=content)
    both = gather([*scan(tmp_path / "a"), *scan(tmp_path / "b")], TABLES)
    assert re.findall(r'<i class="k\d"></i>(.*?)</span>', rates_figure(both)) == ["plain", "plain [2]"]


def test_nine_lines_look_different(tmp_path):
    for s in range(2, 11):
        rates(write_run(tmp_path, data="cifar100", effect=f"emphasis(s={s})", probe=50.0 + s), {10.0: 60.0 + s})
    made = rates_figure(read(tmp_path))
    assert len(set(re.findall(r'<i class="(.*?)"', made))) == len(set(re.findall(r'class="(line.*?)"', made))) == 9


def test_an_effect_has_one_colour_in_all_panels(tmp_path):
    """Though the second panel lacks the second line."""
    for effect in ("plain", "emphasis(s=3)", "ratio(m1=0.5)"):
        path = write_run(tmp_path, data="cifar100", effect=effect, probe=60.0)
        rates(path, {10.0: 64.0})
        if effect != "emphasis(s=3)":
            rates(path, {1.0: 70.0, 10.0: 71.0}, data="cifar10", kind="transfer")
    first, second = rates_figure(read(tmp_path)).split('<figure class="panel">')[1:]
    keys = [
        {name: key for key, name in re.findall(r'<i class="(.*?)"></i>(.*?)</span>', made)} for made in (first, second)
    ]
    assert set(keys[1]) == {"plain", "ratio(m1=0.5)"}
    assert len(set(keys[0].values())) == 3
    assert keys[1].items() <= keys[0].items()


def test_many_effects_in_other_panels_do_not_make_two_lines_alike(tmp_path):
    for s in range(2, 44):
        data = "cifar100" if s > 31 else "cifar10"
        rates(write_run(tmp_path, data=data, effect=f"emphasis(s={s})", probe=50.0), {10.0: 60.0}, data=data)
    keys = [re.findall(r'<i class="(.*?)"', made) for made in rates_figure(read(tmp_path)).split("<figure")[1:]]
    assert [len(looks) for looks in keys] == [16, 14, 12]
    assert all(len(looks) == len(set(looks)) for looks in keys)


def test_a_panel_of_many_lines_is_split_by_the_settings_that_are_not_the_effect(tmp_path):
    for s in range(2, 7):
        for parts in (4, 8):
            path = write_run(tmp_path, data="cifar100", effect=f"emphasis(s={s})", bn_splits=parts, probe=50.0)
            rates(path, {10.0: 60.0})
    found = drawn(tmp_path)
    effects = [f"emphasis(s={s})" for s in range(2, 7)]
    assert [(name, lines) for (name, _), (lines, _) in found.items()] == [
        ("mocov3 cifar100: probe cifar100", effects),
        ("mocov3 cifar100: probe cifar100, bn_splits=8", effects),
    ]


def test_a_picture_stands_by_itself(store):
    """Of the recipe's backbones, and its probes but for their rate; what it says is what the page's panels say."""
    path = next(store.glob("*plain-seed0*"))
    rates(path, {10.0: 95.0, 1.0: 94.0}, holdout=5000)
    made = rates_picture(read(store))
    root = ElementTree.fromstring(made)
    texts = ["".join(node.itertext()) for node in root.findall(".//{*}text")]
    names = [text for text in texts if text.startswith("mocov3")]
    assert names == ["mocov3 cifar100: probe cifar100", "mocov3 cifar100: transfer cifar10"]
    assert texts[-1] == "plain"
    shown = [node.text for node in root.findall(".//{*}title")]
    points = [point for name, (_, points) in drawn(store).items() if "(" not in name[0] for point in points]
    assert any(point.startswith("emphasis") for point in points)
    assert sorted(shown) == sorted(point for point in points if point.startswith("plain, lr "))
    assert not root.findall(".//{*}a")
    assert "var(--c1)" in root.find("{*}style").text


def pictured(store):
    """Of a picture: its panels' names, its key, and what each line of it says at its first point."""
    root = ElementTree.fromstring(rates_picture(read(store)))
    written = ["".join(node.itertext()) for node in root.findall(".//{*}text")]
    names = [text for text in written if re.match(r"\w+ cifar", text)]
    axis = max(i for i, text in enumerate(written) if text.startswith("the layer's"))
    return names, written[axis + 1 :], [node.text for node in root.findall(".//{*}title")]


def test_a_picture_has_the_paper_s_rows_in_their_order_and_colours(tmp_path):
    """The paper's curvature is another on other data, and one line of the key."""
    for data, curved in (("cifar10", "emphasis(s=20, c=0.7)"), ("cifar100", "emphasis(s=40, c=1)")):
        for effect in ("ratio(m1=1.6)", curved, "emphasis(s=3)", "emphasis(s=20)", "plain"):
            path = write_run(tmp_path, data=data, effect=effect, probe=60.0)
            rates(path, {10.0: 64.0}, data=data)
    names, key, said = pictured(tmp_path)
    assert names == ["mocov3 cifar10: probe cifar10", "mocov3 cifar100: probe cifar100"]
    assert key == ["plain", "pos", "pos+curv", "ratio", "emphasis(s=3)"]
    assert said.count("pos+curv, lr 10: 64.00") == 2


def test_a_picture_has_panels_that_compare(store):
    """But for one where none does; what stands in the others alone is not in the key."""
    assert pictured(store)[0] == ["mocov3 cifar100: probe cifar100", "mocov3 cifar100: transfer cifar10"]
    rates(write_run(store, method="byol", data="cifar10", effect="emphasis(c=2)"), {10.0: 64.0, 3.0: 63.0}, "cifar10")
    rates(write_run(store, data="cifar100", effect="emphasis(s=20)", probe=65.0), {10.0: 64.0})
    assert pictured(store)[:2] == (["mocov3 cifar100: probe cifar100"], ["plain", "pos"])


def test_a_picture_where_nothing_is_by_the_recipe_shows_what_there_is(tmp_path):
    rates(write_run(tmp_path, data="cifar100", bn_splits=8, probe=65.0), {10.0: 64.5})
    assert ">plain, bn_splits=8</text>" in rates_picture(read(tmp_path))


def test_a_picture_of_nothing_or_of_too_much_is_refused(tmp_path):
    for s in range(2, 20):
        path = write_run(tmp_path, data="cifar100", effect=f"emphasis(s={s})", probe=60.0)
        if s == 2:
            with pytest.raises(ValueError, match="no run was probed at several learning rates"):
                rates_picture(read(tmp_path))
        rates(path, {10.0: 64.0})
    with pytest.raises(ValueError, match=r"18 effects were probed .* at most 16"):
        rates_picture(read(tmp_path))


def test_a_seed_that_lacks_a_rate_is_said(store):
    path = next(store.glob("*plain-seed1*"))
    for file in (path / "evaluations").glob("probe-*"):
        if json.loads(file.read_text())["settings"]["lr"] == 0.1:
            file.unlink()
    rows = {(row["pre-training"], row["evaluation"]): row for row in texts(rates_grid(read(store)))}
    assert rows["mocov3 cifar100 plain, 200 epochs", "probe cifar100"]["lr 0.1"] == "40.00 (1 of 2 seeds)"


def test_the_size_of_the_features_is_shown_where_it_is_known(store):
    assert {row["feature norm"] for row in texts(rates_grid(read(store)))} == {""}
    for seed, norm in ((0, 1.5), (1, 2.5)):
        for file in next(store.glob(f"*plain-seed{seed}*")).glob("evaluations/probe-*"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"feature_norm": norm}))
    assert [row["feature norm"] for row in texts(rates_grid(read(store)))].count("2.00") == 1


def test_other_tables_have_the_recipe_s_rate_alone(store):
    gathered = read(store)
    head = settings_grid(gathered).head
    assert "probe" in head
    assert "probe (holdout 5000)" in head
    assert not any("lr" in name for name in head)
    line = next(line for line in gathered.lines["tab2"] if line.cell.path == "MoCo/CIFAR100/plain")
    assert sorted(value.top1 for value in line.values) == [60.0, 61.0]


def test_a_probe_at_another_rate_by_itself_is_not_lost(tmp_path):
    path = write_run(tmp_path, data="cifar100", effect="emphasis(s=7)")
    rates(path, {3.0: 61.0})
    assert not rates_grid(read(tmp_path)).rows
    assert texts(settings_grid(read(tmp_path)))[0]["probe (lr 3.0)"] == "61.00"


def test_only_a_report_that_has_it_shows_it(store, tmp_path_factory):
    assert [grid.key for grid in grids(read(store))].count("rates") == 1
    assert page(read(store), ["runs"]).count('href="#rates"') == 1
    empty = tmp_path_factory.mktemp("other")
    write_run(empty, data="cifar100", probe=60.0)
    assert "rates" not in [grid.key for grid in grids(read(empty))]
    assert "#rates" not in page(read(empty), ["runs"])
