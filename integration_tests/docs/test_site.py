"""What the documentation says is in the source. Runs without torch (tox: docs)."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib

import pytest
import yaml

from .blocks import ROOT, TEXTS, blocks

SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
PUBLIC = {
    "vescale_fsdp": "core",
    "vescale_fsdp.checkpoint": "core",
    "vescale_fsdp.optim": "core",
    "vescale_fsdp.planner": "core",
    "vescale_fsdp.testing": "core",
    "vescale_fsdp_elastic": "elastic",
    "vescale_fsdp_tune": "tune",
    "vescale_fsdp_accelerate": "accelerate_plugin",
    "vescale_fsdp_lightning": "lightning_plugin",
}
OF_TORCH = {
    f"vescale_fsdp.{name}"
    for name in (
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
    )
}


def template(node: ast.AST) -> str:
    """The text of a string, with an ellipsis for each value that is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "…"


def test_blocks_of_data_can_be_read() -> None:
    for _, _, text in blocks("yaml"):
        yaml.safe_load(text)
    for _, _, text in blocks("json"):
        json.loads(text)
    for _, _, text in blocks("toml"):
        tomllib.loads(text)


def test_shell_blocks_can_be_parsed() -> None:
    found = blocks("bash")
    assert found
    for page, number, text in found:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{page}, bash block {number}: {done.stderr}"


def test_messages_of_the_troubleshooting_page_are_in_the_source() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    known = {template(n) for n in nodes if isinstance(n, ast.Constant | ast.JoinedStr | ast.BinOp)}
    quotes = re.findall(r"^> (.+)$", TEXTS["docs/troubleshooting.md"], re.M)
    assert len(quotes) > 25
    missing = []
    for quote in quotes:
        parts = [re.escape(part.strip()) for part in quote.split("…") if part.strip(" .,:")]
        pattern = re.compile(".*?".join(parts), re.S)
        if not any(pattern.search(text) for text in known):
            missing.append(quote)
    assert missing == []


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_has_every_public_name(package: str) -> None:
    path = ROOT / "packages" / PUBLIC[package] / "src" / package.replace(".", "/") / "__init__.py"
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    pages = [text for page, text in TEXTS.items() if page.startswith("docs/reference/")]
    shown = set(re.findall(r"^::: (\S+)$", "\n".join(pages), re.M))
    assert {f"{package}.{name}" for name in names} - shown <= OF_TORCH


def test_environment_variables_are_listed() -> None:
    path = ROOT / "packages/core/src/vescale_fsdp/cli/checkup/software.py"
    used = set(re.findall(r'"(VESCALE_FSDP_[A-Z_]+[A-Z])",', path.read_text()))
    assert "VESCALE_FSDP_TIMEOUT_S" in used
    assert used <= set(re.findall(r"VESCALE_FSDP_\w+", TEXTS["docs/reference/environment.md"]))


def test_readme_is_short_and_has_the_two_commands() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 120
    assert "python3 dev.py demo" in text
    assert "python3 dev.py test" in text


def test_links_between_pages_of_the_repository_work() -> None:
    link = re.compile(r"\]\((?![a-z]+:|#|/)([^)#\s]+)")
    for page, text in TEXTS.items():
        for target in link.findall(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_file_names_have_no_spaces_and_pictures_one_format() -> None:
    call = ["git", "ls-files"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()
    assert [name for name in names if " " in name] == []
    assert [name for name in names if name.endswith((".png", ".jpg"))] == []


def test_design_pages_are_all_listed() -> None:
    for path in (ROOT / "docs" / "design").glob("*.md"):
        assert path.name == "README.md" or f"({path.name})" in TEXTS["docs/design/README.md"]
