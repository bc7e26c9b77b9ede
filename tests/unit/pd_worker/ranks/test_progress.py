"""Wake-ups through a pipe: every write is heard, none blocks, and the listener ends with the last writer."""

from __future__ import annotations

import os
import threading

from triptych.pd_worker.ranks.decoder_ranks import ProgressListener, ProgressWriter

PATIENCE = 30.0


def test_a_write_wakes_the_listener_and_the_last_writers_end_ends_it() -> None:
    heard = threading.Semaphore(0)
    listener = ProgressListener(heard.release)
    writers = [ProgressWriter(listener.descriptor) for _ in range(2)]
    listener.handed_out()
    for writer in writers:
        writer.write()
        assert heard.acquire(timeout=PATIENCE)
    for writer in writers:
        writer.close()
    listener.join()
    assert not any(thread.name == "rank-progress" for thread in threading.enumerate())


def test_a_writer_never_blocks_and_a_listener_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    writer = ProgressWriter(writing)
    os.close(writing)
    for _ in range(100_000):  # more than a pipe holds
        writer.write()
    os.close(reading)
    writer.write()
    writer.close()
