"""regard trains attention models, puts them to work, and shows what they attend to.

>>> import regard
>>> model = regard.load("runs/en-es")                       # doctest: +SKIP
>>> model.translate("this cat is very large").text          # doctest: +SKIP
'este gato es muy grande'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regard.api import Model, Translation, load, train

__all__ = ["Model", "Translation", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """torch and the rest are imported when first used: `import regard` alone is quick."""
    if name in ("Model", "Translation", "load", "train"):
        from regard import api

        return getattr(api, name)
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
