"""A worker's mappings of host copies in files, kept while the files are: to map 67 MB costs milliseconds."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field

#: A mapping of fewer bytes is made anew each time: it costs less than a descriptor.
_KEPT_BYTES = 1 << 20


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Mapping:
    """A file's open description, whose lock its readers share, and its pages."""

    file: int
    mapped: mmap.mmap = field(repr=False)
    readers: int = 0


class MappedCopies:
    """The mappings of one worker. While rows are in a file, a shared lock keeps it from other items."""

    def __init__(self) -> None:
        #: Views end in whichever thread drops them, also in one that is in here.
        self._lock = threading.RLock()
        self._mappings: dict[str, _Mapping] = {}

    def view(self, path: str, nbytes: int) -> memoryview:
        """The first `nbytes` of a copy's file. As long as the view lives, nobody else gets the file."""
        with self._lock:
            mapping = self._mappings.get(path)
            if mapping is None or len(mapping.mapped) < nbytes:
                self._drop_removed()
                mapping = _mapping(path, nbytes)
                if nbytes >= _KEPT_BYTES:
                    self._mappings[path] = mapping
            if not mapping.readers:
                fcntl.flock(mapping.file, fcntl.LOCK_SH)
            mapping.readers += 1
        view = memoryview(mapping.mapped)[:nbytes]
        weakref.finalize(view, self._end, path, mapping).atexit = False
        return view

    def _end(self, path: str, mapping: _Mapping) -> None:
        with self._lock:
            mapping.readers -= 1
            if mapping.readers:
                return
            fcntl.flock(mapping.file, fcntl.LOCK_UN)
            if self._mappings.get(path) is mapping and _is_removed(mapping):
                del self._mappings[path]

    def _drop_removed(self) -> None:
        kept = {path: one for path, one in self._mappings.items() if one.readers or not _is_removed(one)}
        self._mappings = kept


def _mapping(path: str, nbytes: int) -> _Mapping:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = _Mapping(file, mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    except BaseException:
        os.close(file)
        raise
    weakref.finalize(mapping, os.close, file).atexit = False
    return mapping


def _is_removed(mapping: _Mapping) -> bool:
    return os.fstat(mapping.file).st_nlink == 0
