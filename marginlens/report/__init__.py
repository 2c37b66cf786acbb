"""Pages, tables and pictures of what was measured.

Pages are the templates beside this file. A text that a page is given is escaped where it enters the page.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def environment(package: str) -> Environment:
    """Return the templates of a package, whose values are escaped and must all be given."""
    made = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


_TEMPLATES = environment("marginlens.report")


def render(name: str, **values: Any) -> str:
    """Return the page that a template makes of these values."""
    return _TEMPLATES.get_template(name).render(values)
