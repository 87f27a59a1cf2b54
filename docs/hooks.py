"""What MkDocs does not do by itself, when the site is built.

Pages of the repository that are outside of ``docs/`` become pages of the site. A link to any other
file of the repository becomes a link to its source, and is an error if there is no such file.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks")  # a warning is an error, as the build is strict
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples/README.md": "examples.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^( *```.*?^ *```|(?:    [^\n]*\n)+)", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Take the pages from outside of ``docs/``."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links that work in the repository work on the site."""
    sources = {target: source for source, target in PAGES.items()}
    path = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = os.path.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        found = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if found in PAGES:
            return os.path.relpath(PAGES[found], here or ".") + anchor
        if found.startswith("docs/"):
            return os.path.relpath(found.removeprefix("docs/"), here or ".") + anchor
        if not (ROOT / found).exists():
            LOG.warning("%s links to %s, which is not in the repository", path, target)
        kind = "tree" if (ROOT / found).is_dir() else "blob"
        return f"{config.repo_url.rstrip('/')}/{kind}/main/{found}{anchor}"

    parts = FENCE.split(markdown)
    return "".join(part if place % 2 else LINK.sub(moved, part) for place, part in enumerate(parts))


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Refuse what a reader without a network would not see."""
    for tag in re.findall(r"<(?:script|img|link|iframe)\b[^>]*>", output):
        source = re.search(r"""(?:src|href)=["']?(https?://[^"' >]+)""", tag)
        if source and not ("rel=" in tag and re.search(r"rel=[\"']?canonical", tag)):
            LOG.warning("%s loads %s", page.file.src_uri, source[1])
    return output
