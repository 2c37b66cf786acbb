"""Markdown and LaTeX: the same bytes from the same records, no broken link, a format that no name breaks."""

import re
import shutil
import subprocess
import sys

import pytest

from marginlens.paper import TABLES
from marginlens.report.gather import gather
from marginlens.report.grids import number
from marginlens.report.latex import PACKAGES, latex
from marginlens.report.tables import BEGIN, END, brief, insert, markdown
from marginlens.runs.store import scan
from tests.report.folders import CONTENT, evaluate, write_run

NASTY = "[old] --runs *star Þ 100% of | a_b & #1 {x} ~ ^ \\ $ <script>alert(1)</script> `code` [link](x) ünïcode ∞"


@pytest.fixture
def store(tmp_path):
    store = tmp_path / "some runs"
    for seed in (0, 1):
        write_run(store, data="cifar10", seed=seed, probe=90.0 + seed, transfer={"cifar100": 43.0})
    write_run(store, data="cifar10", seed=2, done=3, failure=NASTY)
    write_run(store, data="cifar10", effect="ratio(m1=1.6)", done=3, failure=NASTY)
    write_run(store, data="cifar10", effect="emphasis(s=5)", probe=90.5)
    write_run(store, data="shapes", effect="margin(m2=0.3)", epochs=4, probe=60.0)
    for name in ("*star", "[old] runs", "foreign_folder"):
        (store / name).mkdir()
    return store


def read(store, paper=False):
    return gather(scan(store), TABLES, paper=paper)


def test_same_records_same_bytes(store, tmp_path):
    first = markdown(read(store), tmp_path / "results.md"), latex(read(store))
    # the same tree elsewhere, its folders made in another order, by a process with another hash seed
    other = tmp_path / "elsewhere" / store.name
    other.mkdir(parents=True)
    for path in sorted(store.iterdir(), reverse=True):
        shutil.copytree(path, other / path.name)
    script = (
        "import sys; from pathlib import Path; from marginlens.report.commands import read, write;"
        "out = Path(sys.argv[1]); runs = [Path(sys.argv[2])]; write(read(runs), runs, out)"
    )
    folder = other.parent
    subprocess.run([sys.executable, "-c", script, str(folder), str(other)], check=True, timeout=60)
    again = (folder / "tables.md").read_text(), (folder / "tables.tex").read_text()
    assert again == first


def test_a_brief_table_has_first_readings_only(tmp_path):
    write_run(tmp_path / "runs", data="cifar100", probe=60.4)
    write_run(tmp_path / "runs", data="cifar100", bn_splits=1, probe=61.9)
    write_run(tmp_path / "runs", data="cifar100", effect="emphasis(s=20)", bn_splits=1, probe=64.4)
    found = read(tmp_path / "runs")
    assert re.findall(r"\d\d\.\d\d(?=\])", brief(found, tmp_path / "README.md")) == ["60.40"]
    assert {"60.40", "61.90", "64.40"} <= set(re.findall(r"\d\d\.\d\d", markdown(found, tmp_path / "results.md")))


def test_a_brief_table_of_what_was_run_between_its_marks(store, tmp_path):
    table = brief(read(store), tmp_path / "README.md")
    assert [[cell.strip() for cell in line.split("|")[1:-1]][:4] for line in table.splitlines()[2:]] == [
        ["Tab. 2", "MoCo", "CIFAR10", "89.413 ± 0.109"],
        ["Tab. 3", "MoCo", "CIFAR10 → CIFAR100", "43.590 ± 0.225"],
    ]
    text = insert(f"above {BEGIN}old{END} below", table)
    assert text == f"above {BEGIN}\n{table}{END} below"
    assert insert(text, table) == text
    for wrong in ("no marks", f"only {BEGIN}", f"{END} the wrong way round {BEGIN}"):
        with pytest.raises(ValueError, match="there is no place for the table"):
            insert(wrong, table)


def test_markdown_links_lead_to_runs(store, tmp_path):
    at = tmp_path / "docs" / "results.md"
    text = markdown(read(store), at)
    links = re.findall(r"\]\(([^)]+)\)", text.replace("\\]", "").replace("\\[", ""))
    found = {(at.parent / link.replace("%20", " ")).resolve() for link in links if link != "x"}
    assert found == {p.resolve() for p in store.iterdir() if (p / "config.json").exists()}


def test_markdown_tables_are_tables(store, tmp_path):
    text = markdown(read(store), tmp_path / "results.md")
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        rows = [len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()]
        assert len(set(rows)) == 1
    assert "<script" not in text.replace("\\<", "")
    row = next(row for row in text.splitlines() if row.startswith("| Tab. 2 | MoCo | CIFAR10 |"))
    assert "| 89.413 ± 0.109 | [90.50 ± 0.71](" in row
    assert "| +1.09 |  | 2 |" in row
    assert row.count("seed 2: failed") == 1


def test_columns_of_one_name_keep_their_numbers(tmp_path):
    """Of a rate that differs in the last digit."""
    path = write_run(tmp_path, data="cifar100", probe=50.0)
    for lr, top1 in ((0.3333333, 11.0), (0.33333331, 22.0)):
        evaluate(path, "probe", "cifar100", CONTENT["cifar100"], top1, {"lr": lr})
    assert "& 11.00 & 22.00 &" in latex(read(tmp_path))


def test_a_negative_gain_has_a_minus_twice(tmp_path):
    write_run(tmp_path, data="cifar100", probe=60.0, transfer={"cifar10": 80.0})
    write_run(tmp_path, data="cifar100", effect="margin(m1=0.5, m2=0.7)", probe=60.0, transfer={"cifar10": 79.0})
    assert "$-$1.00 ($-$0.04)" in latex(read(tmp_path))


def test_every_published_number_is_there(store, tmp_path):
    every = read(store, paper=True)
    texts = markdown(every, tmp_path / "results.md"), latex(every).replace("~$\\pm$~", " ± ")
    for cell in (cell for table in TABLES.values() for cell in table.cells if cell.published):
        assert all(str(cell.published) in text for text in texts)


def columns(text):
    """Of each LaTeX table: whether it lies on its side, and which shares of the line its columns have, if any."""
    for head, spec in re.findall(r"\n(\{.*)\n\\begin\{longtable\}(.*)", text):
        yield "landscape" in head, list(map(float, re.findall(r"\\dimexpr ([\d.]+)\\linewidth-2\\tabcolsep", spec)))


def test_a_latex_table_is_no_broader_than_its_line(store):
    for name, given in {"lr": 0.1, "tau": 0.5, "batch": 32, "momentum": 0.5, "seed": 4}.items():
        write_run(store, **{"data": "shapes", "epochs": 4, name: given}, probe=50.0, transfer={"cifar10": 40.0})
    for paper in (False, True):
        text = latex(read(store, paper))
        found = list(columns(text))
        assert len(found) == text.count("\\begin{longtable}")
        assert found[0][0]  # our runs, of so many settings, are in landscape; unreadable folders are not
        assert not found[-1][0]
        for _, shares in found:
            assert not shares or 0.98 < sum(shares) <= 1


def test_latex_says_what_was_not_run_and_leaves_runs_to_the_page(store):
    text = latex(read(store, paper=True))
    assert "Tab. 2 & MoCo & CIFAR10 & 89.413~$\\pm$~0.109 & 90.50~$\\pm$~0.71 & +1.09 &  & 2 \\\\" in text
    (row,) = re.findall(r"^MoCo & 89.413~\$\\pm\$~0.109 & (.*) \\\\$", text, flags=re.M)
    assert row.split(" & ")[1:3] == ["60.956~$\\pm$~0.167", "not run"]
    assert "Tab. 2 & MoCo + ratio. & CIFAR10 & 90.100~$\\pm$~0.017 & not measured &  &  &  \\\\" in text
    assert re.search(r"& \$-\$\d", text)


def test_latex_is_balanced_and_escaped(store):
    text = latex(read(store))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    bare = re.sub(r"\\\\|\\[{}$&#%_]", "", body.replace("\\\\\n", "\n"))
    depth = 0
    for c in bare:
        depth += (c == "{") - (c == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    text = re.sub(r"\\begin\{longtable\}.*", "", bare).replace("~$\\pm$~", "")
    assert not re.search(r"[%#_~^<>|∞Þ]|--|\n[*[]", text)
    for table in re.findall(r"\\begin\{longtable\}\{([^\n]*)\}\n(.*?)\\end\{longtable\}", body, flags=re.S):
        columns = len(re.findall(r"(?:^l+$)|p\{[^}]*\}", table[0])) if "p{" in table[0] else len(table[0])
        rows = [row for row in table[1].splitlines() if " & " in row]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {columns}
        assert all(row.endswith(" \\\\") for row in rows)
    assert body.count("\\begin{longtable}") == body.count("\\end{longtable}") == body.count("\\toprule")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine")
def test_latex_compiles_and_nothing_leaves_the_page(store, tmp_path):
    preamble = f"\\documentclass{{article}}\\usepackage[T1]{{fontenc}}\\usepackage{{{','.join(PACKAGES)}}}"
    page = f"{preamble}\\begin{{document}}{latex(read(store))}\\end{{document}}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    for _ in range(3):  # longtable has its widths from the run before
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert made.returncode == 0, made.stdout[-2000:]
    beyond = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", made.stdout)]
    assert max(beyond, default=0.0) < 5


@pytest.mark.parametrize(
    ("found", "said"),
    [(-0.705, "-0.71"), (65.54 - 66.095, "-0.56"), ((79.28 + 79.35) / 2, "79.32"), (0.005, "0.01"), (-0.004, "0.00")],
)
def test_numbers_are_rounded_as_by_hand(found, said):
    """Half of the last place goes up, whatever the binary fraction beside it; there is no minus zero."""
    assert number(found) == said
