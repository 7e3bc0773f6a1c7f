"""The sound folders that trials start from, made once by the command line itself.

| folder | what |
|---|---|
| source/NAME | published layouts of each family, two layers deep where that is possible |
| converted/NAME | `converted/native`, `converted/decoded` (with its sidecar), `converted/back` of `source/k3` |
| draft/NAME, target | drafts and the Kimi K3 they are for |
| package/NAME | each draft packaged for the target |
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fuzz.trial import called

SMALL = ["--layers", "2", "--experts", "2"]
SOURCES: dict[str, list[str]] = {
    "k3": ["k3", "--seed", "1", *SMALL], "k31": ["k31", *SMALL], "k2": ["k2", *SMALL], "k25": ["k25", *SMALL],
    "kimi-linear": ["kimi-linear", "--layers", "2", "--experts", "2"], "flat": ["k3", "--root", "model.", "--no-vision", *SMALL],
}  # fmt: skip
CONVERTED: dict[str, tuple[str, list[str]]] = {
    "native": ("source/k3", ["--vision", "keep"]),
    "decoded": ("source/k3", ["--experts", "bf16", "--vision", "keep", "--digest", "sha256"]),
    "back": ("converted/native", ["--to", "hf"]),
}
DRAFTS: dict[str, list[str]] = {
    "k3-dflash": [], "k3-dspark": ["block_size=7", "capture_stream=prefix"], "k3-dflash2": ["capture_stream=attn_res"],
    "k3-eagle3": ["capture_stream=prefix", "target_layer_ids=1,4,7"],
}  # fmt: skip
TARGET = ["k3", "--seed", "1", "--layers", "9", "--experts", "1", "--top-k", "1", "--no-vision"]


def make(folder: Path) -> Path:
    """Make all of them below `folder`; raises RuntimeError where the command line itself fails on sound input."""
    for name, options in SOURCES.items():
        _do("tiny", options[0], str(_below(folder / "source" / name)), *options[1:])
    for name, (source, options) in CONVERTED.items():
        _do("convert", str(folder / source), str(_below(folder / "converted" / name)), *options)
    _do("tiny", TARGET[0], str(folder / "target"), *TARGET[1:])
    (folder / "target" / "chat_template.jinja").write_text("{{ messages }}")
    for name, declared in DRAFTS.items():
        _do("tiny", name, str(_below(folder / "draft" / name)))
        _do("package", str(folder / "draft" / name), str(_below(folder / "package" / name)), *packaging(declared),
            "--target", str(folder / "target"))  # fmt: skip
    return folder


def packaging(declared: list[str]) -> list[str]:
    """The options with which a draft is packaged."""
    return ["--license", "mit", *(word for pair in declared for word in ("--declare", pair))]


def copied(base: Path, to: Path) -> Path:
    """A copy of a base for a trial."""
    return Path(shutil.copytree(base, to))


def _below(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _do(*args: str) -> None:
    code, _, err, trace = called([*args, "--json"])
    if code:
        raise RuntimeError(f"kconv {' '.join(args)} ended with {code}: {err}{trace}")
