"""The kinds of trials: what is mutated, which commands run on it, and which of their answers would be false.

| kind | false is |
|---|---|
| source | a conversion that ends with 0 and is not verified, or whose way back does not give the source's own tensors |
| converted | `verify` says identical although a file is not as it was written; a way back that is not what the folder holds; \
a resumed or replacing conversion that is not the plain one |
| draft | `check` says that a changed package fits; a package without the draft's own tensors, or that does not fit its target |
| target | `check` says that a changed target is the recorded one |
| hub | a conversion that ends with 0 and is not what the repository holds; a token that another host sees |
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.bases import CONVERTED, DRAFTS, SOURCES, copied, packaging
from tests.fuzz.lies import LyingHub
from tests.fuzz.mutating import mutate
from tests.fuzz.reading import contents, different, parsed, steady, tensors
from tests.fuzz.trial import TOKEN, Trial

VISION = re.compile(r"(^|\.)(vision_tower|mm_projector|multi_modal_projector|vision)\.")
TABLE = re.compile(r"(.*\.)?(embed_tokens|lm_head|norm)\.weight")
TOKENIZER = re.compile(r"tokenizer.*|tiktoken.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template.*")
SIDE = ("tiktoken.model", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
SHAPE = ("hidden_size", "target_hidden_size", "vocab_size", "target_num_hidden_layers", "target_layer_ids")
EXACT = ("exact", "exact-with-sidecar")
WAYS = (["--vision", "keep"], ["--vision", "keep"], ["--vision", "keep", "--experts", "bf16"], ["--to", "hf"], ["--to", "nemo"],
        ["--to", "hf-text"], ["--dtype", "float32", "--vision", "keep"], ["--link", "--to", "hf"],
        ["--experts", "fp32", "--vision", "keep"],
        ["--weights", "fp8-block", "--to", "hf"], ["--no-sidecar", "--experts", "bf16"],
        ["--digest", "sha256", "--vision", "keep"],
        ["--digest", "none", "--vision", "keep"], ["--vision", "drop"], ["--follow-index", "--vision", "keep"],
        ["--tie", "--vision", "keep"],
        ["--layers", "0-0"], ["--shard-size", "100KB", "--vision", "keep"])  # fmt: skip


def source(t: Trial, bases: Path) -> None:
    """Convert a mutated checkpoint."""
    name = t.rng.choice(["k3"] * 4 + [*SOURCES, *DRAFTS])
    copied(bases / ("draft" if name in DRAFTS else "source") / name, t.area / "src")
    t.mutations = mutate(t.area / "src", t.rng, t.decoy)
    if t.rng.random() < 0.2:
        t.run(t.rng.choice(["plan", "inspect"]), "src")
        return
    made = t.run("convert", "src", "out", *t.rng.choice(WAYS), "--workers", "2", writes="out")
    if made.code == 0:
        _holds(t, "src", made.answer)


def _holds(t: Trial, source: str, answer: dict[str, Any]) -> None:
    """A conversion that ended with 0: verified, and its way back is the source."""
    if t.run("verify", "out", "--source", source).code != 0:
        t.fail("false answer", f"convert ends with 0, verify does not: {t.ran[-1].said or t.ran[-1].out[:300]}")
    if answer.get("grade") not in EXACT:
        return
    if json.loads((t.area / "out" / "kconv.json").read_bytes())["to"] == "hf":
        _same(t, t.area / source, t.area / "out")
    elif t.run("convert", "out", "back", "--to", "hf", writes="back").code != 0:
        t.fail("false grade", f"{answer['grade']}, but the way back is refused: {t.ran[-1].said}")
    else:
        _same(t, t.area / source, t.area / "back")


def _same(t: Trial, first: Path, second: Path) -> None:
    expected, found = tensors(first), tensors(second)
    if expected is None or found is None:
        t.fail("false answer", f"the safetensors library cannot read {first.name if expected is None else second.name}")
        return
    if "keep" not in t.ran[0].args:  # a text model may have a root of its own
        expected, found = ({n.removeprefix("language_model."): d for n, d in held.items()} for held in (expected, found))
    narrowed = {n for n in expected if n not in found and (VISION.search(n) or "--layers" in t.ran[0].args)}
    if "hf-text" in t.ran[0].args:  # one published layout to another: A_log stays in the form of the one in between
        narrowed |= {n for n in expected if n.endswith("A_log")}
    if wrong := [n for n in different(expected, found) if n not in narrowed]:
        ways = dict(Counter("lacking" if n not in found else "more" if n not in expected else "changed" for n in wrong))
        t.fail("false answer", f"of the source's tensors {ways}, {wrong[0]}: {expected.get(wrong[0])}, {found.get(wrong[0])}")
    for name in SIDE:
        if (first / name).is_file() and contents(first).get(name) != contents(second).get(name):
            t.fail("false answer", f"{name} differs from the source's")


def converted(t: Trial, bases: Path) -> None:
    """Verify, take back or finish a mutated conversion."""
    if (way := t.rng.random()) < 0.35:
        resumed(t, bases) if way < 0.25 else overwritten(t, bases)
        return
    name = t.rng.choice(list(CONVERTED))
    of = CONVERTED[name][0]
    copied(bases / of, t.area / "src")
    copied(bases / "converted" / name, t.area / "out")
    t.mutations = mutate(t.area / "out", t.rng, t.decoy, favour="kconv")
    was, now = (_held(p) for p in (bases / "converted" / name, t.area / "out"))
    if t.rng.random() < 0.6:
        ran = t.run("verify", "out", "--source", "src")
        if ran.code == 0 and was != now:
            changed = sorted(n for n in was.keys() | now.keys() if was.get(n) != now.get(n))
            t.fail("false answer", f"verify says identical, {', '.join(changed[:4])} changed")
    elif t.rng.random() < 0.7:
        _back(t, name)
    else:
        t.run(t.rng.choice(["inspect", "plan"]), "out")


def _held(folder: Path) -> dict[str, Any]:
    """What a conversion states of a folder: its tensors where the library can read them, the other files' bytes."""
    named, held = _named(contents(folder)), tensors(folder)
    if held is None:
        return dict(named)
    named |= {n: parsed(folder / n) or d for n, d in named.items() if n.endswith(".index.json")}
    return {n: d for n, d in named.items() if not n.endswith(".safetensors")} | held


def _named(found: dict[str, str]) -> dict[str, str]:
    """Without the manifest, which whoever seals it anew may write as he likes, and hidden files, which are no part."""
    return {n: d for n, d in found.items() if n != "kconv.json" and not any(p.startswith(".") for p in n.split("/"))}


def _back(t: Trial, name: str) -> None:
    """The way back from a mutated folder, and again forth: the folder's own tensors."""
    to = ["--to", "native", "--vision", "keep"] if name == "back" else ["--to", "hf"]
    if t.run("convert", "out", "back", *to, writes="back").code == 0:
        ran = t.run("verify", "back", "--source", "out")
        if ran.code != 0:
            t.fail("false answer", f"convert ends with 0, verify does not: {ran.said or ran.out[:300]}")


def resumed(t: Trial, bases: Path) -> None:
    """Go on with a conversion that was killed and whose partial folder was mutated."""
    copied(bases / "source" / "k3", t.area / "src")
    options = ["--vision", "keep", "--workers", "1"]
    killed(t.rng.choice([8, 12, 20, 30, 45, 60]), ["convert", "src", "out", *options])
    partial = t.area / ".out.partial"
    if partial.is_dir() and t.rng.random() < 0.9:
        t.mutations = mutate(partial, t.rng, t.decoy, favour=".kconv", hidden=True)
    else:
        t.mutations = mutate(t.area / "src", t.rng, t.decoy)
    was = partial.is_dir()
    ran = t.run("convert", "src", "out", *options, "--resume", writes="out", keeps=".out.partial")
    if ran.code == 0 and _named(contents(t.area / "src")) == _named(contents(bases / "source" / "k3")):
        made, right = (_named(contents(p)) for p in (t.area / "out", bases / "converted" / "native"))
        wrong = sorted(n for n in made.keys() | right.keys() if made.get(n) != right.get(n))
        # what was recorded as synced is not read again: a damaged byte there is for `verify` to find
        if wrong and t.run("verify", "out", "--source", "src").code == 0:
            t.fail("false answer", f"resumed to another result: {', '.join(wrong[:4])}")
    if ran.code == 0 and partial.exists():
        t.fail("left behind", ".out.partial after exit 0")
    if ran.code == 2 and was and not partial.exists():
        t.fail("removed", ".out.partial after exit 2")


def overwritten(t: Trial, bases: Path) -> None:
    """Replace a mutated conversion, beside folders of somebody else's that are named as kconv's own might be."""
    copied(bases / "source" / "k3", t.area / "src")
    copied(bases / "converted" / t.rng.choice(list(CONVERTED)), t.area / "out")
    t.mutations = mutate(t.area / "out", t.rng, t.decoy, favour="kconv")
    for name in (n for n in (".out.old", ".out.partial", ".out.new") if t.rng.random() < 0.3):
        (t.area / name).mkdir()
        (t.area / name / "mine.txt").write_text("mine")
    if t.run("convert", "src", "out", "--vision", "keep", "--overwrite", writes="out").code == 0:
        made, right = (_named(contents(p)) for p in (t.area / "out", bases / "converted" / "native"))
        if made != right:
            t.fail("false answer", "replaced by another result")


def killed(at: int, args: list[str]) -> None:
    """Run a command line in a child that kills itself at its `at`-th change of a file."""
    from tests.engine.faults import die
    from tests.fuzz.trial import called

    pid = os.fork()
    if pid == 0:
        try:
            die(at, "before")
            called(args)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def draft(t: Trial, bases: Path) -> None:
    """Package a mutated draft, or check a mutated package."""
    name = t.rng.choice(list(DRAFTS))
    copied(bases / "target", t.area / "target")
    if t.rng.random() < 0.55:
        copied(bases / "package" / name, t.area / "package")
        t.mutations = mutate(t.area / "package", t.rng, t.decoy, favour="config")
        ran = t.run("check", "package", "--target", "target")
        if ran.code == 0 and (harm := _harm_of_package(bases / "package" / name, t.area / "package")):
            t.fail("false answer", f"check says {ran.answer.get('verdict')}, {', '.join(harm[:4])} changed")
        return
    copied(bases / "draft" / name, t.area / "draft")
    t.mutations = mutate(t.area / "draft", t.rng, t.decoy)
    if t.run("package", "draft", "--target", "target", "out", *packaging(DRAFTS[name]), writes="out").code == 0:
        _packaged(t)


def _packaged(t: Trial) -> None:
    expected, found = tensors(t.area / "draft"), tensors(t.area / "out")
    if expected is None or found is None:
        t.fail("false answer", "the safetensors library cannot read the draft or its package")
    elif wrong := [n for n in different(expected, found) if n in found or not TABLE.fullmatch(n)]:
        t.fail("false answer", f"{len(wrong)} tensors of the package differ from the draft's, {wrong[0]}")
    ran = t.run("check", "out", "--target", "target")
    if ran.code != 0:
        t.fail("false answer", f"packaged for this target, which check denies: {ran.said or ran.out[:300]}")


def target(t: Trial, bases: Path) -> None:
    """Check a package against a mutated target, or package for one."""
    name = t.rng.choice(list(DRAFTS))
    copied(bases / "target", t.area / "target")
    t.mutations = mutate(t.area / "target", t.rng, t.decoy, favour="config")
    harm = _harm_of_target(bases / "target", t.area / "target")
    if t.rng.random() < 0.6:
        copied(bases / "package" / name, t.area / "package")
        ran = t.run("check", "package", "--target", "target")
        if ran.code == 0 and harm:
            t.fail("false answer", f"check says {ran.answer.get('verdict')}, {', '.join(harm[:4])} changed")
        return
    copied(bases / "draft" / name, t.area / "draft")
    if t.run("package", "draft", "--target", "target", "out", *packaging(DRAFTS[name]), writes="out").code == 0:
        ran = t.run("check", "out", "--target", "target")
        if ran.code != 0:
            t.fail("false answer", f"packaged for this target, which check denies: {ran.said or ran.out[:300]}")
        copied(bases / "target", t.area / "sound")
        if harm and t.run("check", "out", "--target", "sound").code == 0:
            t.fail("false answer", f"packaged for a target in which {', '.join(harm[:4])} changed, fits the sound one")


def _harm_of_target(was: Path, now: Path) -> list[str]:
    """What a draft's provenance records of a target and is no longer so: config, weight map, tables, tokenizer, prompt."""
    harm = [n for n in ("config.json",) if steady(parsed(was / n)) != steady(parsed(now / n))]
    old, new = contents(was), contents(now)
    harm += sorted(n for n in old.keys() | new.keys() if TOKENIZER.fullmatch(n) and old.get(n) != new.get(n))
    first, second = tensors(was) or {}, tensors(now)
    if second is None:
        return harm  # its damage may lie where nothing recorded does
    return harm + [n for n in different(first, second) if TABLE.fullmatch(n) and n in second and "layers" not in n]


def _harm_of_package(was: Path, now: Path) -> list[str]:
    """What is no longer so of a package: its tensors, the shapes its target must have, what it records of the target."""
    old, new = (json.loads(parsed(p / "config.json") or "{}") for p in (was, now))
    if not isinstance(new, dict):
        return ["config.json"]
    harm = [k for k in SHAPE if old.get(k) != new.get(k)]
    block = new.get("kconv_provenance")
    harm += list(_changed(old["kconv_provenance"]["target"], block.get("target") if isinstance(block, dict) else None, "target"))
    found = tensors(now)
    return harm + (different(tensors(was) or {}, found) if found is not None else ["model.safetensors"])


def _changed(old: Any, new: Any, at: str) -> Any:
    """Paths at which a record says something else; "unknown" says nothing, and nobody can hold a folder against a repository."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            if key not in ("repo", "revision", "name"):
                yield from _changed(old.get(key), new.get(key), f"{at}.{key}")
    elif old != new and new != "unknown":
        yield at


def hub(t: Trial, bases: Path) -> None:
    """Read from a Hub that lies."""
    rng = t.rng
    kind = rng.choice(["convert"] * 5 + ["plan", "inspect", "check", "package", "verify"])
    held = "target" if kind in ("check", "package") else "k3"
    copied(bases / held if held == "target" else bases / "source" / held, t.folder / "truth")
    with LyingHub(t.folder / "home" / "store", rng, t.decoy) as server:
        client_of(server.url, t.folder / "home")
        server.seed_folder("lab/model", t.folder / "truth")
        if rng.random() < 0.9:
            t.mutations = [server.lie() for _ in range(rng.choice([1, 1, 2]))]
        HUB[kind](t, bases)
        for record in server.log:
            if record.origin == "store" and TOKEN in (record.authorization or ""):
                t.fail("token sent elsewhere", record.path)
        if own := [e for e in server.errors if "in edit" not in e]:  # one lie may spoil what another would edit
            t.fail("harness", own[0][-400:])


ADDRESS = "hf://lab/model"


def _hub_convert(t: Trial, bases: Path) -> None:
    made = t.run("convert", ADDRESS, "out", "--vision", "keep", "--workers", "2", writes="out")
    if made.code == 0:
        right, found = contents(bases / "converted" / "native"), contents(t.area / "out")
        wrong = sorted(n for n in {*right, *found} - {"kconv.json"} if right.get(n) != found.get(n))
        if wrong:
            t.fail("false answer", f"convert ends with 0, other than the repository: {', '.join(wrong[:4])}")


def _hub_reading(command: str) -> Callable[[Trial, Path], None]:
    def run(t: Trial, _bases: Path) -> None:
        t.run(command, ADDRESS)

    return run


def _hub_verify(t: Trial, bases: Path) -> None:
    copied(bases / "converted" / "native", t.area / "out")
    t.run("verify", "out", "--source", ADDRESS)


def _hub_check(t: Trial, bases: Path) -> None:
    copied(bases / "package" / "k3-dflash", t.area / "package")
    t.run("check", "package", "--target", ADDRESS)


def _hub_package(t: Trial, bases: Path) -> None:
    copied(bases / "draft" / "k3-dflash", t.area / "draft")
    t.run("package", "draft", "--target", ADDRESS, "out", "--license", "mit", writes="out")


HUB: dict[str, Callable[[Trial, Path], None]] = {
    "convert": _hub_convert, "plan": _hub_reading("plan"), "inspect": _hub_reading("inspect"), "verify": _hub_verify,
    "check": _hub_check, "package": _hub_package,
}  # fmt: skip


def client_of(url: str, home: Path) -> None:
    """Point this process's huggingface_hub, which reads its environment when imported, at a server; pauses take no time."""
    import time

    from huggingface_hub import constants, hf_api

    import kconv.storage.hub_http as http

    os.environ |= {"HF_TOKEN": TOKEN, "HF_ENDPOINT": url, "HF_HOME": str(home)}
    for name, sub in (("HF_HOME", ""), ("HF_HUB_CACHE", "hub"), ("HF_XET_CACHE", "xet"), ("HF_ASSETS_CACHE", "assets")):
        setattr(constants, name, str(home / sub))
    constants.HF_TOKEN_PATH = str(home / "token")
    constants.ENDPOINT = hf_api.api.endpoint = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_DISABLE_XET = True
    pause = time.sleep
    http.sleep = time.sleep = lambda seconds: pause(0.0001 if seconds else 0)


SCENES: dict[str, Callable[[Trial, Path], None]] = {
    "source": source, "converted": converted, "draft": draft, "target": target, "hub": hub,
}  # fmt: skip
SHARES = ("source", "converted", "draft", "source", "target", "converted", "source", "hub")
