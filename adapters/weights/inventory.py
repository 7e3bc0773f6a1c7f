"""In which form each weight of a K3 checkpoint is stored, by row of the table and layer, and what does not agree.

| source | forms come from |
|---|---|
| published | the tensors beside each other (`kconv.adapters.weights.forms`), held against the config's quantisation blocks |
| native | `facts.formats` of kconv.json: the forms to go back to; what is stored is plain, or MXFP4 experts |

Experts of a layer share a form; gate (w1) and up (w3) must, since their rows become one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kconv.adapters.tables.rows import Row, Table
from kconv.adapters.weights.declared import Says
from kconv.adapters.weights.forms import ACTIVATIONS, MXFP4, SUFFIXES, Declared, Form, FormError, detect, plain
from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.names import folded, ranges
from kconv.spec import Spec

NO_LAYER = -1
MOST = 8
SIDECAR = "sidecar-"


@dataclass
class Found:
    """The tensors of one layer's experts, by projection: suffix -> spec of the first one seen, and every dtype seen."""

    specs: dict[str, dict[str, Spec]] = field(default_factory=dict)
    dtypes: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    def add(self, part: str, suffix: str, spec: Spec) -> None:
        """One tensor of one expert."""
        self.specs.setdefault(part, {}).setdefault(suffix, spec)
        self.dtypes.setdefault(part, set()).add((suffix, spec.dtype))

    def mixed(self) -> bool:
        """Whether one projection is stored in several ways."""
        return any(len({s for s in seen if s[0] in ("weight", "weight_packed")}) > 1 for seen in self.dtypes.values())


@dataclass
class Forms:
    """The forms of a checkpoint's weights, and where activation scales lie.

    Args:
        rows: row name -> layer (`NO_LAYER`: none) -> its form in the published layout.
        experts: layer -> projection -> its form in the published layout.
        activations: tensor below a layer, by its native name -> layer -> spec.
        expert_activations: layer -> (projection, suffix) -> spec.
        counts: label -> modules, tensors and bytes, for people.
        unread: (row name, layer) -> tensors of a weight whose form cannot be told, of which a problem speaks.
    """

    rows: dict[str, dict[int, Form]] = field(default_factory=dict)
    experts: dict[int, dict[str, Form]] = field(default_factory=dict)
    activations: dict[str, dict[int, Spec]] = field(default_factory=dict)
    expert_activations: dict[int, dict[tuple[str, str], Spec]] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    unread: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def row(self, name: str, layer: int = NO_LAYER) -> Form | None:
        """The published form of a row in a layer, None where it is plain."""
        form = self.rows.get(name, {}).get(layer)
        return None if form is None or form.plain else form

    def split(self, name: str, layers: Iterable[int]) -> Iterator[tuple[Form | None, tuple[int, ...]]]:
        """The layers of a row by their form."""
        by_form: dict[Form | None, list[int]] = {}
        for layer in (i for i in layers or (NO_LAYER,) if (name, i) not in self.unread):
            by_form.setdefault(self.row(name, layer), []).append(layer)
        for form, mine in by_form.items():
            yield form, () if mine == [NO_LAYER] else tuple(mine)

    def quantised(self) -> bool:
        """Whether any weight is."""
        rows = (f for by_layer in self.rows.values() for f in by_layer.values())
        experts = (f for parts in self.experts.values() for f in parts.values())
        return any(not f.plain for f in (*rows, *experts))

    def count(self, form: Form, tensors: int, nbytes: int, modules: int = 1) -> None:
        """Add modules to the statistics."""
        row = self.counts.setdefault(form.label, {"weights": 0, "tensors": 0, "bytes": 0})
        row["weights"] += modules
        row["tensors"] += tensors
        row["bytes"] += nbytes

    def to_json(self) -> list[dict[str, Any]]:
        """The quantised forms with their rows, projections and layers, for the manifest."""
        listed: dict[Form, dict[str, dict[str, list[int]]]] = {}
        for name, by_layer in self.rows.items():
            for layer, form in by_layer.items():
                listed.setdefault(form, {"rows": {}, "experts": {}})["rows"].setdefault(name, []).append(layer)
        for layer, parts in self.experts.items():
            for part, form in parts.items():
                listed.setdefault(form, {"rows": {}, "experts": {}})["experts"].setdefault(part, []).append(layer)
        return [{"form": form.to_json(), **where} for form, where in listed.items() if not form.plain]

    def activations_to_json(self) -> list[dict[str, Any]]:
        """Activation scales of the experts with their layers; where the others lie is known by their names."""
        listed: dict[tuple[str, str, Spec], list[int]] = {}
        for layer, found in self.expert_activations.items():
            for (part, suffix), spec in found.items():
                listed.setdefault((part, suffix, spec), []).append(layer)
        return [{"part": p, "suffix": s, "dtype": spec.dtype, "shape": list(spec.shape), "layers": layers}
                for (p, s, spec), layers in listed.items()]  # fmt: skip


def from_facts(facts: Mapping[str, Any], layers: Iterable[int], parts: Iterable[str], where: str) -> Forms:
    """The published forms that a native checkpoint's manifest names; MXFP4 everywhere where an older one only says `packed`."""
    try:
        return _from_facts(facts, layers, parts, where)
    except (TypeError, ValueError, AttributeError, KeyError) as e:
        hint = "copy kconv.json again from the conversion it came from"
        raise KconvError(f"{where}/kconv.json: facts.formats is not as kconv wrote it: {e}", hint=hint) from e


def _from_facts(facts: Mapping[str, Any], layers: Iterable[int], parts: Iterable[str], where: str) -> Forms:
    forms = Forms()
    if "formats" not in facts:
        packed = "packed" in (facts.get("experts") or ["packed"])
        forms.experts = {i: dict.fromkeys(parts, MXFP4) for i in layers} if packed else {}
        return forms
    for entry in facts["formats"]:
        form = Form.from_json(entry.get("form") if isinstance(entry, dict) else entry, f"{where}/kconv.json: facts.formats")
        for kind in ("rows", "experts"):
            for name, mine in (entry.get(kind) or {}).items():
                for layer in mine:
                    if kind == "rows":
                        forms.rows.setdefault(name, {})[layer] = form
                    else:
                        forms.experts.setdefault(layer, {})[name] = form
    for entry in facts.get("expert_activations") or []:
        for layer in entry["layers"]:
            spec = Spec(entry["dtype"], tuple(entry["shape"]))
            forms.expert_activations.setdefault(layer, {})[entry["part"], entry["suffix"]] = spec
    return forms


class Reader:
    """Reads the forms of a published checkpoint; appends to `notes` and `problems`."""

    def __init__(self, checkpoint: Checkpoint, layout: Table, says: Says, block: tuple[int, int] | None,
                 notes: list[str], problems: list[str]) -> None:  # fmt: skip
        self.checkpoint, self.layout, self.says, self.block = checkpoint, layout, says, block
        self.notes, self.problems = notes, problems
        self.forms = Forms()
        self._memo: dict[tuple, Form | FormError] = {}
        self._faults: dict[str, list[str]] = {}
        self._differ: dict[str, list[str]] = {}

    def row(self, row: Row, layer: int, stem: str, shape: tuple[int, ...]) -> None:
        """One weight of the table; `stem` is its name up to and with the last dot."""
        entries = self.checkpoint.entries
        found = {s: e.spec for s in SUFFIXES if (e := entries.get(stem + s)) and not e.file.startswith(SIDECAR)}
        if not found:
            return
        form = self._read(stem, found, shape)
        if form is None:
            self.forms.unread[row.name, layer] = [stem + s for s in found]
            return
        if not form.plain:
            self.forms.rows.setdefault(row.name, {})[layer] = form
        self.forms.count(form, len(found), sum(s.nbytes for s in found.values()))

    def experts(self, layer: int, base: str, found: Found, count: int) -> bool:
        """The experts of a layer, named from `base` on; false where they are of several forms."""
        parts: dict[str, Form] = {}
        for part, symbols in self.layout.experts.items():
            specs = found.specs.get(part, {})
            own = {s: spec for s, spec in specs.items() if s in SUFFIXES}
            if "weight_packed" in own:
                own.pop("weight", None)  # `mixed` says so
            if own:
                parts[part] = form = self._form(f"{base}0.{part}.", own, self.layout.shape(symbols))
                self.forms.count(form, count * len(own), count * sum(s.nbytes for s in own.values()), count)
            for suffix, spec in specs.items():
                if suffix in ACTIVATIONS:
                    self.forms.expert_activations.setdefault(layer, {})[part, suffix] = spec
        self.forms.experts[layer] = parts
        gate, up, *_ = self.layout.experts
        return not found.mixed() and parts.get(gate) == parts.get(up)

    def finish(self, *, quiet: bool) -> Forms:
        """Problems and notes, folded; `quiet` where nothing is quantised at all, which one note of the caller says."""
        for text, names in self._faults.items():
            self.problems += [f"{line} {text}" for line in folded(names, file_of=self._file_of)]
        for text, names in self._differ.items() if not quiet else ():
            kinds = sorted({n.rpartition(".")[2] for n in names})
            more = f" and {len(kinds) - MOST} more" if len(kinds) > MOST else ""
            self.notes.append(f"{text} ({', '.join(kinds[:MOST])}{more}): the tensors count")
        return self.forms

    def _form(self, stem: str, found: dict[str, Spec], shape: tuple[int, ...]) -> Form:
        """The form of a weight, as plain where it cannot be told: a problem then says so."""
        return self._read(stem, found, shape) or plain(next(iter(found.values())).dtype)

    def _read(self, stem: str, found: dict[str, Spec], shape: tuple[int, ...]) -> Form | None:
        said = self._said(stem[:-1])
        key = (tuple(found.items()), shape, said)
        if key not in self._memo:
            try:
                self._memo[key] = detect(found, shape, said, self.block)
            except FormError as e:
                self._memo[key] = e
        form = self._memo[key]
        if isinstance(form, FormError):
            self._faults.setdefault(f"{form.message}: {form.hint}", []).append(stem + form.suffix)
            return None
        self._compare(stem[:-1], form, said)
        return form

    def _said(self, module: str) -> Declared | None:
        try:
            return self.says(module)
        except KconvError as e:
            if e.message not in self.problems:
                self.problems.append(e.message)
            return None

    def _compare(self, module: str, form: Form, said: Declared | None) -> None:
        """Plain where the config says quantised, or the reverse."""
        if said is None or (said.kind == "plain") == form.plain:
            if said and not form.plain and said.group and form.group and said.group != form.group:
                self._differ.setdefault(f"{said.where} says groups of {said.group}, stored are {form.group}", []).append(module)
            return
        text = f"the config's {said.where} says {said.kind.upper()}, stored is {form.label}"
        text = f"the config's {said.where} leaves out weights stored as {form.label}" if said.kind == "plain" else text
        self._differ.setdefault(text, []).append(module)

    def _file_of(self, name: str) -> str:
        entry = self.checkpoint.entries.get(name)
        return entry.file if entry else ""


def described(forms: Forms) -> dict[str, dict[str, Any]]:
    """Form -> counts, for `kconv inspect`, with the rows and layers of each."""
    where: dict[str, dict[str, set[int]]] = {}
    for name, by_layer in forms.rows.items():
        for layer, form in by_layer.items():
            where.setdefault(form.label, {}).setdefault(name.removesuffix(".weight"), set()).add(layer)
    for layer, parts in forms.experts.items():
        for form in parts.values():
            where.setdefault(form.label, {}).setdefault("routed experts", set()).add(layer)
    found: dict[str, dict[str, Any]] = {}
    for label, row in forms.counts.items():
        held = where.get(label, {})
        found[label] = {**row, "in": [f"{n} ({ranges(sorted(ls))})" if NO_LAYER not in ls else n for n, ls in held.items()]}
    return found
