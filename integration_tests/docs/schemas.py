"""Check workflows, issue forms and the citation against the schemas of those who read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "custom.github-workflows-require-timeout": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}


def main() -> int:
    """The number of schemas that do not hold."""
    faults = 0
    for schema, pattern in SCHEMAS.items():
        files = sorted(ROOT.glob(pattern))
        assert files, f"nothing matches {pattern}"
        call = [sys.executable, "-m", "check_jsonschema", "-q", "--builtin-schema", schema]
        faults += subprocess.run([*call, *map(str, files)]).returncode != 0
    return faults


if __name__ == "__main__":
    sys.exit(main())
