"""A source of another kind: five calls are all it has to offer, everything else has a default."""

from __future__ import annotations

from pathlib import Path

import kconv
from kconv.storage.files import Files, LocalFiles
from tests.engine.faults import tree


class Bare(Files):
    """Files that know nothing of links, holes, maps or hashes."""

    def __init__(self, folder: Path) -> None:
        self.where, self._inside = str(folder), LocalFiles(folder)

    def names(self) -> list[str]:
        return self._inside.names()

    def size(self, name: str) -> int:
        return self._inside.size(name)

    def fingerprint(self, name: str) -> str:
        return self._inside.fingerprint(name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._inside.read(name, offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._inside.read_into(name, offset, buffer)


def test_a_source_of_five_calls_is_converted_and_verified_like_a_folder(tmp_path: Path) -> None:
    kconv.tiny("k3", tmp_path / "source", seed=3)
    source = Bare(tmp_path / "source")
    assert not source.is_hole("config.json", 0, 1)
    assert b"".join(source.stream("config.json", 1, 20)) == (tmp_path / "source/config.json").read_bytes()[1:21]
    kconv.convert(source, tmp_path / "bare", to="native")
    kconv.convert(tmp_path / "source", tmp_path / "folder", to="native")
    bare, folder = tree(tmp_path / "bare"), tree(tmp_path / "folder")
    assert {n for n in folder if bare.get(n) != folder[n]} <= {"kconv.json"}, "it names the source's time stamps"
    assert bare.keys() == folder.keys()
    assert kconv.verify(tmp_path / "bare", source)["ok"]
