"""`python -m tests.fuzz`: trials, a table of what came of them, and a command for each that failed; exit 1 if any did."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.running import Verdict

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NUMBA_NUM_THREADS": "1"}
ENDS = {0: "done", 1: "no", 2: "refused", 3: "environment", 130: "interrupted"}


def main() -> int:
    """Run, report; 1 when a trial failed."""
    options = _options()
    _warm()
    from tests.fuzz import bases
    from tests.fuzz.running import Runner, Verdict, plan_of

    trials = plan_of(options.trials, options.kind)
    if options.only:
        trials = [(k, n) for k, n in plan_of(max(options.only) + 1, options.kind) if n in options.only]
    began, verdicts = time.monotonic(), list[Verdict]()
    with tempfile.TemporaryDirectory(prefix="kconv-fuzz-", dir=options.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        runner = Runner(folder, bases.make(folder / "bases"), options.seed, options.jobs)
        for verdict in runner.run(trials):
            verdicts.append(verdict)
            if verdict.failures or options.only:
                _show(verdict, options.seed, options.kind)
            if len(verdicts) % 500 == 0:
                print(f"{len(verdicts):,} of {len(trials):,} trials, {time.monotonic() - began:.0f} s", file=sys.stderr)
    failed = sum(bool(v.failures) for v in verdicts)
    _table(verdicts)
    print(f"{len(verdicts):,} trials of seed {options.seed} in {time.monotonic() - began:.0f} s: {failed} failed")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--trials", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("source", "converted", "draft", "target", "hub"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=lambda text: [int(n) for n in text.split(",")], help="numbers of trials to run again")
    parser.add_argument("--folder", help="where trials lie while they run")
    return parser.parse_args()


def _warm() -> None:
    """Import what commands import, so that forked trials do not; the shared processor has no threads of its own."""
    import torch
    from huggingface_hub import hf_api  # noqa: F401

    import kconv.cli.check
    import kconv.cli.convert
    import kconv.cli.inspect
    import kconv.cli.package
    import kconv.cli.plan
    import kconv.cli.verify
    import kconv.storage.hub_http  # noqa: F401

    torch.set_num_threads(1)


def _show(verdict: Verdict, seed: int, kind: str | None) -> None:
    again = f"python -m tests.fuzz --seed {seed}{f' --kind {kind}' if kind else ''} --only {verdict.number}"
    print(f"{verdict.kind} {verdict.number}: exit codes {verdict.codes}  [{again}]")
    rows = {"mutated": verdict.mutations, "ran": verdict.commands, "FAILED": verdict.failures}
    for head, lines in rows.items():
        for line in lines:
            print(f"    {head:<8} {line}".encode("utf-8", "backslashreplace").decode())
    sys.stdout.flush()


def _table(verdicts: list[Verdict]) -> None:
    rows: dict[str, Counter[str]] = {}
    for v in verdicts:
        row = rows.setdefault(v.kind, Counter())
        row[ENDS.get(v.codes[0], "other") if v.codes else "none"] += 1
        row.update({failure.split(":")[0] for failure in v.failures})
    heads = [*ENDS.values(), *sorted({h for r in rows.values() for h in r} - set(ENDS.values()))]
    heads = [h for h in heads if any(r[h] for r in rows.values())]
    print("kind".ljust(11) + "".join(h.rjust(max(9, len(h) + 2)) for h in heads))
    for kind, row in rows.items():
        print(kind.ljust(11) + "".join(str(row[h]).rjust(max(9, len(h) + 2)) for h in heads))


if __name__ == "__main__":
    sys.exit(main())
