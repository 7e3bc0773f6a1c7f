"""The wheel, as a stranger installs it: built from the sdist, in a clean environment, beside AdapterHub's `adapters`.

| shown | why |
|---|---|
| `kconv` is the only top-level name of the wheel | another `adapters` would overwrite AdapterHub's without a word from pip |
| every module and card of the working tree is in it | a build that does not follow links leaves files out without a word |
| AdapterHub's files stay byte for byte its own | the same, from the other side |
| both packages import in one process | the one thing that a user sees |
| no module is loaded under two names | the repository's root is importable where it is developed |

AdapterHub 1.3.0 imports only with huggingface_hub below 1, which kconv does not run on: for the import of both, that and
its transformers lie in a folder before the others. torch comes from the environment that runs the tests.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
GOLDEN = REPO / "tests" / "data" / "golden" / "tiny-k3"
ADAPTERHUB = "adapters==1.3.0"
ITS_OWN = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
LINKED = ("adapters", "modeling", "cards")
PARTS = ("kconv", *LINKED)


@dataclass
class Installed:
    """An environment that holds the wheel and AdapterHub's package."""

    python: Path
    packages: Path
    adapterhub: bool
    its_own: Path | None = None

    def run(self, script: str, *argv: str, path: Path | None = None) -> str:
        """The output of a script in the environment, far from the repository."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | ({"PYTHONPATH": str(path)} if path else {})
        words = [str(self.python), "-P", "-c", script, *argv]
        result = subprocess.run(words, capture_output=True, text=True, cwd=self.packages.anchor, env=env)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()


def copied_tree(folder: Path) -> Path:
    """The working tree without what git ignores, so that a build writes nothing into the repository."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "dist", "build")
        return shutil.copytree(REPO, folder, symlinks=True, ignore=ignored)
    for name in listed.stdout.splitlines():
        source, target = REPO / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kconv-wheel-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def tree(scratch: Path) -> Path:
    return copied_tree(scratch / "tree")


@pytest.fixture(scope="module")
def built(tree: Path, scratch: Path) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the sdist."""
    try:
        recent = int(metadata.version("setuptools").split(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        recent = False
    words = [sys.executable, "-m", "build", "--outdir", str(scratch / "dist"), *(["--no-isolation"] if recent else []), str(tree)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (sdist,), (wheel,) = (scratch / "dist").glob("*.tar.gz"), (scratch / "dist").glob("*.whl")
    return sdist, wheel


def pip(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-compile", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], scratch: Path) -> Installed:
    """AdapterHub's package first, then the wheel; what they depend on is borrowed from the environment of the tests."""
    venv.create(scratch / "clean", with_pip=False)
    python = scratch / "clean" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(scratch / "clean")}))
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    hub = pip(python, ADAPTERHUB)
    wheel = pip(python, str(built[1]))
    assert wheel.returncode == 0, wheel.stderr
    own = scratch / "its-own"
    theirs = pip(python, "--target", str(own), *ITS_OWN) if hub.returncode == 0 else hub
    return Installed(python, packages, hub.returncode == 0, own if theirs.returncode == 0 else None)


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def test_wheel_has_one_top_level_name(built: tuple[Path, Path]) -> None:
    top = {name.split("/")[0] for name in names_in(built[1])}
    assert {n for n in top if not n.endswith(".dist-info")} == {"kconv"}
    assert len(top) == 2
    with zipfile.ZipFile(built[1]) as file:
        (record,) = [n for n in file.namelist() if n.endswith("top_level.txt")]
        assert file.read(record).decode().split() == ["kconv"]


def test_wheel_holds_every_module_and_card(built: tuple[Path, Path], tree: Path) -> None:
    wanted = set()
    for part in PARTS:
        for base, _, files in os.walk(tree / part):  # links to folders are not followed
            inside = Path(base).relative_to(tree) if part == "kconv" else "kconv" / Path(base).relative_to(tree)
            wanted |= {(inside / f).as_posix() for f in files if f.endswith((".py", ".yaml"))}
    shipped = {n for n in names_in(built[1]) if n.endswith((".py", ".yaml"))}
    assert {n for n in wanted if n.endswith(".py")} == {n for n in shipped if n.endswith(".py")}
    assert wanted <= shipped
    assert {"kconv/adapters/k3/__init__.py", "kconv/modeling/model.py", "kconv/cards/kimi-k3.yaml"} <= shipped
    assert "kconv/py.typed" in names_in(built[1])


def test_sdist_can_be_tested(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as file:
        names = {n.split("/", 1)[1] for n in file.getnames() if "/" in n}
    assert {"pyproject.toml", "LICENSE", "kconv/cli/__init__.py"} <= names


def test_metadata(installed: Installed) -> None:
    script = (
        "import json; from importlib import metadata as m; d = m.distribution('kconv');"
        "print(json.dumps([d.metadata['Name'], d.metadata['License-Expression'], [e.name for e in d.entry_points], d.requires]))"
    )
    name, licence, scripts, requires = json.loads(installed.run(script))
    assert (name, licence, scripts) == ("kconv", "Apache-2.0", ["kconv"])
    assert any(r.startswith("torch") for r in requires)


def test_import_is_light(installed: Installed) -> None:
    heavy = "('torch', 'transformers', 'numpy', 'click', 'safetensors')"
    script = f"import sys, kconv; print(kconv.__file__); print([m for m in {heavy} if m in sys.modules])"
    where, loaded = installed.run(script).splitlines()
    assert Path(where).is_relative_to(installed.packages)
    assert loaded == "[]"


def test_linked_packages_and_cards_are_there(installed: Installed) -> None:
    script = (
        "import kconv, kconv.adapters.k3; from importlib import resources, util;"
        "print(sorted(p.name for p in (resources.files('kconv') / 'cards').iterdir()));"
        "print(kconv.adapters.__file__); print(util.find_spec('kconv.modeling').origin)"
    )
    cards, *files = installed.run(script).splitlines()
    assert "kimi-k3.yaml" in cards
    assert [Path(f) for f in files] == [installed.packages / "kconv" / p / "__init__.py" for p in ("adapters", "modeling")]


ALL_MODULES = """
import importlib, os, pkgutil, sys
import kconv
for found in pkgutil.walk_packages(kconv.__path__, "kconv."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as e:
            if (e.name or "").startswith("kconv"):
                raise
names = {}
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if file and (name.split(".")[0] in ("kconv", "adapters", "modeling", "cards")):
        names.setdefault(os.path.realpath(file), []).append(name)
print(len(names))
print({file: twins for file, twins in names.items() if len(twins) > 1})
print(sorted({n.split(".")[0] for twins in names.values() for n in twins}))
"""


def test_every_module_imports_under_one_name(installed: Installed) -> None:
    count, twins, roots = installed.run(ALL_MODULES).splitlines()
    assert int(count) > 50
    assert twins == "{}"
    assert roots == "['kconv']"


def test_no_twins_in_the_development_environment() -> None:
    result = subprocess.run([sys.executable, "-P", "-c", ALL_MODULES], capture_output=True, text=True, cwd=REPO.anchor)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:] == ["{}", "['kconv']"]


def test_console_script_converts_and_verifies(installed: Installed, scratch: Path) -> None:
    kconv = installed.python.parent / "kconv"
    out = scratch / "out"
    for words in (["--version"], ["convert", str(GOLDEN), str(out)], ["verify", str(out), "--source", str(GOLDEN)]):
        result = subprocess.run([str(kconv), *words], capture_output=True, text=True, cwd=scratch)
        assert result.returncode == 0, result.stderr
    assert "identical" in result.stdout


def test_adapterhub_is_untouched(installed: Installed) -> None:
    if not installed.adapterhub:
        pytest.skip(f"{ADAPTERHUB} cannot be fetched here")
    (record,) = installed.packages.glob("adapters-*.dist-info/RECORD")
    rows = [row for row in csv.reader(record.read_text().splitlines()) if row[0].startswith("adapters/") and row[1]]
    assert len(rows) > 50
    for name, digest, _ in rows:
        actual = hashlib.sha256((installed.packages / name).read_bytes()).digest()
        assert digest == "sha256=" + base64.urlsafe_b64encode(actual).rstrip(b"=").decode(), name


def test_both_import_in_one_process(installed: Installed) -> None:
    if not installed.its_own:
        pytest.skip(f"{ADAPTERHUB} and what it needs cannot be fetched here")
    script = (
        "import adapters, kconv, kconv.adapters, kconv.adapters.k3, kconv.zoo.cards;"
        "print(adapters.__file__); print(adapters.AdapterConfig.__module__); print(kconv.adapters.__file__)"
    )
    theirs, module, ours = installed.run(script, path=installed.its_own).splitlines()
    assert Path(theirs) == installed.packages / "adapters" / "__init__.py"
    assert module.startswith("adapters.")
    assert Path(ours) == installed.packages / "kconv" / "adapters" / "__init__.py"


def test_uninstalling_ours_leaves_theirs(installed: Installed, scratch: Path) -> None:
    """Last in the file: it takes the wheel away."""
    before = {p.relative_to(installed.packages) for p in (installed.packages / "adapters").rglob("*.py")}
    words = [sys.executable, "-m", "pip", "--python", str(installed.python), "uninstall", "-q", "-y", "kconv"]
    assert subprocess.run(words, capture_output=True).returncode == 0
    assert {p.relative_to(installed.packages) for p in (installed.packages / "adapters").rglob("*.py")} == before
    assert not (installed.packages / "kconv").exists() or not list((installed.packages / "kconv").rglob("*.py"))
