"""The paper's tables and figures as data: for each number, its settings, its published value and its address.

    cell, = find("MoCo/CIFAR10/pos", "tab2")
    cell.settings                           # for marginlens.Pretrain, without a seed
    cell.published                          # 90.663 ± 0.159
    cell.address                            # Tab. 2, row MoCo + pos., column CIFAR10

The paper is "Understanding Contrastive Learning Through the Lens of Margins" (arXiv 2306.11526).
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from marginlens.paper import figures, hyper, tables
from marginlens.paper.cells import Cell, Published, Table, Value
from marginlens.parameters import quoted

__all__ = ["TABLES", "Cell", "Published", "Table", "Value", "elsewhere", "find", "readings"]


def _number(table: Table) -> tuple[bool, int]:
    return table.key[:3] == "fig", int(table.key[3:])


TABLES: dict[str, Table] = {t.key: t for t in sorted((*tables.TABLES, *hyper.TABLES, *figures.TABLES), key=_number)}
"""tab1 to tab10, fig1 to fig8, in the paper's numbering."""


def find(pattern: str, table: str = "", every_reading: bool = False) -> tuple[Cell, ...]:
    """Return the cells whose path matches a pattern such as "MoCo/CIFAR10/*", in one table or in all. Case is ignored.

    With `every_reading`, a matching cell comes with all of its readings. "MoCo/*/bn_splits=1" matches that reading
    alone.
    """
    if table and table not in TABLES:
        raise ValueError(f"there is no table {quoted(table)}; there are {', '.join(TABLES)}")
    cells = [cell for key, t in TABLES.items() if table in ("", key) for cell in t.cells]

    def fits(cell: Cell) -> bool:
        return fnmatchcase(cell.path.lower(), pattern.lower())

    shown = [(cell, read) for cell in cells for read in (readings(cell) if every_reading else (cell,))]
    if found := tuple(read for cell, read in shown if fits(read) or fits(cell)):
        return found
    where = TABLES[table].name if table else "the paper"
    if not cells:
        raise ValueError(f"{where} has no cells to run: {TABLES[table].title.lower()}, {TABLES[table].kind}")
    paths = {read.path.lower(): read.path for _, read in shown}
    close = [paths[path] for path in get_close_matches(pattern.lower(), paths, n=3, cutoff=0.6)]
    hint = f"near it: {', '.join(close)}" if close else f"paths are method/data/row, such as {cells[0].path}"
    if other := next((read for cell in cells for read in readings(cell) if fits(read)), None):
        hint = f"{other.path} is another reading of the paper's words; add --readings to run it"
    raise ValueError(f"no cell of {where} matches {quoted(pattern)}; {hint}")


def readings(cell: Cell) -> tuple[Cell, ...]:
    """Return the cell by every reading of the paper's words: the cell itself, then one cell for each alternative."""
    others = (
        replace(
            cell,
            path=f"{cell.path}/{what}",
            row=f"{cell.row} ({what})",
            settings=settings,
            reading=what,
        )
        for what, settings in cell.alternatives.items()
    )
    return cell, *others


def elsewhere(cell: Cell) -> tuple[Cell, ...]:
    """Return other cells that are the same run, measured the same way.

    A figure's point may have its number in a table.
    """
    if cell.settings is None:
        return ()
    same = (cell.settings, cell.measure, cell.to)
    cells = (other for table in TABLES.values() for other in table.cells)
    return tuple(
        c for c in cells if (c.settings, c.measure, c.to) == same and (c.table, c.path) != (cell.table, cell.path)
    )
