"""Names from outside: which may be joined to a folder, and that nothing is written through a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconv.errors import KconvError
from kconv.storage.files import LocalFiles
from kconv.storage.safe_paths import checked, fault, faults, inside, is_leftover

UNSAFE = [
    ("", "empty"), ("/etc/passwd", "absolute"), ("//tmp/..", "absolute"), ("../x", "leads out"), ("a/../../x", "leads out"),
    ("..", "leads out"), (".", "only a dot"), ("a/./b", "only a dot"), ("a//b", "empty part"), ("a/", "empty part"),
    ("a\\b", "backslash"), ("..\\x", "backslash"), ("C:x", "drive"), ("c:/x", "drive"), ("a\0b", "NUL"), ("\ud800", "UTF-8"),
    ("x" * 256, "longer"), ("a/" * 2500 + "b", "longer"), (None, "no text"), (7, "no text"), (["a"], "no text"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "why"), UNSAFE)
def test_a_name_that_could_leave_its_folder_is_refused(name: object, why: str) -> None:
    assert why in (fault(name) or "")
    with pytest.raises(KconvError, match="file name"):
        checked(name, "listing")


@pytest.mark.parametrize("name", ["config.json", "a/b/c.txt", "名前.json", "..x", "x..", "a b", "x" * 255])
def test_an_ordinary_name_is_joined(name: str, tmp_path: Path) -> None:
    assert inside(tmp_path, name) == tmp_path / name


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "side").symlink_to(elsewhere)
    (out / "file").symlink_to(elsewhere / "file")
    for name in ("side/x", "file"):
        with pytest.raises(KconvError, match="is a link"):
            inside(out, name)


def test_a_file_below_a_file_is_refused() -> None:
    assert faults(["a", "a/b"]) == ["the file name 'a/b' lies below 'a', which is a file"]
    for name in ("config.json/x", "model.safetensors.index.json/x", "model.safetensors/x", "kconv.json/x"):
        assert "which is a file" in faults([name])[0]
    assert faults(["assets/config.json", "runtimes/x/config.json"]) == []


def test_control_characters_of_a_name_are_not_printed() -> None:
    with pytest.raises(KconvError) as caught:
        checked("../\x1b]0;owned\x07\n", "listing")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a//b"])
def test_a_folder_is_not_read_outside_of_itself(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "in").mkdir()
    with pytest.raises(KconvError, match="file name"):
        LocalFiles(tmp_path / "in").read(name, 0, 1)


@pytest.mark.parametrize("name", [".gitattributes", ".cache/x", "a/.b/c", "x.incomplete", "x.lock", "__pycache__/m.pyc"])
def test_leftovers_are_no_part_of_a_checkpoint(name: str) -> None:
    assert is_leftover(name)
