"""Pictures as files; the suffix of the file name selects the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode
from xml.sax.saxutils import escape

from regard.errors import UserError
from regard.files import atomic_write
from regard.viz import matplotlib_backend, standalone
from regard.viz.scene import DARK, LIGHT, Scene, Theme

if TYPE_CHECKING:  # picture.py imports this module
    from regard.viz.views.picture import Picture

FILES = {
    ".svg": "the picture, sharp at any size",
    ".png": "the picture as pixels, 192 dpi",
    ".pdf": "the picture for print",
    ".html": "the page with the whole trace, in one file",
    ".json": "the numbers of the view, and the trace without its arrays",
    ".safetensors": "the whole trace (see `regard.interpret.trace.Trace.load`)",
}


PICTURES = (".svg", ".png", ".pdf")  # files that hold only a picture


def save_scene(scene: Scene, path: Path, *, theme: Theme = "auto") -> str:
    """Write a picture to an .svg, .png or .pdf file; return the characters that a PNG or PDF could not show."""
    kind, missing = checked(path), ""
    if kind == ".svg":
        data = scene.svg(theme).encode("utf-8")
    else:
        data, missing = matplotlib_backend.draw(scene, "png" if kind == ".png" else "pdf", theme=theme)
    with atomic_write(path.resolve()) as file:
        file.write_bytes(data)
    return missing


def save(picture: Picture, path: Path, *, theme: Theme = "auto") -> str:
    """Write a picture, or its trace, to a file; return the characters that a PNG or PDF could not show.

    The file is written atomically.
    """
    kind, missing = checked(path, traced=picture.trace is not None), ""
    if kind == ".safetensors" and picture.trace is not None:
        picture.trace.save(path.resolve())
        return missing
    if kind in PICTURES:
        return save_scene(picture.scene(), path, theme=theme)
    with atomic_write(path.resolve()) as file:
        file.write_bytes(file_text(picture, kind, theme).encode("utf-8"))
    return missing


def checked(path: Path, *, traced: bool = True) -> str:
    """Return the suffix of the file name; raise a `UserError` if such a file cannot be written."""
    kind = path.suffix.lower()
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file name in it")
    if kind not in FILES:
        raise UserError(f"{path}: the name of a picture must end in {', '.join(FILES)} (without --out: the terminal)")
    if kind == ".safetensors" and not traced:
        raise UserError(f"{path}: this view has no text and so no trace; use .json for its numbers")
    if kind in (".png", ".pdf"):
        matplotlib_backend.require_matplotlib(kind)
    return kind


def file_text(picture: Picture, kind: str, theme: Theme) -> str:
    """Return the text of an .svg, .html or .json file."""
    trace = picture.trace
    if kind == ".svg":
        return picture.scene().svg(theme)
    if kind == ".json":
        recorded = {} if trace is None else {"trace": trace.header}
        return json.dumps({"view": picture.view, **picture.numbers, **recorded}, ensure_ascii=False) + "\n"
    if trace is None:
        return plain_page(picture.scene(), theme)
    return standalone.page([trace], hash=_state(picture))


def _state(picture: Picture) -> str:
    """Return the address that opens the page at the same view, or at all heads if the page has no such view."""
    chosen = picture.numbers
    if picture.view == "align":
        layer = "mean" if chosen["layer"] is None else chosen["layer"]
        fields = {"layer": layer, "head": chosen["head"], "words": int(chosen["words"]) or None}
    elif picture.view == "maps" and chosen["head"] is not None and chosen["layer"] is not None:
        fields = {"open": f"{chosen['attention']}:{chosen['head']}"}
    else:
        fields = {}
    view = {"maps": "heads", "gates": "heads"}.get(picture.view, picture.view)
    given = {"view": view} | {key: value for key, value in fields.items() if value is not None}
    return "#" + urlencode(given)


def plain_page(scene: Scene, theme: Theme) -> str:
    """Return a page with one picture, for views without a trace."""
    dark = f"@media (prefers-color-scheme: dark) {{ body {{ background: {DARK.card} }} }}" if theme == "auto" else ""
    background = DARK.card if theme == "dark" else LIGHT.card
    style = f"body {{ margin: 2rem; background: {background} }} svg {{ max-width: 100%; height: auto }} {dark}"
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(scene.name)}</title>\n'
        f"<style>{style}</style>\n{scene.svg(theme)}</html>\n"
    )
