"""What a draft gets silently wrong, found before it is packaged: tensors, contract, vocabulary maps, traps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kconv.adapters.drafts.adapter import DraftSource
from kconv.adapters.drafts.table import kinds_of_taps, rows_of, shape, sizes
from kconv.checkpoint.reading import Entry
from kconv.errors import BadData
from kconv.names import folded
from kconv.packaging.target_model import Target


def problems(source: DraftSource, target: Target, allow: set[str]) -> list[str]:
    """Everything that keeps a draft from being packaged for a target; `allow` accepts mask ids that mean something else."""
    config = source.config
    return [*tensor_problems(source), *contract_problems(config, target, allow), *map_problems(source)]


def native_names(source: DraftSource) -> dict[str, str]:
    """Name in the files -> native name, for every tensor that the config explains."""
    return {name: native for name, (native, _) in _expected(source).items()}


def _expected(source: DraftSource) -> dict[str, tuple[str, tuple[int, ...]]]:
    config, values = source.config, sizes(source.config)
    found = {}
    for row in rows_of(config):
        counts = {None: (0,), "layer": range(config["num_hidden_layers"]), "tap": range(kinds_of_taps(config))}[row.index]
        for index in counts:
            at = {"layer": index, "tap": index}
            found[source.name(row, source.layout).format_map(at)] = (row.name.format_map(at), shape(row.shape, values))
    return found


def tensor_problems(source: DraftSource) -> Iterator[str]:
    """Tensors missing, surplus or misshapen by the config's own account."""
    expected = {name: wanted for name, (_, wanted) in _expected(source).items()}
    there = source.checkpoint.entries
    yield from (f"missing: {line}" for line in folded([n for n in expected if n not in there]))
    yield from (f"not explained by the config: {line}" for line in folded([n for n in there if n not in expected]))
    for name in expected.keys() & there.keys():
        if there[name].spec.shape != expected[name]:
            yield f"{name} is {list(there[name].spec.shape)}, the config makes it {list(expected[name])}"


def contract_problems(config: Mapping[str, Any], target: Target, allow: set[str]) -> Iterator[str]:
    """What a runtime would guess or get wrong: block size, mask, taps, stream, head."""
    special = target.special_tokens()
    names = {key: f"mask-is-{key.removesuffix('_token_id').removesuffix('_id').replace('_', '-')}" for key in special.values()}
    if unknown := allow - set(names.values()):
        known = ", ".join(sorted(set(names.values()))) or "nothing"
        yield f"nothing called {', '.join(sorted(unknown))} can be allowed; here: {known}"
    if config["model_type"] != "eagle3":
        if config.get("block_size") is None:
            yield "no block_size: runtimes take 16, 8 or 4 for it; give it with --declare block_size=N"
        mask = config.get("mask_token_id")
        if mask is None:
            yield "no mask_token_id: runtimes take pad, 0 or vocab_size for it"
        elif mask in special and names[special[mask]] not in allow:
            yield f"mask_token_id {mask} is the target's {special[mask]}; if it was trained so, --allow {names[special[mask]]}"
        table = target.table("embed_tokens")
        if mask is not None and table and mask >= target.entry(table).spec.shape[0]:
            yield f"mask_token_id {mask} has no row in the target's embedding of {target.entry(table).spec.shape[0]} rows"
    if config.get("target_layer_ids") is None:
        yield "the tapped layers are not known; give them with --declare target_layer_ids=2,23,47 (0-based outputs)"
    if target.text.get("attn_res_block_size") and config.get("capture_stream") not in ("prefix", "attn_res"):
        yield "the target has attention residuals, the capture stream is not known: --declare capture_stream=prefix (or attn_res)"
    tied = target.text.get("tie_word_embeddings") or target.config.get("tie_word_embeddings")
    if not config.get("owns_lm_head") and target.table("lm_head") is None and not tied:
        yield "the draft has no lm_head, and neither has the target: nothing can be borrowed"


def map_problems(source: DraftSource) -> Iterator[str]:
    """Vocabulary maps that do not fit each other."""
    if not source.config.get("owns_vocab_maps"):
        return
    from kconv.transforms.base import SpecError
    from kconv.transforms.vocab import VocabularyMaps

    files, entries = source.checkpoint.files, source.checkpoint.entries
    d2t, t2d = (next((e for n, e in entries.items() if n.removeprefix("model.") == name), None) for name in ("d2t", "t2d"))
    if d2t is None or t2d is None:
        return
    transform = VocabularyMaps(source.config.get("draft_vocab_size") or source.config["vocab_size"], source.config["vocab_size"])
    try:
        transform.forward_specs((d2t.spec, t2d.spec))
        transform.forward([_tensor(files, e) for e in (d2t, t2d)])
    except (BadData, SpecError) as e:
        yield f"vocabulary maps: {e}"


def trap_notes(source: DraftSource, target: Target) -> list[str]:
    """What is right and still surprises."""
    notes, config = [], source.config
    block = target.text.get("attn_res_block_size")
    taps = config.get("target_layer_ids") or []
    if block and config.get("capture_stream") == "prefix":
        resets = [t for t in taps if t % block == 0]
        if resets:
            notes.append(
                f"taps {resets} with the prefix stream hold one layer's contribution: the sum starts anew every {block} layers"
            )
    if taps and taps[-1] == target.text.get("num_hidden_layers", 0) - 1:
        notes.append("the last layer is tapped: before the final norm by hooks, after it in Transformers' hidden_states")
    if list(taps) != sorted(taps):
        notes.append(f"taps {taps} are not in layer order; fc was trained on this order")
    dropped = [k for k in ("auto_map", "quantization_config") if k in source.original]
    return notes + [f"{key} of the source config is not carried over" for key in dropped]


def _tensor(files: Any, entry: Entry) -> Any:
    import torch

    from kconv.spec import torch_dtype

    data = bytearray(files.read(entry.file, entry.start, entry.spec.nbytes))
    return torch.frombuffer(data, dtype=torch_dtype(entry.spec.dtype)).reshape(entry.spec.shape)
