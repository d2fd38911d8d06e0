"""What a page needs beyond Markdown: links that leave `docs/`, and formulas as MathML, which browsers draw by
themselves."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

_LINKS = {
    "../../benchmarks/results/": "",
    "../benchmarks/results/": "results/",
    "../benchmarks/results)": "results.md)",
    "../CONTRIBUTING.md": "contributing.md",
    "../SECURITY.md": "security_policy.md",
    "docs/security.md": "security.md",
}
_FENCED = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^$\n]+?)\$(?![\w$])", re.DOTALL)


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Rewrite links and formulas outside of code. A search finds guides before reference and results."""
    if page is not None and page.file.src_uri.startswith(("reference/", "results/", "changelog")):
        page.meta["search"] = {"boost": 0.3}
    for written, shown in _LINKS.items():
        markdown = markdown.replace(f"]({written}", f"]({shown}")
    parts = _FENCED.split(markdown)
    return "".join(part if i % 2 else _FORMULA.sub(_mathml, part) for i, part in enumerate(parts))


def _mathml(match: re.Match[str]) -> str:
    block = match["block"]
    found: str = convert((block or match["inline"]).strip(), display="block" if block else "inline")
    # Inside a span it belongs to its paragraph, also at the beginning of a line.
    return f"\n\n{found}\n\n" if block else f"<span>{found}</span>"
