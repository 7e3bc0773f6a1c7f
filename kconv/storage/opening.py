"""Opening what a user names as a source: a folder, a file, or a repository on the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kconv.errors import KconvError, Unreadable
from kconv.storage.files import Files, LocalFiles


def open_files(source: str | os.PathLike[str]) -> Files:
    """The files of SOURCE: a folder, one `.safetensors` file, or `hf://owner/name[@revision]`."""
    text = str(source)
    if not text:
        raise KconvError("the source is an empty name", hint="give a folder, a .safetensors file, or hf://owner/name")
    if text.startswith("hf://"):
        from kconv.storage.hub import open_hub

        return open_hub(text)
    path = Path(source)
    try:
        there, is_file = path.exists(), path.is_file()
    except OSError as e:
        raise Unreadable(text, e) from e
    if not there:
        owner_name = re.fullmatch(r"[\w.-]+/[\w.-]+", text)
        on_hub = f"; hf://{text} for the one on the Hub" if owner_name else ", or hf://owner/name"
        raise KconvError(f"{text}: no such file or folder", hint="give a folder or a .safetensors file" + on_hub)
    if is_file and path.suffix != ".safetensors":
        raise KconvError(f"{text} is not a .safetensors file", hint="pickle files are never opened; convert them first")
    return LocalFiles(path)
