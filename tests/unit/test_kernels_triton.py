from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_give_the_bits_of_plain_torch():
    """In another process, since Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/unit/triton_check.py")]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "every bit equal" in result.stdout
