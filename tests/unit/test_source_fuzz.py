"""Random damage to a checkpoint's files: read as it is, or refused in words; never another exception, never a crash."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kconv.checkpoint.reading import open_checkpoint
from kconv.errors import KconvError

WHOLE = save({"a.weight": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opened(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """The tensors of a folder, None when it is refused."""
    refusal: KconvError | None = None
    try:
        return {n: (e.spec.dtype, e.spec.shape) for n, e in open_checkpoint(folder).entries.items()}
    except KconvError as e:
        refusal = e
    assert refusal.hint
    return None


@QUICK
@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255))
def test_one_changed_byte(at: int, byte: int, tmp_path: Path) -> None:
    """What we read, the safetensors library reads too, and as the same tensors."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :])
    found = opened(tmp_path)
    if found is None:
        return
    with safe_open(path, "pt") as file:
        assert {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == {n: s for n, (_, s) in found.items()}  # noqa: SIM118


@QUICK
@given(length=st.integers(0, len(WHOLE) - 1))
def test_file_cut_anywhere(length: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WHOLE[:length])
    assert opened(tmp_path) is None


@QUICK
@given(entry=JSON)
def test_any_header_entry(entry: Any, tmp_path: Path) -> None:
    blob = json.dumps({"x": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(blob)) + blob + bytes(16))
    assert opened(tmp_path) is None


@QUICK
@given(dtype=st.sampled_from(["F32", "U8", "BF16", "F4", "I64", "X"]), shape=st.lists(st.integers(-3, 5), max_size=3),
       start=st.integers(-8, 24), end=st.integers(-8, 24))  # fmt: skip
def test_any_entry_of_the_right_form(dtype: str, shape: list[int], start: int, end: int, tmp_path: Path) -> None:
    """Nearly right entries: whatever we accept lies inside the file, and the library accepts it as well."""
    blob = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + bytes(16))
    found = opened(tmp_path)
    if found is not None:
        assert (start, end) == (0, 16)
        with safe_open(path, "pt") as file:
            assert list(file.keys()) == ["x"]


@QUICK
@given(index=JSON)
def test_any_index(index: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert opened(tmp_path) is None


@QUICK
@given(files=st.dictionaries(st.sampled_from(["a.weight", "b", "c"]), st.text(max_size=24) | st.just("model.safetensors")))
def test_any_weight_map(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    right = files == {"a.weight": "model.safetensors", "b": "model.safetensors"}
    assert (opened(tmp_path) is not None) == right


def test_bytes_after_the_last_tensor_are_refused_as_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE + bytes(100))
    assert opened(tmp_path) is None
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass
