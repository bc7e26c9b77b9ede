"""`python -m support.ranks.leader`: starts two ranks, prints the process ids, and waits to be killed."""

from __future__ import annotations

import time

from support.ranks.groups import obedient_group

if __name__ == "__main__":
    group = obedient_group(3)
    group.start()
    group.wait_ready()
    group.send({"do": "hang"}, to=2)
    print(*group.pids, flush=True)
    time.sleep(3600)
