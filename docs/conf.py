"""The documentation site: `make site` builds it from these pages with Sphinx."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "NestPipe"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
project_copyright = "The NestPipe authors, Apache-2.0"
language = "en"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["figures"]
# Links to headings are written as on GitHub: the words in lower case, joined by hyphens.
myst_heading_anchors = 4
# Nothing is loaded from elsewhere: pages work without a network.
html_theme = "furo"
html_title = f"NestPipe {release}"
html_copy_source = False
html_show_sourcelink = False
# A word of its own (`text`) for what a shell prints; Pygments need not guess.
highlight_language = "text"
# A line that begins with `% of` is text, as on GitHub; MyST would drop it as a comment.
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target"]
