"""What other programs and people may rely on of every command: help, exit codes, JSON, progress, interruption.

| exit code | shown here by |
|---|---|
| 0 | a conversion, a plan, a comparison of equal files |
| 1 | a comparison of different files, a grade that is not reached |
| 2 | usage errors and bad input |
| 3 | a full disk |
| 130 | an interrupt, before and during the work; the run can be resumed |
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import kconv
from kconv.cli import COMMANDS, cli
from tests.builders import EXPERTS, expert, small_k3
from tests.cli.refusing import done, error_of, run

PLAN_KEYS = {"source_tensors", "claimed", "unclaimed", "dropped", "target_tensors", "output_bytes", "peak_bytes", "grade",
             "plan_digest"}  # fmt: skip
CONVERT_KEYS = PLAN_KEYS | {"seconds", "bytes_read", "bytes_written", "resumed_slabs"}
VERIFY_KEYS = {"compared", "different", "missing", "extra"}
COUNTS = {"source_tensors", "claimed", "dropped", "target_tensors", "output_bytes", "peak_bytes", "bytes_read", "bytes_written",
          "resumed_slabs", "compared", "different"}  # fmt: skip


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return small_k3().write(tmp_path / "src")


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def leaves(name: str) -> list[click.Command]:
    """A command, or a group's own commands."""
    found = command(name)
    return list(found.commands.values()) if isinstance(found, click.Group) else [found]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_would_take(name: str) -> None:
    for leaf in leaves(name):
        text = CliRunner().invoke(cli, [name, *([leaf.name or ""] if leaf is not command(name) else []), "--help"]).output
        assert "Example:" in text
        example = (leaf.epilog or "").split("Example:")[1].replace("\\\n", " ").strip().splitlines()[0]
        words = shlex.split(example)
        assert words[0] == "kconv"
        assert words[1] == name
        arguments = words[2:] if leaf is command(name) else words[3:]
        context = click.Context(leaf, info_name=name)
        _, rest, _ = leaf.make_parser(context).parse_args(list(arguments))
        assert rest == [], f"{example}: {rest} are left over"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_json_and_says_what_each_option_does(name: str) -> None:
    for leaf in leaves(name):
        assert "--json" in [o for p in leaf.params for o in p.opts]
        assert all(p.help for p in leaf.params if isinstance(p, click.Option)), leaf.name
        assert leaf.help


def test_help_of_the_whole_names_every_command() -> None:
    text = run("--help").output
    assert all(f"\n  {name} " in text for name in COMMANDS)


def test_keys_that_programs_rely_on(src: Path, tmp_path: Path) -> None:
    made = {
        "plan": (done("plan", src), PLAN_KEYS),
        "convert": (done("convert", src, tmp_path / "out"), CONVERT_KEYS),
        "verify": (done("verify", tmp_path / "out", "--source", src), VERIFY_KEYS),
    }
    for name, (data, keys) in made.items():
        assert keys <= set(data), name
        assert all(type(data[k]) is int for k in COUNTS & keys), name
        assert all(isinstance(data[k], list) for k in ("unclaimed", "missing", "extra") if k in data), name
    assert made["plan"][0]["plan_digest"] == made["convert"][0]["plan_digest"]
    assert made["convert"][0]["target_tensors"] == made["plan"][0]["target_tensors"]


def test_stdout_is_one_json_object_and_nothing_else(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    commands: list[list[str | Path]] = [["plan", src], ["inspect", src], ["convert", src, out], ["verify", out, "--source", src]]
    for argv in commands:
        result = run(*argv, "--json")
        assert result.exit_code == 0
        assert len(result.stdout.splitlines()) == 1
        assert isinstance(json.loads(result.stdout), dict)


def test_python_returns_what_json_prints(src: Path, tmp_path: Path) -> None:
    printed = done("convert", src, tmp_path / "a")
    returned = kconv.convert(src, tmp_path / "b").to_json()
    for data in (printed, returned):
        data.pop("seconds")
    assert json.loads(json.dumps(returned)) == printed


@pytest.mark.parametrize("argv", [
    ["plan"], ["convert", "a"], ["bogus"], ["plan", "a", "--bogus"], ["plan", "a", "b"], ["plan", "a", "--to", "gguf"],
    ["verify", "/nowhere", "--source", "x"], ["plan", "/nowhere"], ["inspect", "/nowhere"], ["convert", "hf://x", "out"],
])  # fmt: skip
def test_usage_and_bad_input_exit_with_2_and_say_so_as_json(argv: list[str]) -> None:
    assert error_of(run(*argv, "--json"), 2)
    plain = run(*argv)
    assert plain.exit_code == 2
    assert plain.stdout == ""
    assert "rror: " in plain.stderr


def test_difference_exits_with_1(src: Path, tmp_path: Path) -> None:
    done("convert", src, tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    with open(shard, "r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 1]))
    result = run("verify", tmp_path / "out", "--source", src, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["different"] == 1
    assert run("verify", tmp_path / "out", "--source", src).exit_code == 1


def test_disk_that_fills_up_exits_with_3(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    assert "No space left on device" in error_of(run("convert", src, tmp_path / "out", "--json"), 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv", [["plan"], ["inspect"]])
def test_interrupt_of_a_command_that_cannot_be_resumed(argv: list[str], src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", interrupted)
    assert error_of(run(*argv, src, "--json"), 130) == "interrupted"


def large_source(folder: Path) -> Path:
    """About 100 MB of experts, so that an interrupt comes in the middle."""
    draft = small_k3()
    rows = 12_288
    draft.text["moe_intermediate_size"] = rows
    for layer in (1, 2, 3):
        shared = f"language_model.model.layers.{layer}.block_sparse_moe.shared_experts."
        for part, shape in {"gate_proj": (2 * rows, 128), "up_proj": (2 * rows, 128), "down_proj": (128, 2 * rows)}.items():
            draft.tensors[f"{shared}{part}.weight"] = torch.ones(shape, dtype=torch.bfloat16)
        for e in range(EXPERTS):
            for part, shape in {"w1": (rows, 32), "w3": (rows, 32), "w2": (64, rows // 2)}.items():
                draft.tensors[expert(layer, e, f"{part}.weight_packed")] = torch.full(shape, 0x21, dtype=torch.uint8)
                scale = torch.full((shape[0], shape[1] // 16), 127, dtype=torch.uint8)
                draft.tensors[expert(layer, e, f"{part}.weight_scale")] = scale
    return draft.write(folder)


def start(*argv: str | Path, stderr: int | object = subprocess.PIPE) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "kconv", *map(str, argv)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_exits_with_130_and_resume_gives_the_same_bytes(tmp_path: Path, number: signal.Signals) -> None:
    src = large_source(tmp_path / "src")
    args = (src, tmp_path / "out", "--experts", "bf16", "--workers", "1", "--json")
    process = start("convert", *args)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("convert: 0 B of"):
            break
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out)["error"]["message"] == "interrupted; run the same command with --resume to go on"
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial").is_dir()
    done("convert", *args[:-1], "--resume")
    done("convert", src, tmp_path / "whole", "--experts", "bf16")
    for path in (tmp_path / "whole").glob("*.safetensors*"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_first_line_within_a_second_and_no_carriage_returns(src: Path, tmp_path: Path) -> None:
    """A file on stderr gets plain lines; the first comes before anything slow is imported."""
    log = tmp_path / "log"
    started = time.monotonic()
    with open(log, "w") as handle:
        process = start("convert", src, tmp_path / "out", "--experts", "bf16", stderr=handle)
        while not log.stat().st_size and process.poll() is None:
            time.sleep(0.01)
        first = time.monotonic() - started
        process.communicate(timeout=60)
    assert process.returncode == 0
    lines = log.read_text().splitlines()
    assert lines[0] == f"convert: reading the headers of {src}"
    assert lines[1].startswith("convert: 0 B of ")
    assert "\r" not in log.read_text()
    assert "\x1b" not in log.read_text()
    assert first < 1.0 or os.getloadavg()[0] > (os.cpu_count() or 1), f"first line after {first:.1f} s"


def test_plain_lines_keep_coming(tmp_path: Path) -> None:
    """A run that is stopped for longer than the interval says where it is as soon as it goes on."""
    src = large_source(tmp_path / "src")
    process = start("convert", src, tmp_path / "out", "--experts", "bf16", "--workers", "1")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("convert: 0 B of"):
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5.2)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    later = [line for line in err.splitlines() if line.startswith("convert: ") and " left, memory " in line]
    assert later, err
    assert "/s, " in later[0]


def test_help_of_the_whole_is_quick_and_imports_no_torch() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from kconv.cli import cli;"
        "CliRunner().invoke(cli, ['--help']);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'numba') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_closed_pipe_is_no_traceback(src: Path) -> None:
    process = start("plan", src)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
