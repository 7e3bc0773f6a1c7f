"""Golden files: what a reference computed, as `capture_script` writes it (its docstring has the table of entries).

Entries are read when they are asked for. Files without kconv's metadata (made by hand or by other scripts) are read too: the
answers of one that also holds `logits_fp32` are taken to be of float64 precision, of any other to be of fp32.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kconv.errors import KconvError
from kconv.parity.capture_script import FORMAT, SHORT

NEEDED = ("input_ids", "logits")


class Golden:
    """A golden file, opened."""

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        self.path = Path(path)
        try:
            self._file = safe_open(str(self.path), framework="pt")
        except Exception as e:
            raise KconvError(f"cannot read the golden file {path}: {e}", hint="make one with `kconv capture REF OUT`") from e
        self.names = set(self._file.keys())
        missing = [n for n in NEEDED if n not in self.names]
        if missing:
            raise KconvError(
                f"{path} is no golden file: it holds no {' and no '.join(missing)}",
                hint="give a file that `kconv capture REF OUT` wrote, or a checkpoint",
            )
        self.meta: dict[str, Any] = json.loads((self._file.metadata() or {}).get("kconv_golden", "{}"))
        if self.meta.get("format", FORMAT) > FORMAT:
            raise KconvError(f"{path} has format {self.meta['format']}, this kconv reads up to {FORMAT}", hint="upgrade kconv")
        self._check_shapes()

    def _check_shapes(self) -> None:
        ids, logits = self.shape("input_ids"), self.shape("logits")
        if len(ids) != 2 or len(logits) != 3 or ids != logits[:2] or 0 in ids:
            raise KconvError(f"{self.path}: input_ids {ids} and logits {logits} are not [B, T] and [B, T, vocab] of tokens")
        for name in self.names:
            if name.startswith(("hidden_states.", "modules.", "routing.")) and self.shape(name)[:2] != ids:
                raise KconvError(f"{self.path}: {name} {self.shape(name)} does not fit input_ids {ids}")

    def shape(self, name: str) -> list[int]:
        """Shape of an entry."""
        return list(self._file.get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor | None:
        """An entry, or None."""
        return self._file.get_tensor(name) if name in self.names else None

    @cached_property
    def ids(self) -> torch.Tensor:
        """[B, T] token ids."""
        return self._file.get_tensor("input_ids").long()

    @cached_property
    def mask(self) -> torch.Tensor:
        """[B, T] attention mask; all ones where the file has none."""
        found = self.get("attention_mask")
        return torch.ones_like(self.ids) if found is None else found.long()

    @property
    def logits(self) -> torch.Tensor:
        """[B, T, vocab] of the run in full precision, without a mask."""
        return self._file.get_tensor("logits")

    @property
    def dtype(self) -> str:
        """The precision that the answers carry."""
        return self.meta.get("dtype", "float64" if "logits_fp32" in self.names else "float32")

    @property
    def reference(self) -> str:
        """What computed the answers, for people."""
        if not self.meta:
            return f"{self.path.parent.name}/{self.path.name}"
        m = self.meta
        return f"{m['reference']} of {m['source']} in {m['dtype']} ({m['operators']} operators, {m['device']})"

    @property
    def sketch(self) -> int:
        """Projections that each module output was reduced to; 0 when they are stored whole."""
        return int(self.meta.get("sketch") or 0)

    @cached_property
    def points(self) -> list[str]:
        """Names of the recorded module outputs, in order of execution; empty when the file holds none."""
        held = {n.removeprefix("modules.") for n in self.names if n.startswith("modules.")}
        order = [p for p in self.meta.get("points", []) if p in held]
        return order + sorted(held - set(order))

    def point(self, name: str) -> torch.Tensor:
        """[tokens, width or k] of one recorded module output."""
        return self._file.get_tensor(f"modules.{name}").flatten(0, 1)

    @property
    def layers(self) -> int:
        """Number of decoder layers whose hidden states are recorded; 0 when none are."""
        count = sum(n.startswith("hidden_states.") for n in self.names)
        return max(count - 1, 0)

    def hidden(self, i: int) -> torch.Tensor | None:
        """[B, T, hidden]: the embedding (0), the output of layer i - 1, or for the last one the final norm's output."""
        return self.get(f"hidden_states.{i}")

    @cached_property
    def routing(self) -> dict[int, torch.Tensor]:
        """Layer -> the experts chosen, [tokens, top_k] int64 in ascending order."""
        found = [n.split(".")[1] for n in self.names if n.startswith("routing.") and n.endswith(".experts")]
        return {int(i): self._file.get_tensor(f"routing.{i}.experts").long().flatten(0, 1).sort(-1).values for i in found}

    def weights(self, layer: int) -> torch.Tensor | None:
        """The chosen experts' weights, [tokens, top_k], in ascending order of the experts."""
        ids, weights = self.get(f"routing.{layer}.experts"), self.get(f"routing.{layer}.weights")
        if ids is None or weights is None:
            return None
        return weights.flatten(0, 1).gather(-1, ids.long().flatten(0, 1).sort(-1).indices)

    def run_in(self, dtype: str) -> torch.Tensor | None:
        """Logits of the reference's own run in a lower precision, when it was captured too."""
        return self.get(f"logits_{SHORT[dtype]}")
