"""The documentation as a site: `make docs` writes it to build/docs/html. The build needs no network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]  # because an installed marginlens may be of another checkout

import generate  # noqa: E402

from marginlens import __version__  # noqa: E402
from marginlens.lens.page import page  # noqa: E402

project = "marginlens"
author = "The marginlens contributors"
copyright = "the marginlens contributors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
nitpicky = True
# because types in signatures are of other packages, or of ours that have no place in the reference
nitpick_ignore_regex = [(r"py:(class|obj)", r".*")]
smartquotes = False
default_role = "code"
highlight_language = "none"

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
add_module_names = False
doctest_global_setup = "import torch\nimport marginlens as ml"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"marginlens {release}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

repository = os.environ.get("MARGINLENS_REPOSITORY", "").rstrip("/")
"""Where files outside docs/ can be read, such as https://host/owner/marginlens/blob/main; "": they are not links."""


class OutsideLinks(SphinxTransform):
    """Lead a link to a file outside docs/ to the repository, or show the file's path where no address is set.

    A link to a file that does not exist stays as it is: Sphinx warns about it, which ends the build.
    """

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        kinds = (addnodes.pending_xref, addnodes.download_reference)
        for link in [node for kind in kinds for node in self.document.findall(kind)]:
            if link.get("reftype") == "myst" and (path := self._outside(link)):
                text = [child.deepcopy() for child in link.children]
                if repository:
                    shown: nodes.Element = nodes.reference("", "", *text, refuri=f"{repository}/{path}")
                else:
                    shown = nodes.abbreviation("", "", *text, explanation=path)
                link.replace_self(shown)

    def _outside(self, link: nodes.Element) -> str:
        """Return the path of an existing file outside docs/, or ""."""
        target = link["reftarget"].partition("#")[0]
        if link.get("refdomain") == "doc":
            path = Path(f"{DOCS / target}.md")
        else:
            path = Path(self.env.doc2path(self.env.docname)).parent / target
        path = Path(os.path.normpath(path))
        if not target or path.is_relative_to(DOCS) or not path.is_relative_to(ROOT) or not path.exists():
            return ""
        return path.relative_to(ROOT).as_posix()


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill a page's markers, such as `<!-- generate: commands -->`, with what generate.py makes of the code."""
    for name, make in generate.MAKERS.items():
        marker = f"<!-- generate: {name} -->"
        if marker in source[0]:
            source[0] = source[0].replace(marker, make())


FIELDS: dict[str, list[str]] = {}
"""Docstrings of fields and properties, which napoleon must not read: it takes words before a colon for a type."""


def plain(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText: escape its symbols outside backticks, mark indented examples as code."""
    made: list[str] = []
    depth = code = 0
    example = False
    for line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        example = text.startswith(">>>") or (example and bool(text))
        if text and not example and not code and indent >= depth + 4 and made and not made[-1]:
            code = indent
            made += [" " * depth + "::", ""]
        elif text and indent < code:
            code = 0
        if text and not code:
            depth = indent
        made.append(line if code or example else _escaped(line))
    lines[:] = made
    if what in ("attribute", "property", "data"):
        FIELDS[name] = made


def restore(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon made of a field."""
    lines[:] = FIELDS.pop(name, lines)


def colons(app: Sphinx, document: nodes.document) -> None:
    """Write `name: meaning` in lists of arguments, where Sphinx writes `name -- meaning`."""
    for text in [node for node in document.findall(nodes.Text) if node == " -- "]:
        text.parent.replace(text, nodes.Text(": "))


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"[*|]|_(?=\W|$)", r"\\\g<0>", part) for part in parts)


def write_lens(app: Sphinx, error: Exception | None) -> None:
    """Write the lens's page, which a guide embeds."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "lens.html").write_text(page())


def setup(app: Sphinx) -> dict[str, bool]:
    """Register our links, our docstrings and our markers."""
    app.add_transform(OutsideLinks)
    app.connect("autodoc-process-docstring", plain, priority=400)  # because napoleon is at 500
    app.connect("autodoc-process-docstring", restore, priority=600)
    app.connect("doctree-read", colons)
    app.connect("source-read", fill)
    app.connect("build-finished", write_lens)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
