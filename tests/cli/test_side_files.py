"""The files beside the weights go along byte for byte, none of them is run, and what is odd about them is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import Draft, small_k3
from tests.cli.refusing import done

POISON = b"raise SystemExit('a file of the checkpoint was imported')\n"
FILES: dict[str, bytes] = {
    "tiktoken.model": b"IQ== 0\nIg== 1\n",
    "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}',
    "tokenization_kimi.py": b"from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode\n" + POISON,
    "encoding_k3.py": POISON,
    "configuration_kimi_k3.py": POISON,
    "modeling_kimi_k3.py": POISON,
    "modeling_kimi_linear.py": POISON,
    "generation_config.json": b'{"do_sample":false,  "temperature":1e-6}',
    "chat_template.jinja": b"{{ messages }}\r\n",
    "LICENSE": "Grüße\n".encode("latin-1"),
    "assets/figure.png": bytes(range(256)),
    "empty.txt": b"",
}
TARGETS = ("native", "hf-text", "hf")


def with_files(**more: bytes) -> Draft:
    draft = small_k3()
    draft.side = FILES | {name.replace("__", "."): data for name, data in more.items()}
    return draft


@pytest.mark.parametrize("target", TARGETS)
def test_all_files_go_along_byte_for_byte(target: str, tmp_path: Path) -> None:
    result = done("convert", with_files().write(tmp_path / "src"), tmp_path / "out", "--to", target)
    for name, data in FILES.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    assert not any(name in note for name in FILES for note in result["notes"])
    manifest = json.loads((tmp_path / "out" / "kconv.json").read_text())
    assert set(FILES) < set(manifest["files"])


def test_files_survive_the_way_there_and_back(tmp_path: Path) -> None:
    src = with_files().write(tmp_path / "src")
    done("convert", src, tmp_path / "native")
    done("convert", tmp_path / "native", tmp_path / "back", "--to", "hf")
    for name, data in FILES.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((src / "config.json").read_text())


COMMANDS = (
    ["plan", "src"], ["inspect", "src"], ["convert", "src", "out"], ["verify", "out", "--source", "src"],
    ["convert", "out", "back", "--to", "hf"],
)  # fmt: skip


def test_no_python_file_of_a_checkpoint_is_imported(tmp_path: Path) -> None:
    """In fresh processes, with the checkpoint as the working folder's neighbour and first on the module path."""
    with_files(transformers__py=POISON, torch__py=POISON, kconv__py=POISON).write(tmp_path / "src")
    script = "import runpy, sys; sys.path.append('src'); runpy.run_module('kconv', run_name='__main__', alter_sys=True)"
    for argv in COMMANDS:
        result = subprocess.run([sys.executable, "-P", "-c", script, *argv], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, (argv, result.stderr)
        assert "was imported" not in result.stdout + result.stderr
    assert not list(tmp_path.rglob("__pycache__"))


def test_absent_tokenizer_is_a_note_not_an_error(tmp_path: Path) -> None:
    result = done("convert", small_k3().write(tmp_path / "src"), tmp_path / "out")
    assert any(n.startswith("no tokenizer in the source (tokenizer.json, tokenizer.model,") for n in result["notes"])


def test_tiktoken_alone_is_a_tokenizer(tmp_path: Path) -> None:
    assert not any("tokenizer" in n for n in done("plan", with_files().write(tmp_path / "src"))["notes"])


def test_two_chat_templates_are_copied_and_reported(tmp_path: Path) -> None:
    files = {"chat_template__jinja": b"A", "tokenizer_config__json": b'{"chat_template": "B"}'}
    result = done("convert", with_files(**files).write(tmp_path / "src"), tmp_path / "out")
    assert "2 different chat templates in chat_template.jinja, tokenizer_config.json: all are copied unchanged" in result["notes"]
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == b"A"
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == b'{"chat_template": "B"}'


@pytest.mark.parametrize("config", [
    b'{"chat_template": "A"}', b'{"chat_template": [{"name": "default", "template": "A"}, {"name": "tools", "template": "B"}]}',
    b'{"chat_template": null}', b"{}", b"not json", b"[" * 100_000, b"\xff",
])  # fmt: skip
def test_templates_that_do_not_conflict(config: bytes, tmp_path: Path) -> None:
    src = with_files(chat_template__jinja=b"A", tokenizer_config__json=config).write(tmp_path / "src")
    assert not any("template" in n for n in done("convert", src, tmp_path / "out")["notes"])
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == config


def without(*names: str) -> Draft:
    draft = with_files()
    for name in names:
        del draft.side[name]
    return draft


@pytest.mark.parametrize("target", ["native", "hf-text"])
def test_auto_map_of_files_that_are_not_there_is_removed_and_reported(target: str, tmp_path: Path) -> None:
    src = without("modeling_kimi_linear.py").write(tmp_path / "src")
    result = done("convert", src, tmp_path / "out", "--to", target)
    assert "auto_map entries removed (AutoModel, AutoModelForCausalLM): modeling_kimi_linear.py not there" in result["notes"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {} if target == "native" else {"AutoConfig": "configuration_kimi_k3.KimiLinearConfig"}
    assert config.get("auto_map", {}) == kept


def test_auto_map_is_dropped_whole_when_nothing_of_it_is_there(tmp_path: Path) -> None:
    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "out", "--to", "hf-text")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_auto_map_is_restored_word_for_word_in_the_published_layout(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    done("convert", src, tmp_path / "native")
    done("convert", tmp_path / "native", tmp_path / "back", "--to", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == small_k3().config


def test_auto_map_of_another_repository_is_kept(tmp_path: Path) -> None:
    draft = small_k3()
    remote = {"AutoConfig": "moonshotai/Kimi-K3--configuration_kimi_k3.KimiLinearConfig"}
    draft.text["auto_map"] = remote | {"AutoModel": "gone.Model"}
    done("convert", draft.write(tmp_path / "src"), tmp_path / "out", "--to", "hf-text")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == remote


def test_tokenizer_code_that_is_not_there_is_reported(tmp_path: Path) -> None:
    notes = done("plan", without("tokenization_kimi.py").write(tmp_path / "src"))["notes"]
    assert "tokenizer_config.json names tokenization_kimi.py for AutoTokenizer, which is not there" in notes
