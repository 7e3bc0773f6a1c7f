"""Draft checkpoints: the published layouts and the native one, joined by one table (`table`, `naming`, `reading`).

| direction | tensors | config.json |
|---|---|---|
| published -> native | the same bytes under native names | one meaning a key; what is unsaid is written out or left open |
| native -> published | back under the names the file had | the source's own, word for word, from the manifest |
| native without a manifest -> published | native names, which trainers use too | written for runtimes (`writing`) |

Every tensor is claimed: a tensor that the config does not explain (another head, a stale key) is an error, as is a missing one.
Copies of the target's embedding and head are kept: whether they equal the target's is a question for `kconv check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kconv.adapters.drafts.dialects import dialect_of
from kconv.adapters.drafts.naming import published_name, traits_of
from kconv.adapters.drafts.reading import Reading, declare, read_draft_config
from kconv.adapters.drafts.table import FAMILIES, Row, kinds_of_taps, rows_of, shape, sizes
from kconv.adapters.drafts.value_types import complete
from kconv.adapters.drafts.writing import serving_config
from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.options import Options
from kconv.planning.edges import Layouts
from kconv.planning.rules import Rule, rule
from kconv.spec import FLOATS, Spec, dtype_name
from kconv.transforms.base import Same, Transform
from kconv.transforms.dtype import Cast
from kconv.transforms.vocab import VocabularyMaps

if TYPE_CHECKING:
    from kconv.modeling.drafts.config import DraftConfig

NATIVE, PUBLISHED = "native", "hf"


def is_draft(config: dict[str, Any]) -> bool:
    """Whether a config.json, published or native, is a draft's."""
    return config.get("model_type") in FAMILIES or dialect_of(config) is not None


@dataclass
class DraftSource:
    """A draft checkpoint as its config, names and manifest describe it."""

    checkpoint: Checkpoint
    layout: str
    config: dict[str, Any]
    original: dict[str, Any]
    traits: list[str]
    notes: list[str]
    problems: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """What the way back needs: the dialect and the naming of the tensors."""
        return {"dialect": self.config.get("dialect"), "spelling": self.traits}

    def name(self, row: Row, layout: str) -> str:
        """The name template of a row in a layout."""
        return row.name if layout == NATIVE else published_name(row.name, self.traits)


def read_source(checkpoint: Checkpoint, declared: Mapping[str, Any] | None = None) -> DraftSource:
    """Read a draft checkpoint; raises KconvError where it is none, collects smaller problems.

    `declared` gives values that its config leaves open (`reading.DECLARABLE`).
    """
    notes = list(checkpoint.notes)
    if checkpoint.config.get("model_type") in FAMILIES:
        manifest = checkpoint.manifest or {}
        original = manifest.get("source", {}).get("config") or {}
        traits = list((manifest.get("facts") or {}).get("spelling") or [])
        config = complete(declare(checkpoint.config, declared or {}))
        source = DraftSource(checkpoint, NATIVE, config, original, traits, notes)
        if not original:
            notes.append("no kconv.json: --to hf writes its config for runtimes, and native names")
    else:
        reading: Reading = read_draft_config(checkpoint.config, checkpoint.entries, declared)
        traits = traits_of(checkpoint.entries)
        source = DraftSource(checkpoint, PUBLISHED, reading.config, checkpoint.config, traits, notes + reading.notes)
    _validate(source)
    return source


def layouts(checkpoint: Checkpoint, options: Options, declared: Mapping[str, Any] | None = None) -> Layouts:
    """The table from a draft's layout to the one `options.to` names."""
    source = read_source(checkpoint, declared)
    _refuse_unused(options)
    if options.to not in (NATIVE, PUBLISHED):
        said = f"--to {options.to}: a draft has no such form"
        raise KconvError(said, hint="use --to hf for the layout it was published in")
    backward = source.layout == NATIVE and options.to != NATIVE
    left, right = (options.to, source.layout) if backward else (source.layout, options.to)
    return Layouts(
        family=f"draft ({source.config['model_type']})", source_layout=source.layout, target_layout=options.to,
        rules=list(_rules(source, left, right, options)), backward=backward, drops=[], config=_config(source, options),
        facts=source.facts, notes=source.notes, problems=source.problems, model=_model(source),
    )  # fmt: skip


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `kconv inspect` says of a draft."""
    source = read_source(checkpoint)
    keys = (
        "attention_mode", "num_hidden_layers", "block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids",
        "target_num_hidden_layers", "capture_stream", "mla_norm_eps", "owns_embed_tokens", "owns_lm_head", "draft_vocab_size",
    )  # fmt: skip
    return {
        "family": f"draft ({source.config['model_type']})",
        "layout": source.layout,
        "dialect": source.config.get("dialect"),
        "spelling": source.traits,
        **{k: source.config.get(k) for k in keys},
        "notes": source.notes,
        "problems": source.problems,
    }


def sound_config(checkpoint: Checkpoint) -> DraftConfig | None:
    """The native config of a draft, None where it is no sound one."""
    from kconv.modeling.drafts import config_class

    source = read_source(checkpoint)
    return None if source.problems else config_class(source.config["model_type"])(**source.config)


def _rules(source: DraftSource, left: str, right: str, options: Options) -> Iterator[Rule]:
    config, values = source.config, sizes(source.config)
    domains = {"layer": tuple(range(config["num_hidden_layers"])), "tap": tuple(range(kinds_of_taps(config)))}
    rows = rows_of(config)
    for row in rows:
        if row.name in ("d2t", "t2d"):
            continue
        over = {row.index: domains[row.index]} if row.index else {}
        allowed = tuple(Spec(d, shape(row.shape, values)) for d in sorted(FLOATS))
        yield rule(
            source.name(row, left), source.name(row, right), _transform(source, row, options), over=over, expect=((allowed,),)
        )
    maps = [row for row in rows if row.name in ("d2t", "t2d")]
    if maps:
        names = [source.name(row, left) for row in maps], [source.name(row, right) for row in maps]
        yield rule(*names, VocabularyMaps(values["D"], values["V"]))


def _transform(source: DraftSource, row: Row, options: Options) -> Transform:
    if not options.dtype:
        return Same()
    first = source.name(row, source.layout).format_map({"layer": 0, "tap": 0})
    entry = source.checkpoint.entries.get(first)
    return Cast(entry.spec.dtype if entry else "F32", dtype_name(options.dtype))


def _config(source: DraftSource, options: Options) -> dict[str, Any]:
    if options.to == PUBLISHED:
        config = dict(source.original) or serving_config(source.config)
        if options.dtype:
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(options.dtype)
        return config
    return {**source.config, "dtype": str(options.dtype)} if options.dtype else dict(source.config)


def _model(source: DraftSource) -> str:
    """Module and class of the native model."""
    from kconv.modeling.drafts import CLASSES

    module, _, name = CLASSES[source.config["model_type"]]
    return f"{module}:{name}"


def _validate(source: DraftSource) -> None:
    """Build the native config class, so that what it refuses is known before anything is written."""
    from kconv.modeling.drafts import config_class

    try:
        config_class(source.config["model_type"])(**source.config)
    except KconvError as e:
        source.problems.append(e.message)
    except Exception as e:  # Transformers reads inherited keys (id2label, ...) without checking them
        source.problems.append(f"config.json: {e} ({type(e).__name__})")


def _refuse_unused(options: Options) -> None:
    for name, given in (
        ("--experts", options.experts),
        ("--weights", options.weights),
        ("--block", options.block),
        ("--vision", options.vision),
        ("--layers", options.layers),
        ("--tie", options.tie),
    ):
        if given:
            raise KconvError(f"{name}: a draft has nothing to apply it to", hint="leave the option out")
