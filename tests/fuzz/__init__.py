"""Seeded mutations of everything kconv reads, each in a process of its own, and what may never come of them.

| file | holds |
|---|---|
| bases.py | the sound folders that are mutated, made once by the command line itself |
| edits_json.py, edits_tensors.py, edits_files.py | the mutations: of JSON, of safetensors files, of bytes and folders |
| lies.py | a Hub that answers wrongly |
| mutating.py | which mutations a trial makes |
| trial.py | one command line after the other in a trial's folder, and what it left there |
| scenes.py | the kinds of trials: what is run, and which answers would be false |
| reading.py | tensors read by the safetensors library, without kconv |
| running.py | trials in forked processes, with limits of time and memory |
| `__main__.py` | `python -m tests.fuzz --trials N --seed S [--kind KIND] [--jobs N] [--only I,J]` |

A trial fails when a command shows a traceback, ends with another code than 0, 1, 2, 3 or 130, blames an unexpected
error, prints control characters or a token, writes outside OUT, leaves anything after exit 2, or gives a false answer.
"""
