"""`Place`: what is found, and restored, after a save was killed at any point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vescale_fsdp.checkpoint import Place


def make(path: Path, text: str, *, whole: bool = True) -> None:
    path.mkdir()
    (path / "data").write_text(text)
    if whole:
        (path / "manifest.json").write_text("{}")


def save(path: Path, text: str) -> None:
    """As an adapter does."""
    place = Place(path)
    new = place.beside(".new")
    place.mend()
    make(Path(new.path), text)
    place.replace_by(new)


def test_a_directory_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for text in ("1", "2", "3"):
        save(path, text)
        assert (path / "data").read_text() == text
        assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_after_a_kill_a_complete_one_is_found(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first renaming, before the second, or before the old one is deleted."""
    path = tmp_path / "last.ckpt"
    save(path, "1")
    left = [calls]

    def killed(self: Place, *_: object) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        moves(self, *_)  # type: ignore[arg-type]

    moves = Place.move_to
    monkeypatch.setattr(Place, "move_to", killed)
    if calls == 2:
        monkeypatch.setattr(Place, "remove", killed_removal(Place.remove))
    with pytest.raises(KeyboardInterrupt):
        save(path, "2")
    monkeypatch.undo()
    found = Path(Place(path).found().path)
    assert (found / "data").read_text() == ["1", "2", "2"][calls]
    Place(path).mend()
    assert (path / "data").read_text() == ["1", "2", "2"][calls]
    assert os.listdir(tmp_path) == ["last.ckpt"]


def killed_removal(remove: object) -> object:
    """Lets a missing one be removed, and dies where there is something."""

    def die(self: Place) -> None:
        if self.exists:
            raise KeyboardInterrupt

    return die


def test_what_is_incomplete_is_deleted_and_what_is_complete_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    make(path.with_name("last.ckpt.old"), "1")
    make(path.with_name("last.ckpt.new"), "2", whole=False)
    assert Place(path).found().path == f"{path}.old"
    Place(path).mend()
    assert (path / "data").read_text() == "1"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("1")
    new = Place(path).beside(".new")
    Path(new.path).write_text("2")
    monkeypatch.setattr(Place, "move_to", None)
    Place(path).replace_by(new)
    assert path.read_text() == "2"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_link_to_what_is_gone_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.symlink_to(tmp_path / "pruned.ckpt")
    assert Place(path).exists
    assert not Place(path).fs.ls(path)
    save(path, "1")
    assert (path / "data").read_text() == "1"
    assert os.listdir(tmp_path) == ["last.ckpt"]
    path.rename(tmp_path / "pruned.ckpt")
    path.symlink_to("nowhere")
    Place(path).remove()
    assert os.listdir(tmp_path) == ["pruned.ckpt"]
