"""Pictures as files: what is written depends on how the file's name ends."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlencode
from xml.sax.saxutils import escape

from regard.errors import UserError
from regard.files import atomic_write
from regard.viz import matplotlib_backend
from regard.viz.scene import DARK, LIGHT, Scene, Theme
from regard.viz.views.picture import Picture

FILES = {
    ".svg": "the picture, sharp at any size",
    ".png": "the picture in dots, two to the unit",
    ".pdf": "the picture for print",
    ".html": "the page, with everything that was recorded, in one file",
    ".json": "the numbers of the view, and what was recorded without its arrays",
    ".safetensors": "everything that was recorded (see `regard.interpret.trace.Trace.load`)",
}


def save(picture: Picture, path: Path, *, theme: Theme = "auto") -> str:
    """Write a picture, or what it is of, into a file; the signs that could not be drawn, of a PNG or a PDF.

    The file appears whole or not at all.
    """
    kind, missing = checked(path, traced=picture.trace is not None), ""
    if kind == ".safetensors" and picture.trace is not None:
        picture.trace.save(path.resolve())
        return missing
    if kind in (".png", ".pdf"):
        data, missing = matplotlib_backend.draw(picture.scene(), "png" if kind == ".png" else "pdf", theme=theme)
    else:
        data = written(picture, kind, theme).encode("utf-8")
    with atomic_write(path.resolve()) as file:
        file.write_bytes(data)
    return missing


def checked(path: Path, *, traced: bool = True) -> str:
    """How the file's name ends, if that is something that can be written."""
    kind = path.suffix.lower()
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    if kind not in FILES:
        raise UserError(f"{path}: a picture is a file that ends in {', '.join(FILES)} (none: the terminal)")
    if kind == ".safetensors" and not traced:
        raise UserError(f"{path}: a trace is of a text, and this view reads none; .json has its numbers")
    if kind in (".png", ".pdf"):
        matplotlib_backend.needed(kind)
    return kind


def written(picture: Picture, kind: str, theme: Theme) -> str:
    """The text of an .svg, .html or .json file."""
    trace = picture.trace
    if kind == ".svg":
        return picture.scene().svg(theme)
    if kind == ".json":
        recorded = {} if trace is None else {"trace": trace.header}
        return json.dumps({"view": picture.view, **picture.numbers, **recorded}, ensure_ascii=False) + "\n"
    if trace is None:
        return plain_page(picture.scene(), theme)
    from regard.viz import standalone

    return standalone.page([trace], hash=_state(picture))


def _state(picture: Picture) -> str:
    """Where the page opens: at the same view, or, where it has none of that name, at all heads."""
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
    """A page of one picture, for views that need no text and so have no trace."""
    night = f"@media (prefers-color-scheme: dark) {{ body {{ background: {DARK.card} }} }}" if theme == "auto" else ""
    ground = DARK.card if theme == "dark" else LIGHT.card
    style = f"body {{ margin: 2rem; background: {ground} }} svg {{ max-width: 100%; height: auto }} {night}"
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(scene.name)}</title>\n'
        f"<style>{style}</style>\n{scene.svg(theme)}</html>\n"
    )
