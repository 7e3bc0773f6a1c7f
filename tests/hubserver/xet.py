"""The xet side of the test Hub: tokens that send the real hf_xet client to a store on the local disk, and its index.

hf_xet takes `local://FOLDER` for the address of its content store. It keeps xorbs (compressed chunks) and shards there; a
shard says which chunks make up a file, and the file's sha256, which is what a commit names. Layout of a shard, as
documented in the Hub's xet protocol specification and checked against files that hf_xet 1.8.0 wrote:

| bytes | content |
|---|---|
| 48 | tag (32), version, footer size |
| 48 a file | file hash (32), flags, number of segments, 8 unused; flag bit 31: verification rows, bit 30: sha256 row |
| 48 a segment, then 48 a verification row, then sha256 (32) and 16 unused | |
| 48 | 0xff x 32 ends the list |
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hubserver.api import MODELS, repo_of
from tests.hubserver.wire import Request, Response

if TYPE_CHECKING:
    from tests.hubserver.server import HubServer

ROW = 48


def _hex(raw: bytes) -> str:
    """A hash's text: each 8 bytes are a little-endian number."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def files_of(shard: bytes) -> dict[str, tuple[str, int]]:
    """sha256 -> (xet hash, size) of the files that a shard describes."""
    found: dict[str, tuple[str, int]] = {}
    at = ROW
    while shard[at : at + 32] != b"\xff" * 32:
        file_hash = _hex(shard[at : at + 32])
        flags, count = struct.unpack("<2I", shard[at + 32 : at + 40])
        segments = [shard[at + ROW * (k + 1) : at + ROW * (k + 2)] for k in range(count)]
        at += ROW * (1 + count * (2 if flags >> 31 else 1))
        if flags >> 30 & 1:
            size = sum(struct.unpack("<I", s[36:40])[0] for s in segments)
            found[_hex(shard[at : at + 32])] = (file_hash, size)
            at += ROW
    return found


class XetStore:
    """The content store on disk, as hf_xet writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"local://{folder}"

    def find(self, sha256: str) -> tuple[str, int] | None:
        """(xet hash, size) of a file that was uploaded completely."""
        for shard in self.folder.rglob("xorbs/shards/*.mdb"):
            if sha256 in (files := files_of(shard.read_bytes())):
                return files[sha256]
        return None

    def fetch(self, sha256: str, dest: Path) -> bool:
        """Rebuild a file by its sha256 with hf_xet; whether it is there."""
        from hf_xet import XetFileInfo, XetSession

        known = self.find(sha256)
        if known is None:
            return False
        with XetSession().new_file_download_group(endpoint=self.url) as group:
            group.start_download_file(XetFileInfo(*known), str(dest))
        return True

    def stored(self) -> int:
        """Bytes of all xorbs: what uploads have moved so far."""
        return sum(p.stat().st_size for p in self.folder.rglob("xorbs/xorbs/*") if p.suffix != ".tagset")


def token(app: HubServer, request: Request) -> Response:
    """GET /api/models/{repo}/xet-{read,write}-token/{rev}."""
    repo_of(app, request, write=request.groups["kind"] == "write", content=True, rev=request.groups["rev"])
    if app.xet is None:
        return Response.error(404, "xet is off")
    expires = int(time.time()) + 3600
    headers = {"X_Xet_Cas_Url": app.xet.url, "X_Xet_Access_Token": "x", "X_Xet_Token_Expiration": str(expires)}
    return Response.json({"casUrl": app.xet.url, "accessToken": "x", "exp": expires}, 200, **headers)


ROUTES = [("GET", rf"{MODELS}/xet-(?P<kind>read|write)-token/(?P<rev>[^/]+)", token)]
