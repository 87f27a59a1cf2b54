"""What the pages say of GPUs: each claim wherever it stands, with what limits it beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
)
HISTORY = ROOT / "CHANGELOG.md"  # says what was true then
# A claim, and what has to stand in the same paragraph or row. None: the claim is wrong.
CLAIMS: dict[str, str | None] = {
    r"not (yet )?been run on a GPU|only been run on (a )?CPU": None,
    r"(limited by the host|host\S* (processor )?limit(s|ed) both)(?! probably)": None,
    r"cannot be aborted": None,
    r"on one H200": r"before the engine was\s+redesigned|rank 0 of 64|three rounds",
    r"12 minutes": r"before the engine was\s+redesigned",
    r"sanitizer (finds|found)": r"none of which\s+communicates",
    r"1\.34 times FSDP2's": r"0\.96 to 1\.38 in three rounds",
    r"FSDP2.*1\.20 \(": r"1\.11 to 1\.37|1\.20, 1\.37, 1\.11",
    r"raise an error instead of hanging": r"over NCCL",
    r"4,168": r"1,039|3,136",
}


def parts(page: Path) -> list[str]:
    """Paragraphs, and the rows of tables by themselves."""
    blocks = re.split(r"\n\s*\n", page.read_text())
    return [
        part
        for block in blocks
        for part in (block.splitlines() if block.lstrip().startswith("|") else [block])
    ]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_about_gpus_has_its_limits_beside_it(claim: str) -> None:
    limits = CLAIMS[claim]
    found = [
        (page, part)
        for page in PAGES
        if page != HISTORY
        for part in parts(page)
        if re.search(claim, part)
    ]
    assert found or limits is None, "the claim has gone: strike it out here, too"
    alone = [
        f"{page.relative_to(ROOT)}: {part[:200]}"
        for page, part in found
        if limits is None or not re.search(limits, part)
    ]
    assert alone == []


def test_each_check_names_its_commit() -> None:
    page = (ROOT / "docs" / "design" / "cuda.md").read_text()
    rows = [row for row in page.split("## Checks so far")[1].splitlines() if row.startswith("| ")]
    commits = [row.rstrip(" |").rsplit("| ", 1)[1] for row in rows[1:]]
    assert len(commits) > 10
    assert all(re.search(r"[0-9a-f]{7}|^each change$|^none$", commit) for commit in commits)
