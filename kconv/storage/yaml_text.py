"""YAML from outside: one mapping, each key once; whatever else the text does to the reader becomes a sentence.

| refused | said by PyYAML as |
|---|---|
| no YAML, a tag that makes Python objects | YAMLError |
| a date that is none (2026-13-45), a number out of range | ValueError, OverflowError |
| a mapping or a list as a key | TypeError |
| nested without end, aliases of aliases | RecursionError |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kconv.errors import KconvError
from kconv.text.printable import printable

MOST = 16 << 20


class Unique(yaml.SafeLoader):
    """YAML without duplicate keys."""


def _mapping(loader: Unique, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        name = loader.construct_object(key, deep=True)
        if name in seen:
            raise yaml.YAMLError(f"the key {printable(name)} is there twice")
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


Unique.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str, first_line: int = 1) -> Any:
    """The value of a YAML text; raises ValueError saying what is wrong, and in which line where that is known."""
    try:
        return yaml.load(text, Loader=Unique)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f" at line {mark.line + first_line}" if mark else ""
        raise ValueError(f"not valid YAML{where}: {printable(getattr(e, 'problem', None) or e)}") from None
    except RecursionError:
        raise ValueError("not valid YAML: it is nested without end") from None
    except (ValueError, TypeError, OverflowError, AttributeError) as e:
        raise ValueError(f"not valid YAML: {printable(e)}") from None


def read_path(path: Path, what: str, *, hint: str) -> dict[str, Any]:
    """The mapping in a YAML file; raises KconvError where it cannot be read, is too large, or is none."""
    try:
        if path.stat().st_size > MOST:
            raise KconvError(f"{what} {path} is larger than {MOST:,} bytes", hint=hint)
        data = parse(path.read_bytes().decode("utf-8"))
    except OSError as e:
        raise KconvError(f"cannot read {what} {path}: {e.strerror}", hint=hint) from e
    except ValueError as e:
        raise KconvError(f"{what} {path} is {e}", hint=hint) from None
    if not isinstance(data, dict):
        raise KconvError(f"{what} {path} is no mapping of names to values", hint=hint)
    return data
