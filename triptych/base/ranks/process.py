"""`python -m triptych.base.ranks.process LEADER CONNECTION BEATS RENDEZVOUS`: the process of one rank.

LEADER is the process id of rank 0, the others are descriptors that this process inherits. It ends with rank
0, whatever that ends by: at once by Linux's parent-death signal, else when the connection closes.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from triptych.base.errors import ConfigError
from triptych.base.log import setup_logging
from triptych.base.ranks.channel import BeatPage, Channel, RankLost
from triptych.base.ranks.rank import Rank, RankStart

#: The only modules that a rank's process imports by name.
PROGRAMS = {
    "encoder": "triptych.encoder_worker.ranks.program",
    "pd": "triptych.pd_worker.ranks.program",
}


def program(name: str) -> Callable[[Rank], None]:
    """The program of this name; KeyError for any other."""
    main: Callable[[Rank], None] = importlib.import_module(PROGRAMS[name]).main
    return main


logger = logging.getLogger(__name__)

#: Seconds that rank 0 has to say what this rank is.
START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with(leader: int) -> None:
    """Makes Linux kill this process when rank 0 ends. A rank has nothing to give back.

    The signal comes at the end of the *thread* that started this process; see `RankProcess`.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:
        sys.exit("triptych: rank 0 is gone")
    # Of a whole service or terminal; rank 0 drains, and then ends the others.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def run(connection: int, beats: int, rendezvous: int) -> int:
    """Runs the program that rank 0 names, until rank 0 closes the connection; the exit code."""
    channel = Channel(socket.socket(fileno=connection), "rank 0")
    message, _ = channel.receive(seconds=START_SECONDS)
    start = RankStart(**message)
    name = f"{start.service}-rank{start.rank}"
    os.environ["TRIPTYCH_SERVICE"] = name
    setup_logging(name, start.config.get("log_level", "info"), start.config.get("log_format", "text"))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])
    rank = Rank(start, channel, BeatPage(beats, start.size), rendezvous)
    try:
        program(start.program)(rank)
    except Exception as error:
        if not isinstance(error, ConfigError):
            logger.critical("the rank does not start", exc_info=True)
        rank.fail(error)
        return 1
    return 0


def main() -> None:
    """The process; its threads, which may hang, do not keep it from ending."""
    leader, *descriptors = map(int, sys.argv[1:])
    end_with(leader)
    code = 0
    try:
        code = run(*descriptors)
    except RankLost as lost:
        # Its end, in most cases; no worker of its own goes on.
        logger.debug("%s", lost)
    except BaseException:
        logger.critical("the rank has died", exc_info=True)
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
