"""The pages of the repository, and the blocks of code in them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    if name and (ROOT / name).exists()
}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)


class Block(NamedTuple):
    """A fenced block; ``number`` counts those of its language on its page, from 0."""

    page: str
    number: int
    text: str


def blocks(language: str) -> list[Block]:
    """All blocks of a language; "" has those that name none."""
    return [
        Block(page, number, re.sub(rf"^{fence[1]}", "", fence[3], flags=re.M))
        for page, text in TEXTS.items()
        for number, fence in enumerate(f for f in FENCE.finditer(text) if f[2] == language)
    ]
