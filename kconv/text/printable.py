"""Text from outside (tensor names, file names, answers of servers) as it may be shown on a terminal or in a log.

| in the text | shown as |
|---|---|
| control characters (ESC, newline, NUL, C1, DEL), line and paragraph separators | `\\x1b`, `\\n`, `\\x9b`, `\\u2028` |
| characters that reorder or hide what follows (bidirectional overrides, zero-width marks) | `\\u202e` |
| lone surrogates, which no encoding can write | `\\udcff` |
| everything else | itself |
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: object) -> str:
    """`str(text)` on one line, without a character that a terminal obeys or cannot show."""
    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    return "".join(_escaped(c) if unicodedata.category(c) in HIDDEN else c for c in said)


def hidden(texts: Iterable[str]) -> list[str]:
    """Those texts that `printable` does not leave as they are."""
    held = list(texts)
    together = "".join(held)  # half a million names are looked at in one step
    if together.isascii() and together.isprintable():
        return []
    return [text for text in held if printable(text) != text]


def shown(text: object) -> str:
    """`str(text)` with its own line breaks, every line of it `printable`."""
    return "\n".join(map(printable, str(text).split("\n")))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
