"""`marginlens encoders`: what there is to train, and what it costs."""

from __future__ import annotations

import json as jsons
from dataclasses import asdict

from rich.table import Table

from marginlens import output
from marginlens.nets.count import table


def encoders(*, json: bool = False) -> None:
    """Lists the encoders: stem, features, parameters and FLOPs per image (two for each multiply-add).

    Args:
        json: Print JSON instead of a table.
    """
    rows = [asdict(row) for row in table()]
    if json:
        output.say_json(jsons.dumps(rows, indent=1))
        return
    sheet = Table("encoder", "stem", "pixels", "features", "parameters", "MFLOP per image")
    for row in rows:
        name, stem, size, features = (str(row[key]) for key in ("name", "stem", "size", "features"))
        sheet.add_row(name, stem, size, features, f"{row['parameters']:,}", f"{row['flops'] / 1e6:,.0f}")
    output.show(sheet)
