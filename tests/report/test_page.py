"""The page and the command, without a browser: complete, escaped, no network, no broken link."""

import html
import json
import re
import shlex
from html.parser import HTMLParser

import pytest

from marginlens import cli
from marginlens.paper import TABLES
from marginlens.report.gather import gather
from marginlens.report.page import page
from marginlens.runs.store import scan
from tests.report.folders import settle, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&"


@pytest.fixture
def call(monkeypatch, tmp_path):
    """`marginlens report` with these words."""
    monkeypatch.setitem(cli.COMMANDS, "report", "marginlens.report.commands:report")
    monkeypatch.chdir(tmp_path)
    return lambda *words: cli.main(["report", *words])


@pytest.fixture
def store(tmp_path):
    write_run(tmp_path / "runs", data="cifar10", probe=90.0, transfer={"cifar100": 43.0})
    write_run(tmp_path / "runs", data="cifar10", seed=1, done=3, failure=f"it broke {EVIL}")
    return tmp_path / "runs"


class Tags(HTMLParser):
    """Every tag's attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.text = ""
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data):
        if self._within not in ("script", "style"):
            self.text += data

    def handle_endtag(self, tag):
        self._within = ""


REHEARSED = {"data": "shapes", "effect": "emphasis(s=5)", "epochs": 4, "probe": 60.0}
PARTIAL = {"data": "cifar10", "effect": "emphasis(s=5)", "done": 3}


@pytest.mark.parametrize("kinds", [[REHEARSED], [PARTIAL], [REHEARSED, PARTIAL], []], ids=["look", "part", "two", "no"])
@pytest.mark.parametrize("paper", [False, True])
def test_self_contained_and_every_link_leads_somewhere(store, tmp_path, kinds, paper):
    """Also to tables without a number, which have no section."""
    at = store if len(kinds) == 2 else tmp_path / "others"
    at.mkdir(exist_ok=True)
    for run in kinds:
        write_run(at, **run)
    tags = Tags(page(gather(scan(at), TABLES, paper=paper), ["runs"])).found
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in tags:
        assert "src" not in attributes
        link = attributes.get("href", "data:")
        assert link == "data:," if tag == "link" else link == "data:" or link[0] == "#"
        assert link[0] != "#" or link[1:] in ids
        assert not any(name.startswith("on") for name in attributes)


def test_whatever_a_record_says_is_text(store):
    path = write_run(store, data="cifar10", seed=2, probe=91.0, lr=0.01, transfer={"cifar100": 50.0})

    def other(config):
        for part in (config["settings"], config["identity"]["settings"]):
            part |= {"data": EVIL, "split": EVIL}
        config["data"] = config["identity"]["data"] = EVIL

    path = settle(path, other)
    for record in (path / "evaluations").iterdir():
        known = json.loads(record.read_text())
        known |= {"data": EVIL, "data_fingerprint": EVIL, "environment": {"device": EVIL, "time": EVIL, EVIL: EVIL}}
        record.write_text(json.dumps(known))
    evil = json.loads((path / "environment.jsonl").read_text()) | {"device": EVIL, "engine": EVIL, "time": EVIL}
    (path / "environment.jsonl").write_text(json.dumps(evil) + "\n")
    result = json.loads((path / "result.json").read_text()) | {EVIL: EVIL, "checkpoint": EVIL}
    (path / "result.json").write_text(json.dumps(result))
    (store / "<b>foreign & co").mkdir()
    gathered = gather(scan(store), TABLES)
    assert len(gathered.runs) == 3
    text = page(gathered, [f"runs{EVIL}"])
    found = Tags(text)
    assert [tag for tag, _ in found.found].count("script") == 2  # the curves and ours
    assert not {"img", "b>foreign"} & {tag for tag, _ in found.found}
    assert found.text.count("alert(1)") > 20  # it is there to be read
    ids = [a["id"] for _, a in found.found if "id" in a]
    assert all(re.fullmatch(r"[\w-]+", name) for name in ids)


def test_commands_to_copy_are_quoted(tmp_path):
    path = write_run(tmp_path / "a b; touch gone #", data="cifar10", probe=90.0)
    text = html.unescape(page(gather(scan(path.parent), TABLES), ["runs"]))
    (config,) = re.findall(r"<code>(marginlens pretrain --config .*?)</code>", text)
    assert shlex.split(config) == [
        "marginlens",
        "pretrain",
        "--config",
        str(path / "config.json"),
        "--runs",
        str(path.parent),
    ]


def test_headings_tell_runs_apart(tmp_path):
    for lr in (0.1, 1e30):
        write_run(tmp_path, data="shapes", epochs=4, lr=lr)
    text = page(gather(scan(tmp_path), TABLES), ["runs"])
    assert re.findall(r"<summary><b>.*?, 4 epochs, (.*?), seed 0</b>", text) == ["lr=0.1", "lr=1e+30"]


def test_a_long_failure_is_a_title_and_stands_in_the_runs_own_section(tmp_path):
    write_run(tmp_path, data="shapes", epochs=4, lr=1e30, done=1, failure="it broke " * 20)
    text = page(gather(scan(tmp_path), TABLES), ["runs"])
    (cell,) = re.findall(r'<tbody id="rows-settings"><tr>.*?(<td class="wide">\s*<a.*?</td>)', text, flags=re.S)
    assert "failed: it broke" in re.findall('title="(.*?)"', cell)[0]
    assert Tags(cell).text.strip() == "seed 0: failed"
    assert re.search(r'<span class="state failed">failed: (it broke ){19}it broke</span>', text)


def test_the_command_writes_three_files(store, call, capsys, tmp_path):
    call()
    assert capsys.readouterr().out == "2 runs; wrote report/report.html, report/tables.md, report/tables.tex\n"
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == ["report.html", "tables.md", "tables.tex"]


def test_places_and_several_stores(store, call, tmp_path):
    write_run(tmp_path / "more", data="cifar10", seed=5, probe=90.2)
    words = ("--markdown", "docs/results.md", "--latex", "t.tex", "--only", "tab2", "FIG3")
    call("--runs", "runs", "more", "--out", "o", *words)
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "seed 5: 90.20" in text
    assert "](../more/" in text
    assert re.findall(r"^## (.*?)(?:: .*)?$", text, flags=re.M) == [
        "Runs by setting",
        "Tab. 2",
        "Fig. 3",
        "Cells of the paper that were run",
    ]
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["report.html"]
    assert (tmp_path / "t.tex").exists()


def test_a_streams_links_are_from_here(store, call, capfd):
    call("--markdown", "/dev/stdout")
    said = capfd.readouterr()
    assert "](runs/" in said.out
    assert said.out.startswith("# Results\n")
    assert said.err == "2 runs; wrote report/report.html, /dev/stdout, report/tables.tex\n"


def test_json(store, call, capsys):
    call("--json", "--only", "tab2")
    found = json.loads(capsys.readouterr().out)
    (row,) = [r for r in found["tables"]["tab2"] if r["path"] == "MoCo/CIFAR10/plain"]
    numbers = {name: row[name] for name in ("published", "published_spread", "mean", "std", "seeds")}
    assert numbers == {"published": 89.413, "published_spread": 0.109, "mean": 90.0, "std": None, "seeds": 1}
    assert row["partial"][0]["said"].startswith("failed: it broke")


def test_unreadable_folders_are_listed_and_then_it_is_exit_2(store, call, capsys, tmp_path):
    (store / "foreign").mkdir()
    (store / "torn").mkdir()
    (store / "torn" / "config.json").write_text("{")
    with pytest.raises(SystemExit) as end:
        call()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.err.count("\n") == 1
    assert "runs/foreign is not a run's folder" in said.err
    assert "(and 1 more" in said.err
    text = Tags((tmp_path / "report" / "report.html").read_text()).text
    assert "runs/foreign is not a run's folder" in text
    assert "runs/torn/config.json cannot be read" in text
    assert "90.00" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "tab22"], "there is no table or figure 'tab22'; did you mean 'tab2'?"),
        (
            ["--only", "tab9", "tab4"],
            "--only tab9 tab4: no run in runs stands in Tab. 4, Tab. 9; give one of tab1, tab2,",
        ),
        (["--runs", "nowhere"], "nowhere does not exist"),
        (["--out", "file"], "cannot write file/report.html (File exists); give --out another place"),
        (["--markdown", "file/x.md"], "cannot write file/x.md (File exists); give --markdown another place"),
        (["--markdown", "-"], "--markdown - is not a file name; give --markdown /dev/stdout for standard output"),
    ],
)
def test_bad_input_is_one_line(store, call, capsys, tmp_path, words, said):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        call(*words)
    found = capsys.readouterr().err
    assert (end.value.code, found.count("\n")) == (2, 1)
    assert said in found


def test_data_sets_are_not_needed(store, call, monkeypatch, tmp_path):
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "nothing"))
    call()
    assert not (tmp_path / "nothing").exists()


def test_only_tables_without_a_run_are_an_error_and_nothing_is_written(store, call, capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        call("--only", "tab9", "--insert", "README.md")
    assert (end.value.code, capsys.readouterr().out) == (2, "")
    assert not (tmp_path / "report").exists()
    call("--only", "tab9", "tab2")
    assert "; no run stands in Tab. 9" in capsys.readouterr().out
    call("--only", "tab9", "--paper")
    assert "65.010 ± 0.215" in (tmp_path / "report" / "report.html").read_text()


def test_own_runs_come_first_and_the_paper_s_tables_only_where_they_were_run(store, call, tmp_path):
    call()
    page = tmp_path / "report" / "report.html"
    first = re.findall(r'<h2 id="(\w+)">', page.read_text())
    assert first[:5] == ["settings", "paper", "tab1", "tab2", "tab3"]
    assert "tab9" not in first
    call("--paper")
    assert {"tab4", "tab5", "tab9"} <= set(re.findall(r'<h2 id="(\w+)">', page.read_text()))


def test_a_store_without_runs_says_how_to_make_one(call, tmp_path):
    (tmp_path / "runs").mkdir()
    call()
    text = Tags((tmp_path / "report" / "report.html").read_text()).text
    assert "No runs in" in text
    assert "marginlens pretrain" in text
    assert "marginlens report --paper" in text


def test_curves_are_of_every_run_and_named_by_what_differs(tmp_path):
    for lr in (0.1, 0.2):
        for seed in (0, 1):
            write_run(tmp_path, data="shapes", epochs=4, lr=lr, seed=seed)
    write_run(tmp_path, data="shapes", epochs=4, lr=0.3, done=0)
    text = page(gather(scan(tmp_path), TABLES), ["runs"])
    curves = json.loads(re.search(r'<script type="application/json" id="curve-data">(.*?)</script>', text)[1])
    assert [(curve["setting"], curve["seed"], curve["epoch"]) for curve in curves] == [
        (setting, seed, [1, 2, 3, 4]) for setting in (0, 1) for seed in (0, 1)
    ]
    assert re.findall(r"</svg>(.*?) <small>", text) == ["by the recipe", "lr=0.1"]


def test_a_run_with_a_lens_has_its_curves(tmp_path):
    path = write_run(tmp_path / "runs", data="shapes", epochs=2)
    line = {"rows": 4, "joint": {"theta": [0.0, 3.0], "q": [0.0, 1.0], "counts": [[4]]}}
    seen = [{"epoch": 2, "step": 8, **line, "angle": 0.5, "pull": {"positive": 0.6}, "features": {"rank": 7.0}}]
    (path / "lens.jsonl").write_text("".join(json.dumps(x) + "\n" for x in seen))
    (tmp_path / "other").mkdir()
    write_run(tmp_path / "runs", data="shapes", epochs=2, seed=1)
    cli.main(["report", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "report")])
    text = (tmp_path / "report" / "report.html").read_text()
    runs = json.loads(re.search(r'id="curve-data">(.*?)</script>', text, re.S)[1])
    (with_lens,) = (run for run in runs if "lens_angle" in run)
    assert with_lens["lens_angle"] == [None, 28.648]
    assert (with_lens["lens_pull"], with_lens["lens_rank"]) == ([None, 0.6], [None, 7.0])
    assert with_lens["seed"] == 0


def test_maps_of_the_theory_are_drawn_where_no_run_belongs(tmp_path):
    write_run(tmp_path / "runs", data="shapes", epochs=2)
    cli.main(["report", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "report"), "--paper"])
    text = (tmp_path / "report" / "report.html").read_text()
    assert text.count("<figcaption>Fig. ") == 3
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert {"fig1-", "fig2-", "fig8-"} <= {name[:5] for name in ids}
