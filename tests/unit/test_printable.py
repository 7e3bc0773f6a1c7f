"""Text from outside never reaches a terminal as commands."""

from __future__ import annotations

import pytest

from kconv.text.printable import hidden, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("naïve 権重", "naïve 権重"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\nb\r\tc\0", "a\\nb\\r\\tc\\x00"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("x\udcffy", "x\\udcffy"),
        ("gnp.\u202egpj\u2028", "gnp.\\u202egpj\\u2028"),
    ],
)
def test_what_a_terminal_obeys_or_cannot_show_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode("utf-8")


@pytest.mark.parametrize("texts", [["a", "é\u202eb", "c"], ["é", "ü"], ["a\n", "b", "\ud800"], []])
def test_hidden_texts_are_those_that_are_shown_otherwise(texts: list[str]) -> None:
    assert hidden(iter(texts)) == [text for text in texts if printable(text) != text]
