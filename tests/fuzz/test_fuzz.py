"""What the trials would notice: each wrong behaviour is planted once, and the trial must fail for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import bases
from tests.fuzz.edits_json import edit_text
from tests.fuzz.mutating import mutate
from tests.fuzz.reading import different, tensors
from tests.fuzz.running import Runner, plan_of
from tests.fuzz.scenes import SCENES, converted
from tests.fuzz.trial import Trial

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that trials start from."""
    return bases.make(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A furnished trial whose commands run in its area."""
    made = Trial(tmp_path, Random(1))
    made.area.mkdir()
    made.decoy.mkdir()
    monkeypatch.chdir(made.area)
    return made


def test_a_sound_conversion_fails_nothing(trial: Trial, sound: Path) -> None:
    bases.copied(sound / "source" / "k3", trial.area / "src")
    assert trial.run("convert", "src", "out", writes="out").code == 0
    assert trial.run("verify", "out", "--source", "src").code == 0
    assert trial.failures == []


def test_what_is_written_beside_the_output_is_noticed(trial: Trial, sound: Path) -> None:
    bases.copied(sound / "source" / "k3", trial.area / "src")
    trial.run("convert", "src", str(trial.decoy / "out"), writes="out")
    assert [f.split(":")[0] for f in trial.failures] == ["written elsewhere"]


def test_what_is_left_after_a_refusal_is_noticed(trial: Trial, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(args: list[str]) -> None:
        (trial.area / ".out.partial").mkdir()
        print('{"error": {}}')
        sys.exit(2)

    monkeypatch.setattr("kconv.cli.main", refuse)
    trial.run("convert", "src", "out", writes="out")
    assert [f.split(":")[0] for f in trial.failures] == ["left behind"]


@pytest.mark.parametrize(
    ("said", "kind"),
    [("error: unexpected KeyError, please report", "unexpected"), ("\x1b[31mred", "control characters"),
     ("no token hf_secret_token_of_this_trial", "token shown"), ("Traceback (most recent call last):", "traceback")],
)  # fmt: skip
def test_what_is_said_is_judged(trial: Trial, monkeypatch: pytest.MonkeyPatch, said: str, kind: str) -> None:
    def speak(args: list[str]) -> None:
        print(said, file=sys.stderr)
        print('{"error": {}}')
        sys.exit(3)

    monkeypatch.setattr("kconv.cli.main", speak)
    trial.run("plan", "src")
    assert kind in [f.split(":")[0] for f in trial.failures]


def test_an_exception_that_escapes_is_noticed(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(args: list[str]) -> None:
        raise KeyError("weight_map")

    monkeypatch.setattr("kconv.cli.main", fall)
    trial.run("plan", "src")
    assert [f.split(":")[0] for f in trial.failures] == ["traceback"]


def test_a_verification_that_overlooks_a_changed_file_is_a_false_answer(
    trial: Trial, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agree(args: list[str]) -> None:
        print('{"ok": true}')

    monkeypatch.setattr("kconv.cli.main", agree)
    kinds: set[str] = set()
    for seed in range(20):
        trial.rng, trial.failures = Random(seed), []
        folder = trial.area / str(seed)
        monkeypatch.setattr(Trial, "area", folder)
        folder.mkdir()
        monkeypatch.chdir(folder)
        converted(trial, sound)
        kinds |= {f.split(":")[0] for f in trial.failures}
    assert "false answer" in kinds


def test_the_same_seed_makes_the_same_mutations(sound: Path, tmp_path: Path) -> None:
    made = []
    for k in "ab":
        folder = bases.copied(sound / "package" / "k3-dflash", tmp_path / k)
        made.append((mutate(folder, Random("3/draft/7"), tmp_path / "decoy"), tensors(folder)))
    assert made[0] == made[1]
    assert made[0][0]


def test_json_edits_never_leave_a_text_as_it_was(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "data" / "golden" / "tiny-k3" / "config.json").read_bytes()
    changed = [edit_text(text, Random(k), tmp_path)[0] != text for k in range(300)]
    assert all(changed)


def test_a_changed_tensor_is_found_by_name(sound: Path) -> None:
    first, second = tensors(sound / "source" / "k3"), tensors(sound / "converted" / "back")
    assert first is not None
    assert second is not None
    assert different(first, second) == []
    name = next(iter(first))
    assert different(first, {n: t for n, t in second.items() if n != name}) == [name]


def test_every_kind_has_its_share_of_the_trials() -> None:
    assert {kind for kind, _ in plan_of(16, None)} == set(SCENES)
    assert {kind for kind, _ in plan_of(16, "hub")} == {"hub"}


def test_a_process_that_dies_fails_its_trial(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_trial: Trial, _bases: Path) -> None:
        os.kill(os.getpid(), 9)

    monkeypatch.setitem(SCENES, "source", die)
    verdicts = list(Runner(tmp_path, sound, 1, 2).run([("source", 0), ("source", 1)]))
    assert [v.failures for v in verdicts] == [["crash: the process ended with -9"]] * 2


def test_a_few_dozen_trials_of_every_kind_find_nothing() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--trials", "48", "--seed", "0", "--jobs", "2"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "48 trials of seed 0" in ran.stdout, ran.stderr
    assert ran.returncode == 0, ran.stdout


def test_the_command_prints_a_table_and_how_to_repeat_a_trial() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--trials", "4", "--kind", "target", "--only", "0,3"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "2 trials of seed 0" in ran.stdout
    assert "python -m tests.fuzz --seed 0 --kind target --only 3" in ran.stdout
