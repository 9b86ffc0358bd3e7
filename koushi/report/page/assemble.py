"""One self-contained page from its data: style, scripts and data stand in the file, nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

SCRIPTS = ("words.js", "lattice.js", "charts.js", "parameter.js", "main.js")


def assemble(title: str, data: Mapping[str, Any]) -> str:
    """The HTML text of the page that draws ``data``, which ``koushi.report.page.data`` describes."""
    folder = files("koushi.report.page")
    read = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    written = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Template(read["page.html"]).substitute(
        title=escape(title),
        style=read["page.css"],
        # A closing tag within a string would end the script.
        data=written.replace("<", "\\u003c"),
        script='"use strict";\n' + "\n".join(read[name] for name in SCRIPTS),
    )
