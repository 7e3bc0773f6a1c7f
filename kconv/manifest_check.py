"""Is a `kconv.json` of the form that kconv writes: checked once where it is read, so that nobody else has to doubt it.

| key, where it is there | must be |
|---|---|
| source, source.config, facts, options, files | objects |
| plan_digest, from, to | texts |
| files.* | objects with a size |
| options.* | options that a conversion has |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kconv.errors import KconvError

KINDS: dict[tuple[str, ...], type] = {
    ("source",): dict, ("source", "config"): dict, ("facts",): dict, ("options",): dict, ("files",): dict,
    ("plan_digest",): str, ("from",): str, ("to",): str,
}  # fmt: skip
WORDS: dict[type, str] = {dict: "an object", str: "a text"}


def checked(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    """The manifest itself; raises KconvError where it is not as kconv writes it."""
    wrong = next(_wrong(manifest), None)
    if wrong:
        raise KconvError(
            f"{where} is not as kconv wrote it: {wrong}",
            hint="copy kconv.json again from the conversion, or remove it if it is another program's",
        )
    return manifest


def _wrong(manifest: dict[str, Any]) -> Iterator[str]:
    from dataclasses import fields

    from kconv.adapters import Options

    for path, kind in KINDS.items():
        value: Any = manifest
        for key in path:
            value = value.get(key, kind())
        if not isinstance(value, kind):
            yield f"{'.'.join(path)} is {value!r}, expected {WORDS[kind]}"
            return
    for name, known in manifest.get("files", {}).items():
        if not isinstance(known, dict) or type(known.get("size")) is not int:
            yield f"files.{name} has no size"
    options = manifest.get("options", {})
    unknown = sorted(set(options) - {f.name for f in fields(Options)})
    if unknown or not ("options" not in manifest or isinstance(options.get("to"), str)):
        yield f"options are {', '.join(unknown) or 'without a target'}, which no conversion has"
