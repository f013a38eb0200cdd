"""What the folder holds as far as this process knows, and what has to go to make room."""

from __future__ import annotations

import contextlib

from rag_windows.cache.folders import Folders
from rag_windows.cache.ledger import Ledger, read_ledger, write_ledger
from rag_windows.cache.listing import list_entries
from rag_windows.cache.locks import Lock
from rag_windows.cache.naming import entry_name, parse_name, writing_name
from rag_windows.cache.policy import Policy
from rag_windows.cache.quarantine import put_aside_bytes, trim

_GENERATIONS = 1 << 63


class Catalog:
    """Bookkeeping of one process over a folder that several share.

    Not thread-safe: the tier's mutex guards it. Methods that take the lock around changes need it
    held, so that the ledger, the folder and this process agree.

    Args:
        limit_bytes: most bytes of entries, of files being written and of files put aside.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.policy = Policy(limit_bytes)
        self.evictions = 0
        self._names: dict[str, list[str]] = {}
        self._sizes: dict[str, int] = {}
        self._writing: set[str] = set()
        self._generation = -1

    def sync(self, folders: Folders, lock: Lock) -> Ledger:
        """List the folder, drop what is over the limit, and write the ledger anew.

        Raises:
            OSError: if the system can't.
        """
        found = list_entries(folders, self._writing)
        for key, size in list(self._sizes.items()):
            if key not in found or found[key].nbytes != size:
                self.forget(key)
        nbytes = put_aside_bytes(folders) + sum(held.nbytes for held in found.values())
        self._names = {key: held.names for key, held in found.items()}
        self._sizes = {key: held.nbytes for key, held in found.items()}
        unknown = [key for key in found if key not in self.policy]
        unknown.sort(key=lambda key: found[key].usage.last_used)
        for key in unknown:
            held = found[key]
            victims = self.policy.restore(
                key, held.nbytes, held.usage.cost_s, held.usage.uses, float(held.usage.last_used)
            )
            nbytes -= self._evict(folders, [key] if victims is None else victims)
        if nbytes > self.limit_bytes:
            nbytes -= trim(folders, 0, keep=0)
        before = read_ledger(folders.files, lock.descriptor)
        generation = (0 if before is None else before.generation + 1) % _GENERATIONS
        ledger = Ledger(generation, nbytes)
        write_ledger(folders.files, lock.descriptor, ledger)
        self._generation = generation
        return ledger

    def reserve(
        self, folders: Folders, lock: Lock, key: str, nbytes: int, cost_s: float
    ) -> tuple[str, int] | None:
        """Make room for an entry and open a new file for it, which holds the room.

        What was there under the key before goes.

        Returns:
            The file's name and descriptor, with the file's lock held; None if the entry is not
            worth what would have to go, or doesn't fit.

        Raises:
            OSError: if the system can't; nothing is reserved then.
        """
        ledger = read_ledger(folders.files, lock.descriptor)
        if ledger is None or (
            ledger.generation != self._generation
            and max(ledger.nbytes, self.policy.nbytes) + nbytes > self.limit_bytes
        ):
            ledger = self.sync(folders, lock)
        synced = ledger.generation == self._generation
        victims = self.policy.admit(key, nbytes, cost_s)
        if victims is None:
            return None
        try:
            held = ledger.nbytes - self._evict(folders, victims) - self._drop_files(folders, key)
            if held + nbytes > self.limit_bytes:
                # A writer died, or files put aside take the room.
                trim(folders, 0, keep=0)
                self.policy.forget(key)
                ledger = self.sync(folders, lock)
                held, synced = ledger.nbytes, True
                victims = self.policy.admit(key, nbytes, cost_s)
                held -= self._evict(folders, victims or [])
                if victims is None or held + nbytes > self.limit_bytes:
                    self.policy.forget(key)
                    self._note(folders, lock, ledger, held, synced)
                    return None
            self._note(folders, lock, ledger, held + nbytes, synced)
            name = writing_name(key, nbytes)
            descriptor = folders.files.open_new(name, folders.entries)
        except OSError:
            self.forget(key)
            self._generation = -1
            raise
        self._writing.add(name)
        self._names[key], self._sizes[key] = [name], nbytes
        try:
            folders.files.lock(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                folders.files.close(descriptor)
            self.give_up(folders, lock, key, name)
            raise
        return name, descriptor

    def written(self, key: str, name: str) -> None:
        """The file of `reserve` has become the entry's."""
        self._writing.discard(name)
        if name in self._names.get(key, ()):
            self._names[key] = [entry_name(key)]

    def give_up(self, folders: Folders, lock: Lock | None, key: str, name: str) -> None:
        """The file of `reserve` will not become the entry's; it goes.

        Without the lock the ledger counts its bytes on, until the folder is listed again.
        """
        self._writing.discard(name)
        if name in self._names.get(key, ()):
            self.forget(key)
        try:
            folders.files.remove(name, folders.entries)
            reserved = parse_name(name)
            if lock is not None and reserved is not None and reserved.reserved is not None:
                self._change(folders, lock, -reserved.reserved)
        except OSError:
            self._generation = -1

    def drop(self, folders: Folders, lock: Lock | None, key: str) -> bool:
        """Remove what is there under a key; False if nothing was.

        Raises:
            OSError: if the system can't.
        """
        freed = self._drop_files(folders, key)
        self.forget(key)
        if freed and lock is not None:
            self._change(folders, lock, -freed)
        return freed > 0

    def forget(self, key: str) -> None:
        """What was there under a key is gone."""
        self.policy.forget(key)
        self._names.pop(key, None)
        self._sizes.pop(key, None)

    def trim_aside(self, folders: Folders, lock: Lock, limit_bytes: int, keep: int) -> None:
        """Bound the files put aside.

        Raises:
            OSError: if the system can't.
        """
        freed = trim(folders, limit_bytes, keep)
        if freed:
            self._change(folders, lock, -freed)

    def _evict(self, folders: Folders, keys: list[str]) -> int:
        freed = 0
        for key in keys:
            freed += self._drop_files(folders, key)
            self._sizes.pop(key, None)
            self.evictions += 1
        return freed

    def _drop_files(self, folders: Folders, key: str) -> int:
        """Remove a key's files; returns the bytes that this freed."""
        freed = 0
        for text in {entry_name(key), *self._names.pop(key, ())}:
            name = parse_name(text)
            try:
                if name is not None and name.reserved is not None:
                    nbytes = name.reserved
                else:
                    nbytes = folders.files.state_of(text, folders.entries).size
                folders.files.remove(text, folders.entries)
            except (FileNotFoundError, IsADirectoryError):
                continue
            freed += nbytes
        return freed

    def _change(self, folders: Folders, lock: Lock, nbytes: int) -> None:
        ledger = read_ledger(folders.files, lock.descriptor)
        if ledger is None:
            self._generation = -1  # the next one who needs room lists the folder
        else:
            synced = ledger.generation == self._generation
            self._note(folders, lock, ledger, ledger.nbytes + nbytes, synced)

    def _note(
        self, folders: Folders, lock: Lock, ledger: Ledger, nbytes: int, synced: bool
    ) -> None:
        """Write the ledger; who knew the folder before the change knows it after it."""
        after = Ledger((ledger.generation + 1) % _GENERATIONS, nbytes)
        write_ledger(folders.files, lock.descriptor, after)
        self._generation = after.generation if synced else -1
