"""A page that stands by itself: no file beside it, nothing fetched, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

BEGIN = b"<!DOCTYPE html>\n<!-- written by gpumem_nb -->\n"
# The names are JupyterLab's, so that what is made for notebooks looks alike here.
_CSS = """
:root { color-scheme: light dark; --jp-ui-font-color1: #212121; --jp-ui-font-color2: #616161; --jp-layout-color0: #fff;
  --jp-layout-color1: #fff; --jp-layout-color2: #eee; --jp-border-color1: #bdbdbd; --jp-border-color2: #e0e0e0;
  --jp-success-color0: #1b5e20; }
@media (prefers-color-scheme: dark) {
  :root { --jp-ui-font-color1: #eee; --jp-ui-font-color2: #bdbdbd; --jp-layout-color0: #111; --jp-layout-color1: #111;
    --jp-layout-color2: #2b2b2b; --jp-border-color1: #616161; --jp-border-color2: #424242;
    --jp-success-color0: #81c784; }
}
body { margin: 0 auto; max-width: 100em; padding: 1em 1.5em 3em; background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.6em; margin: 0.4em 0 0; }
h2 { font-size: 1.2em; margin: 1.6em 0 0.4em; }
section { overflow-x: auto; }
table { font-size: 0.87em; }
p { max-width: 60em; }
"""


def page(title: str, sections: Sequence[str], css: str = "") -> str:
    """HTML of a whole page.

    Args:
        title: in words, which are escaped.
        sections: HTML, one below the other.
        css: more style.
    """
    body = "".join(f"<section>{section}</section>\n" for section in sections)
    return (
        f"{BEGIN.decode()}<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_CSS}{css}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )
