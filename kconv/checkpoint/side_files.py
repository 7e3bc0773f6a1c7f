"""The files beside the weights: they are copied byte for byte and never imported; what is odd about them is said.

| found | note |
|---|---|
| no tokenizer file at all | names the files that one of is expected |
| `chat_template.jinja`, `chat_template.json` and `tokenizer_config.json` hold different chat templates | names them |
| `tokenizer_config.json` or `preprocessor_config.json` names Python files that are not there | names them |
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kconv.checkpoint.reading import Checkpoint

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
PROCESSORS = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
MOST_BYTES = 16 << 20


def notes(checkpoint: Checkpoint) -> list[str]:
    """What to say of a checkpoint's side files; reads only the small ones named above."""
    names = set(checkpoint.files.names())
    found = []
    templates = {name: text for name in TEMPLATES if name in names and (text := _template(checkpoint, name))}
    if len(set(templates.values())) > 1:
        count = len(set(templates.values()))
        found.append(f"{count} different chat templates in {', '.join(templates)}: all are copied unchanged")
    for name in PROCESSORS:
        absent = absent_modules(_json(checkpoint, name).get("auto_map"), names) if name in names else {}
        found += [f"{name} names {', '.join(files)} for {key}, which is not there" for key, files in absent.items()]
    return found


def without_tokenizer(checkpoint: Checkpoint) -> list[str]:
    """A note when no tokenizer lies beside the weights of a model that has one of its own."""
    if set(checkpoint.files.names()) & set(TOKENIZERS):
        return []
    return [f"no tokenizer in the source ({', '.join(TOKENIZERS)}), so none goes along"]


def absent_modules(auto_map: Any, present: Iterable[str]) -> dict[str, list[str]]:
    """Keys of an `auto_map` whose Python files are not there, with those files; `repo--module.Class` is another repo's."""
    files, absent = set(present), {}
    for key, value in (auto_map if isinstance(auto_map, dict) else {}).items():
        classes = value if isinstance(value, list) else [value]
        modules = [c.split(".")[0] + ".py" for c in classes if isinstance(c, str) and "--" not in c]
        lacking = [m for m in modules if m not in files]
        if lacking:
            absent[key] = lacking
    return absent


def _template(checkpoint: Checkpoint, name: str) -> str:
    """The default chat template that a file holds, "" for none."""
    if name.endswith(".jinja"):
        return _text(checkpoint, name)
    held = _json(checkpoint, name).get("chat_template")
    if isinstance(held, list):
        held = next((t.get("template") for t in held if isinstance(t, dict) and t.get("name") == "default"), None)
    return held if isinstance(held, str) else ""


def _json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """A side file's JSON object; {} where it is none: the file is copied all the same."""
    try:
        value = json.loads(_text(checkpoint, name))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(checkpoint: Checkpoint, name: str) -> str:
    size = min(checkpoint.files.size(name), MOST_BYTES)
    return checkpoint.files.read(name, 0, size).decode("utf-8", "replace")
