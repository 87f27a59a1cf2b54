"""Lines of code, and names of classes that stand for several things."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NO_CODE = frozenset(
    {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        *(tokenize.ENCODING, tokenize.ENDMARKER),
    }
)


def code_lines(text: str) -> int:
    """The number of lines that have code on them: not blank, no comment, no docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text_of = node.body[0]
            assert text_of.end_lineno is not None, "it was parsed"
            lines.difference_update(range(text_of.lineno, text_of.end_lineno + 1))
    return len(lines)


def sources(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """All files of all packages, each with the name that it is imported by."""
    for folder in sorted(root.glob("packages/*/src/*/__init__.py")):
        for path in sorted(folder.parent.rglob("*.py")):
            yield folder.parent.name, path


def code_lines_of_packages() -> dict[str, int]:
    """The code lines of each package."""
    counted: Counter[str] = Counter()
    for package, path in sources():
        counted[package] += code_lines(path.read_text())
    return dict(counted)


def shared_names() -> dict[str, list[str]]:
    """Names of classes that are defined more than once, with the files."""
    places: dict[str, list[str]] = defaultdict(list)
    for _, path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}
