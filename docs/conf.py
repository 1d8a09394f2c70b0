"""The documentation's site, built by Sphinx: ``make docs`` writes it to build/docs.

The pages are the Markdown files beside this one, which read as well without the site. The reference
is made from the docstrings and from the service's OpenAPI document. Nothing is fetched, neither by
the build nor by the pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
# The packages as they stand here, and the extension beside this file.
sys.path[:0] = [str(ROOT / "client"), str(ROOT / "autotune"), str(ROOT / "docs")]

project = "Bagua Autotune"
author = "Bagua Autotune contributors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "openapi_directive",
]
exclude_patterns = ["images"]
# What a command prints or takes stays as it is typed.
smartquotes = False

# Links to headings are GitHub's: a page's `#what-is-tuned` works in both places.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = project
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "navbar_center": [],
    "show_toc_level": 1,
    "navigation_with_keys": False,
    "footer_start": [],
    "footer_end": [],
}
# All pages by section, on every page; the theme's own shows those below the present one only.
html_sidebars = {"**": ["globaltoc.html"]}


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_reports_as_files)


def link_reports_as_files(_app: Sphinx, _page: str, source: list[str]) -> None:
    """The reports are no part of the site: a link to one leads to its Markdown."""
    source[0] = re.sub(r"\]\(\.\./(reports/[\w-]+\.md)(#[\w-]+)?\)", r"](path:../\1)", source[0])
