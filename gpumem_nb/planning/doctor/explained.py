"""What each finding means, by its title: sections of ``findings.md``, for people who press *more*."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files

import mistune


class _InPlace(mistune.HTMLRenderer):
    """HTML for a page on which links to files beside the section lead nowhere: their words stay."""

    def link(self, text: str, url: str, title: str | None = None) -> str:
        """Return a link to the web, or the name of a page of the docs."""
        if url.startswith("http"):
            return super().link(text, url, title)
        return f"<code>{url.rpartition('../')[2]}</code>"


@cache
def _sections() -> dict[str, str]:
    text = files(__package__).joinpath("findings.md").read_text(encoding="utf-8")
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title.strip(): body.strip() for title, _, body in parts}


def explanation(title: str) -> str:
    """Return HTML of what a finding means, from its title; empty where none has it."""
    body = _sections().get(title, "")
    return str(mistune.create_markdown(renderer=_InPlace())(body)) if body else ""


def unfolding(title: str, page: str) -> str:
    """Return HTML that says *more*, and shows the explanation in place when that is pressed; else where it stands."""
    found = explanation(title)
    return f"<details><summary>more</summary>{found}</details>" if found else f"more: <code>{escape(page)}</code>"
