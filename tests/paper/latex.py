"""Read the tables and figures of the paper's LaTeX source, independently of the registry."""

import re
from dataclasses import dataclass

START = re.compile(r"\\begin\{(figure|table|algorithm)\*?\}|\\caption(?:of\{table\})?\{")
BARE = ("", "method", "Method", "Dataset")
"""Headings of row headers that are not repeated in a row's name."""


@dataclass
class Float:
    """A table or figure: its number, caption and label, and what lies between its caption and the next."""

    kind: str
    number: int
    caption: str
    label: str
    rest: str


def floats(source):
    """All tables and figures in order, numbered by their captions as LaTeX does."""
    source = re.sub(r"(?<!\\)%.*", "", source)
    found, kind, counts = [], "", {"table": 0, "figure": 0, "algorithm": 0}
    for match in START.finditer(source):
        if match[1]:
            kind = match[1]
            continue
        counts[kind] += 1
        caption, end = braces(source, match.end() - 1)
        following = START.search(source, end)
        rest = source[end : following.start() if following else None]
        label = re.search(r"\\label\{([^}]*)\}", rest)[1]
        if kind != "algorithm":
            found.append(Float(kind, counts[kind], caption, label, rest))
    return found


def braces(source, start):
    """What the brace at `start` encloses, and where that ends."""
    depth = 0
    for at in range(start, len(source)):
        depth += {"{": 1, "}": -1}.get(source[at], 0)
        if depth == 0:
            return source[start + 1 : at], at + 1
    raise AssertionError("a brace that does not close")


def clean(text):
    """The words of a cell."""
    text = re.sub(r"\\text(?:it|bf)\{([^{}]*)\}", r"\1", text)
    text = text.replace(r"\xrightarrow{}", "->").replace(r"\pm", "±").replace(r"\&", "&").replace(r"\quad", " ")
    text = re.sub(r"\\(?=alpha)", "", text).replace("\\ ", " ").replace("$", "").replace("m_1", "m1")
    return " ".join(text.split())


def lines(block):
    """Rows of (text, how many columns it spans)."""
    block = re.sub(r"\\(?:top|mid|bottom)rule|\\cmidrule\(r\)\{[\d-]+\}|\\label\{[^}]*\}", "", block)
    found = []
    for line in block.split(r"\\"):
        cells = []
        for cell in re.split(r"(?<!\\)&", line):
            wide = re.fullmatch(r"\s*\\multicolumn\{(\d)\}\{\w\}\{(.*)\}\s*", cell, flags=re.S)
            cells.append((clean(wide[2]), int(wide[1])) if wide else (clean(cell), 1))
        if any(text for text, _ in cells):
            found.append(cells)
    return found


def tabular(table):
    """A table's head and body."""
    start = table.rest.index(r"\begin{tabular}")
    _, after = braces(table.rest, table.rest.index("{", start + len(r"\begin{tabular}")))
    block = table.rest[after : table.rest.index(r"\end{tabular}")]
    head, _, body = block.partition(r"\midrule")
    return lines(head), lines(body)


def names(head):
    """The heading of each column, by each row of the head."""
    return [[text for text, span in row for _ in range(span)] for row in head]


def results(table, headers):
    """{(row, column): text}: every cell but the first `headers` of each row, under the names that the table prints."""
    head, body = tabular(table)
    heads, found, carried = names(head), {}, ""
    for row in body:
        first = row[0][0]
        if first and not first.startswith("+"):
            carried = first
        name = f"{carried} {first}" if first.startswith("+") else carried
        own = zip(heads[-1], [name, *(text for text, _ in row[1:headers])], strict=False)
        parts = [text if heading in BARE else f"{heading} = {text}" for heading, text in own]
        at = headers
        for text, span in row[headers:]:
            titles = [rows[at] for rows in (heads if span == 1 else heads[:1])]
            column = titles[0] + "".join(f" {t}" if t.startswith("->") else f", {t}" for t in titles[1:])
            key = (", ".join(parts), column)
            assert key not in found, key
            found[key] = text
            at += span
    return found


def numbers(table):
    """Every number in a table's body, as printed; the digits of a name such as CIFAR10 are none."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", " ".join(text for row in tabular(table)[1] for text, _ in row))


def words(text, labels):
    """A caption without its mark-up: letters, digits and signs, references as numbers."""
    text = re.sub(r"\\ref\{([^}]*)\}", lambda match: labels[match[1]], text)
    text = re.sub(r"\\text(?:it|bf)", "", text).replace(r"\xrightarrow{}", "->").replace("``", '"')
    return re.sub(r"[\s{}$\\^_~]", "", text)
