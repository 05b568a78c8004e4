"""Configuration of Sphinx for ``./scripts/docs``.

The source folder is the repository, as pages link to each other across its folders. The front page is ``README.md``; ``contents.md``
lists the sidebar. Links to folders and files that are not pages are resolved here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import lockstep

ROOT = Path(__file__).parents[1]

project, author, release = "Lockstep", "the Lockstep authors", lockstep.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "docs/**.rst", "benchmarks/**.md", "examples/**.md"]
exclude_patterns = ["docs/contents.md", "examples/*/README.md"]  # The latter are part of the guides.

myst_heading_anchors = 4
smartquotes_action = "D"  # Dashes; quotation marks stand as they are printed.
nitpicky = True
# Types of other packages, whose documentation would have to be fetched; and of inner modules, which are not for users.
nitpick_ignore_regex = [(r"py:.*", r"(?!lockstep\.).*"), (r"py:.*", r"lockstep(\.[a-z_]+){2,}\.\w+")]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
toc_object_entries_show_parents = "hide"
html_title = f"Lockstep {release}"
html_static_path = ["site"]
html_css_files = ["lockstep.css"]
html_copy_source = False


def contents() -> Iterator[str]:
    """Iterate over the lines of ``contents.md``; a pattern is replaced by its pages that are not listed elsewhere, if any."""
    lines = (ROOT / "docs" / "contents.md").read_text().splitlines()
    listed = {"docs/contents", *(line for line in lines if "*" not in line)}
    for line in lines:
        found = (
            sorted(file.relative_to(ROOT).with_suffix("").as_posix() for file in ROOT.glob(line)) if "*" in line else []
        )
        yield from [page for page in found if page not in listed] if "*" in line else [line]
        listed.update(found)


def with_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the contents of the sidebar to the front page, which is the README."""
    if page == root_doc:
        source[0] += "\n" + "\n".join(contents())


def page_of_folder(folder: Path, pages: set[str]) -> str | None:
    """Return the target of a link to a folder: the page of its name, its README, else its first page; None without pages."""
    name = folder.relative_to(ROOT).as_posix()
    inside = sorted(page for page in pages if page.startswith(f"{name}/"))
    return next((page for page in (name, f"{name}/README", *inside) if page in pages), None)


def links_to_folders(app: Sphinx, tree: nodes.document) -> None:
    """Resolve a link to a folder to a page in it; without pages, keep the text only."""
    for link in list(tree.findall(addnodes.pending_xref)):
        folder = (
            Path(app.env.relfn2path(link["reftarget"], link.get("refdoc"))[1]) if link["reftype"] == "myst" else ROOT
        )
        if link.get("refdomain") is None and folder != ROOT and folder.is_dir():
            page = page_of_folder(folder, app.env.found_docs)
            if page is None:
                link.replace_self(link.children)
            else:
                link["refdomain"], link["reftarget"], link["reftargetid"] = "doc", page, None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hooks; called by Sphinx."""
    app.connect("source-read", with_contents)
    app.connect("doctree-read", links_to_folders)
    return {"parallel_read_safe": True}
