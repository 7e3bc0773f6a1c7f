"""What published configs of every family have in common: keys to leave out, quantisation blocks and the names in them."""

from __future__ import annotations

import copy
import re
from typing import Any

from kconv.errors import KconvError

Config = dict[str, Any]
# Generation and encoder-decoder defaults that old releases of Transformers wrote into every config.
GENERATION_DEFAULTS = frozenset({
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "prefix", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16", "_name_or_path",
    "transformers_version", "torch_dtype",
})  # fmt: skip
HINT = "give the checkpoint's own config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def quantization(config: Config, notes: list[str]) -> Config | None:
    """The quantisation block that counts: top level before `text_config`; a stale nested one is reported."""
    top, text = config.get("quantization_config"), config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    for block in (top, nested):
        if block is not None and not isinstance(block, dict):
            raise KconvError("config.json: quantization_config is no object", hint=HINT)
    if top and nested and top != nested:
        notes.append("config.json has two quantisation blocks; the top-level one counts, the one in text_config is stale")
    return top or nested


NAMING_LISTS = frozenset({"ignore", "targets", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers"})
NAMING_MAPS = frozenset({"quantized_layers", "layer_quant_config"})


def without_prefix(block: Config, prefix: str) -> Config:
    """A quantisation block whose module names, and expressions that begin with it, lost `prefix`; vision entries removed."""
    result: Config = {}
    for key, value in block.items():
        if key in NAMING_LISTS and isinstance(value, list):
            result[key] = [_without_prefix(n, prefix) for n in map(str, value) if not _is_vision(n)]
        elif key in NAMING_MAPS and isinstance(value, dict):
            result[key] = {_without_prefix(n, prefix): copy.deepcopy(v) for n, v in value.items() if not _is_vision(n)}
        else:
            result[key] = without_prefix(value, prefix) if isinstance(value, dict) else copy.deepcopy(value)
    return result


def _is_vision(name: str) -> bool:
    return "vision_tower" in name or "mm_projector" in name


def _without_prefix(name: str, prefix: str) -> str:
    """A module name or `re:` expression without the prefix; an expression may anchor it and escape its dots."""
    if not name.startswith("re:") or not prefix:
        return name.removeprefix(prefix)
    start = re.compile("(\\^?)" + re.escape(prefix).replace("\\.", r"\\?\."))
    return "re:" + start.sub(r"\1", name.removeprefix("re:"), count=1) if start.match(name[3:]) else name
