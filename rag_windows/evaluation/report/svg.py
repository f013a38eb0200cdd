"""A matplotlib figure as a part of an HTML page."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from rag_windows.evaluation.report.palette import variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAME = re.compile(r"\{[^}]*\}")
_LINK = re.compile(r"#([\w.-]+)")
_REFERENCE = re.compile(r"url\(#([\w.-]+)\)|^#([\w.-]+)$")
_COLOUR = re.compile("|".join(variables()))


def inline(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an ``<svg>`` element that scales and takes its colours from the page.

    Args:
        figure: drawn with the stand-in colours of the palette.
        name: begins every id, so that several figures can stand in one page.
        title: read to those who don't see it.
        description: likewise, longer.

    Returns:
        XML that holds no script, no style sheet and no address; texts are escaped.
    """
    written = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The reader's own fonts draw the text; matplotlib's lacks most scripts, and measures only.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    root = ElementTree.fromstring(written.getvalue())  # noqa: S314 - matplotlib wrote it just now
    named = {
        found[1] or found[2]
        for element in root.iter()
        for value in element.attrib.values()
        for found in _REFERENCE.finditer(value)
    }
    _clean(root, name, named)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-title {name}-about"})
    for place, (tag, key, text) in enumerate(
        (("title", "title", title), ("desc", "about", description))
    ):
        element = ElementTree.Element(tag, {"id": f"{name}-{key}"})
        element.text = text
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element, name: str, named: set[str]) -> None:
    """Drop what would reach beyond the figure: style sheets, metadata, ids of nobody's use."""
    # HTML knows the elements of an <svg> without their namespace.
    element.tag = _NAME.sub("", element.tag)
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        plain = _NAME.sub("", key)
        if plain == "id":
            if value in named:
                element.attrib["id"] = f"{name}-{value}"
            continue
        if _REFERENCE.search(value):
            value = _LINK.sub(lambda found: f"#{name}-{found[1]}", value)
        element.attrib[plain] = _COLOUR.sub(lambda found: f"var(--{variables()[found[0]]})", value)
    for child in list(element):
        if _NAME.sub("", child.tag) in ("style", "metadata"):
            element.remove(child)
            continue
        _clean(child, name, named)
        if child.tag == "defs" and not len(child):
            element.remove(child)
