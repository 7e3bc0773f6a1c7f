"""A local HTTP server that speaks the Hub's protocol to the real, unmodified huggingface_hub client.

| file | holds |
|---|---|
| store.py | repositories, commits, objects |
| api.py | repository API, access, refs, pull requests |
| transfer.py | preupload, LFS, commit, resolve |
| xet.py | xet uploads and downloads by the real hf_xet |
| wire.py | HTTP: ranges, chunked bodies, the log |
| faults.py | statuses, rate limits, cuts, kills, lies on demand |
| lies.py | the table of what a Hub may lie about, and what has to come of it |
| server.py | `HubServer`, which puts them together |
| fixtures.py | the pytest fixture `hub` |
"""

from tests.hubserver.faults import Fault
from tests.hubserver.server import OTHER_TOKEN, READ_TOKEN, WRITE_TOKEN, HubServer

__all__ = ["OTHER_TOKEN", "READ_TOKEN", "WRITE_TOKEN", "Fault", "HubServer"]
