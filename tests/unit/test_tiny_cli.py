from __future__ import annotations

import json

from click.testing import CliRunner

from kconv.cli import cli
from tests.reading import json_of, weight_map


def run(*args: str):
    return CliRunner().invoke(cli, ["tiny", *args])


def test_makes_a_checkpoint_and_says_what(tmp_path):
    out = str(tmp_path / "out")
    result = run("k3", out, "--layers", "3", "--mla-layers", "2-3", "--no-vision", "--plain-experts", "--seed", "4", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    files = weight_map(tmp_path / "out")
    assert data["family"] == "k3"
    assert data["seed"] == 4
    assert data["tensors"] == len(files)
    assert data["shards"] == 4
    assert data["bytes"] == json_of(tmp_path / "out" / "model.safetensors.index.json")["metadata"]["total_size"]
    config = json_of(tmp_path / "out" / "config.json")["text_config"]
    assert config["linear_attn_config"]["full_attn_layers"] == [2, 3]
    assert not [n for n in files if "vision" in n or "_packed" in n]


def test_people_read_what_was_made(tmp_path):
    result = run("kimi-linear", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "Kimi-Linear" in result.output
    assert "kconv inspect" in result.output


def test_help_lists_families_and_their_options():
    assert {"k3", "kimi-linear"} <= set(run("--help").output.split())
    said = run("k3", "--help").output
    assert all(option in said for option in ("--full-size", "--split-experts", "--expert-counts", "--no-vision", "[default: 9]"))
    assert "--full-size" not in run("kimi-linear", "--help").output


def test_bad_usage_is_two_and_writes_nothing(tmp_path):
    out = str(tmp_path / "out")
    for args in (("k4",), ("k3", "--layers", "0"), ("k3", "--mla-layers", "four"), ("k3", "--expert-width", "5")):
        result = run(*args, out)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
    assert "5 is no multiple of 32" in result.stderr
    assert list(tmp_path.iterdir()) == []
    as_json = run("k3", out, "--top-k", "9", "--json")
    error = json.loads(as_json.stdout)["error"]
    assert error["exit_code"] == as_json.exit_code == 2
    assert error["problems"] == ["top_k 9 exceeds the 8 experts that a token can reach"]
