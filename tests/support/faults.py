"""The table of faults: what happens to whom at which stage of a request for a picture, and how that ends.

It is run in one process with scripted workers (`integration/proxy/test_faults.py`) and on real processes
(`chaos/test_faults.py`); each harness takes the rows whose stage and act it knows.
"""

from __future__ import annotations

from dataclasses import dataclass

#: (re-encoded, digest of the damage, token of the failed lease) of one encoder job.
Job = tuple[bool, str, str]
FIRST: Job = (False, "", "")
AGAIN: Job = (True, "", "")
#: A SHA-1, as digests of damaged values are.
DAMAGE = "11f6ad8ec52a2984abaafd7c3b516503785c2072"


@dataclass(frozen=True)
class Fault:
    """`pool`'s worker, one of `workers`, does `act` at `stage`."""

    pool: str
    act: str
    stage: str
    workers: int = 1
    status: int = 200
    #: Times that a tower begins with the item; None: any.
    encodings: int | None = 1
    #: The attempt that ends the request.
    attempts: int = 1
    #: Encoder jobs; None: what `encodings` says is all.
    jobs: tuple[Job, ...] | None = None

    def __str__(self) -> str:
        return f"{self.pool} of {self.workers} {self.act} ({self.stage})"


FAULTS = (
    Fault("encoder", "dies", "queued", 1, encodings=None),
    Fault("encoder", "dies", "queued", 2, encodings=None),
    Fault("encoder", "dies", "encoding", 1, encodings=2, jobs=(FIRST, FIRST)),
    Fault("encoder", "dies", "encoding", 2, encodings=2, jobs=(FIRST, FIRST)),
    Fault("encoder", "stalls", "encoding", 2, encodings=2),
    Fault("encoder", "is silent", "queued", 1),
    Fault("encoder", "is silent", "queued", 2, encodings=None),
    Fault("encoder", "says nothing more", "encoding", 2, encodings=2),
    Fault("encoder", "fails twice", "asked", jobs=(FIRST, FIRST, FIRST)),
    Fault("encoder", "fails every try", "asked", status=500, encodings=0, attempts=0, jobs=(FIRST,) * 4),
    Fault("encoder", "names another owner", "asked", 2),
    Fault("encoder", "names an owner that is gone", "asked", jobs=(FIRST, (False, "", "gone"))),
    Fault("store", "loses the item", "stored", encodings=2, jobs=(FIRST, AGAIN)),
    Fault("store", "damages the item", "stored", encodings=2, jobs=(FIRST, (True, DAMAGE, ""))),
    Fault("store", "loses the item every time", "stored", status=503, encodings=None),
    Fault("store", "hangs and is killed", "encoding", encodings=None),
    Fault("store", "is gone for five seconds", "encoding", encodings=None),
    Fault("pd", "dies", "saved", 1),
    Fault("pd", "dies", "saved", 2),
    Fault("pd", "dies", "prefill", 1),
    Fault("pd", "dies", "prefill", 2),
    Fault("pd", "dies", "stream", 1, attempts=2),
    Fault("pd", "dies", "stream", 2, attempts=2),
    Fault("pd", "stalls", "stream", 2, attempts=2),
    Fault("pd", "is silent", "stream", 2, attempts=2),
    Fault("pd", "breaks its stream", "stream"),
    Fault("pd", "ends the request as unavailable", "stream", attempts=2),
    Fault("pd", "says what cannot be", "stream", status=500),
    Fault("pd", "refuses as unavailable", "asked", attempts=2),
    # Alone its item may be encoded meanwhile.
    Fault("pd", "is full, and so is the other", "asked", 2, status=429, encodings=None, attempts=2),
    Fault("pd", "repeats every frame", "asked"),
)
