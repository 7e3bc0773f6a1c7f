"""Loading that leaves no hole: a missing, unexpected or misshapen tensor is an error, never a log line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kconv.errors import Problems
from kconv.modeling.frozen import refreeze
from kconv.names import folded


class StrictPreTrainedModel(PreTrainedModel):
    """A PreTrainedModel whose `from_pretrained` raises `Problems` unless the files hold exactly its tensors."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Any:
        """Load like Transformers does, then compare the tensor names; `output_loading_info=True` is honoured.

        `strict=False` initialises what is missing, as Transformers does: a new head on a bare model, say.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        if not kwargs.pop("strict", True):
            found: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
            refreeze(found[0])
            return found if wants_info else found[0]
        kwargs.setdefault("ignore_mismatched_sizes", True)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        refreeze(model)
        lines = [f"missing from the files: {line}" for line in folded(sorted(info["missing_keys"]))]
        lines += [f"in the files, but not in the model: {line}" for line in folded(sorted(info["unexpected_keys"]))]
        for name, found, wanted in info["mismatched_keys"]:
            lines.append(f"{name} is {list(found)} in the files, the config asks for {list(wanted)}")
        if lines:
            raise Problems(
                f"{pretrained_model_name_or_path} does not hold a {cls.__name__}:", lines,
                hint="a published checkpoint is converted first: kconv convert SOURCE OUT; strict=False makes up what is missing",
            )  # fmt: skip
        return (model, info) if wants_info else model

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Transformers' last step of `push_to_hub`; the manifest that `kconv publish` and `check` read goes along."""
        from kconv.checkpoint.manifest import write_saved

        write_saved(Path(working_dir), str(self.config.model_type))
        return super()._upload_modified_files(working_dir, *args, **kwargs)
