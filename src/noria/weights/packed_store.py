"""The folder of packed files, which all processes of this user share.

A packed file is named by what determines it: this layout's version, the content of the checkpoint, the parameters, the
quantization. The content is hashed once; later it is known by the files' paths, sizes and times. A file is written aside and
renamed, under a lock, so that it is there whole or not at all; readers hold a shared lock while they map it, and what is locked
is not evicted. A file that is not what it should be is packed again, never trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from noria.weights.checkpoint import Checkpoint
from noria.weights.packed_file import Packed, Unusable, map_file, read_header
from noria.weights.packing import Progress, pack_to_file
from noria.weights.packing_plan import Plan
from noria.weights.params import Param
from noria.weights.shared_files import lock, remove_unused, sync_folder, write_atomically

PACKER_VERSION = 1  # raise it when the layout or the packed values change
MAX_CACHE_BYTES = 20 << 30
_MAX_KNOWN_CONTENTS = 256
_LOCKS = 16
_STALE_SECONDS = 3600  # an unlocked temporary file of this age belongs to no packer, not even to one about to lock it

log = logging.getLogger("noria.weights")


def key_of(content: str, params: Sequence[Param], quantization: str | None) -> str:
    """The name of the packed file that these determine, as 32 hex digits."""
    determined_by = msgspec.json.encode([PACKER_VERSION, content, quantization, list(params)])
    return hashlib.blake2b(determined_by, digest_size=16).hexdigest()


class Store:
    """The folder of packed files: `KEY.noria`, `KEY.*.tmp` while one is written, `lock-?`, and `contents/`, known hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load_or_pack(
        self, checkpoint: Checkpoint, params: Sequence[Param], quantization: str | None, progress: Progress | None
    ) -> Packed:
        """OSError if the folder cannot be used."""
        self.folder.mkdir(parents=True, exist_ok=True)
        key = key_of(self.content(checkpoint), params, quantization)
        path = self.folder / f"{key}.noria"
        packed = self._open(path, key)
        if packed is not None:
            return packed
        with self._packer_lock(key):
            packed = self._open(path, key)  # another process may have packed it meanwhile
            if packed is not None:
                return packed
            self._pack(Plan(checkpoint, params, quantization), key, path, progress)
            packed = self._open(path, key)
        if packed is None:
            raise OSError(errno.EIO, "a file just written does not read back")
        self._evict()
        return packed

    def content(self, checkpoint: Checkpoint) -> str:
        """The checkpoint's fingerprint: remembered for files with these paths, sizes and times, or computed."""
        before = _identity(checkpoint.weight_files)
        known = self.folder / "contents" / before
        with contextlib.suppress(OSError, UnicodeDecodeError):
            content = known.read_text()
            if re.fullmatch(r"[0-9a-f]{32}", content):
                os.utime(known)
                return content
        content = checkpoint.fingerprint
        with contextlib.suppress(OSError):
            if _identity(checkpoint.weight_files) == before:
                known.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(known, content.encode())
        return content

    def _open(self, path: Path, key: str) -> Packed | None:
        """Map a packed file, or say in the log why it is not used."""
        try:
            with path.open("rb") as file:
                lock(file, fcntl.LOCK_SH)
                header = read_header(file)
                if header.key != key:
                    raise Unusable("it was made for something else")
                packed = map_file(file, header)
        except FileNotFoundError:
            return None
        except Unusable as error:
            log.warning("%s: %s; packing again", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # eviction goes by last use
        return packed

    def _pack(self, plan: Plan, key: str, path: Path, progress: Progress | None) -> None:
        for stale in self.folder.glob(f"{key}.*.tmp"):  # of a packer that was killed: we hold its lock
            stale.unlink(missing_ok=True)
        if shutil.disk_usage(self.folder).free < plan.end:
            raise OSError(errno.ENOSPC, f"{plan.end >> 20} MB are needed and the disk is full")
        temporary = self.folder / f"{key}.{os.getpid()}.tmp"
        try:
            with temporary.open("xb") as file:
                lock(file, fcntl.LOCK_SH)
                pack_to_file(plan, key, file, progress)
                temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)

    @contextlib.contextmanager
    def _packer_lock(self, key: str) -> Iterator[None]:
        """One packer a key. The few lock files are shared by all keys and stay: removing one would race with its next user."""
        with (self.folder / f"lock-{int(key[:8], 16) % _LOCKS:x}").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process that is packing weights")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _evict(self) -> None:
        """Bring the folder under its limit: least recently used first, never what is in use (as what was just packed is)."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.tmp"):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    remove_unused(path)
            ages = sorted((s.st_mtime_ns, s.st_size, p) for p in self.folder.glob("*.noria") for s in [p.stat()])
            excess = sum(size for _, size, _ in ages) - MAX_CACHE_BYTES
            for _, size, path in ages:
                if excess > 0 and remove_unused(path):
                    excess -= size
            known = sorted((self.folder / "contents").iterdir(), key=lambda p: p.stat().st_mtime_ns)
            for path in known[: max(0, len(known) - _MAX_KNOWN_CONTENTS)]:
                path.unlink(missing_ok=True)


def _identity(files: Sequence[Path]) -> str:
    """The files' paths, sizes and times, as 32 hex digits."""
    stats = [(str(f), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()]]
    return hashlib.blake2b(msgspec.json.encode(stats), digest_size=16).hexdigest()
