"""The gate: the FUSE file system that overlayfs asks for content that is not here yet.

Its root has a directory ``g<number>`` for each image record (``g0``: no image known), and ``v``.
Below them are the names of objects. No directory lists anything; names are for asking.

- A LOOKUP in ``g<number>`` means that overlayfs found no such object. The gate gets the content
  and answers ENOENT, so that overlayfs goes on and finds it in the next layer, a plain local file.
  Failure is ENOENT too. A large file, one that a chmod or the like asks for, or any while the disk
  is full, is answered with a FUSE file instead, whose READs fetch what they need.
- A LOOKUP in ``v``, the last layer, is the verdict: EIO, or ESTALE if the content is here after
  all, upon which the kernel repeats the whole open by itself.

overlayfs keeps a FUSE file as long as the view needs it, so a name that was answered with one is
answered with the same until the kernel has forgotten it (``NodeJournal``), and no entry is ever
invalidated. Nothing else is remembered: a successor on the same descriptor needs only the journal.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import structlog
import trio

from snapshotter.config import Config
from snapshotter.errors import DiskFullError, InvalidInputError, SnapshotterError, UnavailableError
from snapshotter.fuse import replies, wire
from snapshotter.fuse.dev_fuse import Session
from snapshotter.fuse.server import Answer, Operation
from snapshotter.fuse.wire import Header, Opcode
from snapshotter.kernel_view import asker, gate_nodes
from snapshotter.kernel_view.content_store import ContentStore
from snapshotter.kernel_view.node_journal import CONTENT_NODE, NodeJournal
from snapshotter.names import ContentName
from snapshotter.telemetry import Counters
from snapshotter.vfs import Attr

FOREVER_NS = (1 << 40) * 1_000_000_000
_SIGNAL_INTERVAL_S = 0.2
_ROUNDS = 8
"""How often the READs that wait are looked through within their deadline."""

_log = structlog.get_logger()


class Gate:
    """Answers the requests of one gate mount.

    Operations run on the session's thread and answer at once what needs no waiting; the rest is
    done and answered by trio tasks. ``on_resolvable`` is called (on the trio loop or the session's
    thread) with contents that views may hold as FUSE files and that are objects now.
    """

    def __init__(
        self,
        store: ContentStore,
        journal: NodeJournal,
        *,
        config: Config,
        counters: Counters,
        on_resolvable: Callable[[ContentName], None] = lambda _name: None,
    ) -> None:
        self._store = store
        self._journal = journal
        self._config = config
        self._counters = counters
        self._on_resolvable = on_resolvable
        self._pending: dict[int, int] = {}  # unique → thread id of the asker
        self._waiting: dict[int, tuple[int, ContentName]] = {}  # unique → since which round
        self._round = 0
        self._session: Session | None = None
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def operations(self) -> dict[Opcode, Operation]:
        """What a ``fuse.server.Server`` is to be made with."""
        return {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.READ: self._read,
            Opcode.READDIR: lambda _header, _message: b"",
            Opcode.STATFS: lambda _header, _message: _STATFS,
            Opcode.INTERRUPT: self._interrupt,
            Opcode.FORGET: lambda header, message: self._forget([(header.nodeid, message.lookups)]),
            Opcode.BATCH_FORGET: lambda _header, message: self._forget(message.forgets),
        }

    async def serve(
        self, session: Session, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serves until the gate is unmounted.

        If cancelled it leaves requests unanswered and its thread in read(2), which only the end of
        the process or of the mount ends; a successor then makes the kernel repeat the requests.
        """
        async with trio.open_nursery() as nursery:
            self._session, self._nursery = session, nursery
            self._token = trio.lowlevel.current_trio_token()
            nursery.start_soon(self._give_up_in_time)
            task_status.started()
            try:
                await trio.to_thread.run_sync(
                    session.run, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                )
            finally:
                session.stop()  # the store may be closed next
                self._nursery = None
                nursery.cancel_scope.cancel()

    async def drop_pages(self, names: Iterable[ContentName]) -> None:
        """Makes the kernel read these contents anew, where it keeps what was read through here."""
        for name in names:
            if self._session is not None and self._journal.has(name):
                nodeid = self._journal.nodeid(name)
                await trio.to_thread.run_sync(
                    self._session.drop_pages, nodeid, abandon_on_cancel=True
                )

    # Names

    def _lookup(self, header: Header, message: wire.Lookup) -> Answer:
        parent = header.nodeid
        if parent & CONTENT_NODE:
            return errno.ENOTDIR
        if parent == wire.ROOT_NODEID:
            nodeid = gate_nodes.directory_in_root(message.name)
        elif parent & gate_nodes.FAN_OUT_BIT:
            return self._lookup_content(header, message.name)
        else:
            nodeid = gate_nodes.fan_out(parent, message.name)
        if nodeid is None:
            return errno.EIO if gate_nodes.is_verdict(parent) else errno.ENOENT
        return _entry(nodeid, _directory_attr(nodeid))

    def _lookup_content(self, header: Header, file: bytes) -> Answer:
        self._counters.add("lookups")
        try:
            name = ContentName.parse(b"%02x" % (header.nodeid & 0xFF), file)
        except InvalidInputError:
            # No content can have this name; but a file that asks for it by it cannot be served.
            return errno.EIO if gate_nodes.is_verdict(header.nodeid) else errno.ENOENT
        if gate_nodes.is_verdict(header.nodeid):
            return self._verdict(name)
        is_here = self._store.has(name)
        if self._journal.has(name):
            if is_here:
                self._on_resolvable(name)
            return self._file_entry(name)
        if is_here:
            return errno.ENOENT
        if asker.is_metadata_only(header.pid):
            self._counters.add("metadata_only_lookups")
            return self._file_entry(name)
        image = gate_nodes.image_number(header.nodeid)
        self._begin(header, self._fetch_for_lookup, header.unique, name, image)
        return None

    def _verdict(self, name: ContentName) -> Answer:
        self._counters.add("verdicts")
        return errno.ESTALE if self._store.has(name) else errno.EIO

    def _file_entry(self, name: ContentName) -> bytes:
        nodeid = self._journal.add(name)
        return _entry(nodeid, _file_attr(nodeid, name.size))

    def _forget(self, forgets: Iterable[tuple[int, int]]) -> None:
        self._counters.add("nodes_forgotten", self._journal.forget(forgets))

    async def _fetch_for_lookup(self, unique: int, name: ContentName, image: int) -> None:
        is_streamed = name.size > self._config.large_file_bytes

        async def fetch() -> None:
            nonlocal is_streamed
            if is_streamed:
                await self._store.prepare_partial(name, image=image)
                return
            try:
                await self._store.materialise(name, image=image)
            except DiskFullError:
                self._counters.add("unkept_lookups")
                is_streamed = True

        is_ready = await self._attempt("lookup", name, fetch)
        answer: Answer = errno.ENOENT
        try:
            # Whatever became of the fetch: a name that got a node meanwhile keeps it.
            if self._journal.has(name) or (is_ready and is_streamed and not self._store.has(name)):
                answer = self._file_entry(name)
        except (OSError, SnapshotterError) as error:
            self._report("lookup", name, error)
        self._finish(unique, answer)

    # Attributes and content

    def _getattr(self, header: Header, _message: wire.GetAttr) -> Answer:
        nodeid = header.nodeid
        if not nodeid & CONTENT_NODE:
            return replies.encode_attr(_directory_attr(nodeid), timeout_ns=FOREVER_NS)
        name = self._journal.name(nodeid)
        if name is None:
            return self._unknown("getattr", nodeid)
        return replies.encode_attr(_file_attr(nodeid, name.size), timeout_ns=FOREVER_NS)

    def _read(self, header: Header, message: wire.Read) -> Answer:
        self._counters.add("reads")
        name = self._journal.name(header.nodeid)
        if name is None:
            return self._unknown("read", header.nodeid)
        length = min(message.size, name.size - message.offset)
        if length <= 0:
            return b""
        try:
            data = self._store.read_ready(name, message.offset, length)
        except (OSError, SnapshotterError) as error:
            self._report("read", name, error)
            return errno.EIO
        if data is None:
            self._read_later(header, name, message.offset, length)
        return data

    def _read_later(self, header: Header, name: ContentName, offset: int, length: int) -> None:
        """Has a READ answered by whoever brings the last of its chunks, else by a task."""
        unique = header.unique

        def take(data: bytes | memoryview | None) -> None:
            if self._waiting.pop(unique, None) is None:
                return  # it was given up
            if data is not None:
                self._finish(unique, data)
            elif unique in self._pending:
                self._run_soon(self._fetch_for_read, unique, name, offset, length)

        self._pending[unique] = header.pid
        self._waiting[unique] = (self._round, name)
        if not self._store.read_later(name, offset, length, take):
            del self._waiting[unique]
            self._run_soon(self._fetch_for_read, unique, name, offset, length)
        self._mind_resent(header)

    async def _give_up_in_time(self) -> None:
        """Ends the READs that have waited, without a task, until their deadline."""
        deadline_s = self._config.lookup_deadline_s
        while True:
            await trio.sleep(deadline_s / _ROUNDS)
            self._round += 1
            for unique, (since, name) in list(self._waiting.items()):
                if self._round - since <= _ROUNDS or self._waiting.pop(unique, None) is None:
                    continue
                if unique in self._pending:
                    self._report("read", name, _too_late(deadline_s))
                    self._finish(unique, errno.EIO)

    async def _fetch_for_read(
        self, unique: int, name: ContentName, offset: int, length: int
    ) -> None:
        is_large = name.size > self._config.large_file_bytes
        data: bytes | memoryview | None = None

        async def fetch() -> None:
            nonlocal data
            await self._store.ensure(name, offset, length)
            data = self._store.read_ready(name, offset, length)
            if data is None:
                raise UnavailableError("it was evicted as soon as it was here; read it again")

        await self._attempt("read", name, fetch)
        self._finish(unique, errno.EIO if data is None else data)
        if data is not None and not is_large and self._store.has(name):
            self._on_resolvable(name)

    def _unknown(self, operation: str, nodeid: int) -> int:
        self._counters.add("failures")
        _log.error("unknown node; is the node journal lost?", operation=operation, nodeid=nodeid)
        return errno.EIO

    # Requests that wait

    def _begin(
        self, header: Header, serve: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        """Has a request served by a trio task; from the session's thread."""
        self._pending[header.unique] = header.pid
        self._run_soon(serve, *arguments)
        self._mind_resent(header)

    def _run_soon(self, serve: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        assert self._token is not None
        with suppress(trio.RunFinishedError):  # a successor will be asked again
            self._token.run_sync_soon(self._start, serve, *arguments)

    def _start(self, serve: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(serve, *arguments)

    def _finish(self, unique: int, answer: Answer) -> None:
        """Answers a request unless it was answered; from any thread."""
        if self._pending.pop(unique, None) is None:
            return
        assert self._session is not None
        try:
            self._session.reply(unique, answer)
        except OSError as error:
            self._counters.add("failures")
            _log.error("reply failed", operation="reply", unique=unique, cause=str(error))

    async def _attempt(
        self, operation: str, name: ContentName, fetch: Callable[[], Coroutine[Any, Any, None]]
    ) -> bool:
        """Runs ``fetch`` within the deadline (the store's own work goes on); failure is logged."""
        deadline_s = self._config.lookup_deadline_s
        with trio.move_on_after(deadline_s):
            try:
                await fetch()
                return True
            except (OSError, SnapshotterError) as error:
                self._report(operation, name, error)
            except Exception as error:  # noqa: BLE001 - one request must not end the others
                self._report(operation, name, error, is_unforeseen=True)
            return False
        self._report(operation, name, _too_late(deadline_s))
        return False

    def _report(
        self, operation: str, name: ContentName, error: Exception, *, is_unforeseen: bool = False
    ) -> None:
        self._counters.add("failures")
        _log.error(
            "content not served",
            operation=operation,
            object=str(name),
            cause=str(error) or type(error).__name__,
            exc_info=error if is_unforeseen else None,
        )

    # Signals to askers

    def _interrupt(self, _header: Header, message: wire.Interrupt) -> Answer:
        self._counters.add("interrupts")
        tid = self._pending.get(message.unique)
        if tid is not None:
            self._mind_signals(message.unique, tid)
        return None

    def _mind_resent(self, header: Header) -> None:
        if header.unique & wire.RESENT:
            # Its asker may have got a signal, and us an INTERRUPT, while nobody served.
            self._mind_signals(header.unique, header.pid)

    def _mind_signals(self, unique: int, tid: int) -> None:
        """Lets an asker die that is being killed, now or when it comes to that.

        The kernel tells of an asker's first signal only. If that one has a handler nothing is
        answered (the call would fail), so it takes a watch to see a later SIGKILL.
        """
        if asker.is_being_killed(tid):
            self._finish(unique, errno.EINTR)
        elif tid != 0 and self._token is not None:
            self._token.run_sync_soon(self._start, self._watch_signals, unique, tid)

    async def _watch_signals(self, unique: int, tid: int) -> None:
        while unique in self._pending:
            if asker.is_being_killed(tid):
                self._finish(unique, errno.EINTR)
            await trio.sleep(_SIGNAL_INTERVAL_S)


def _too_late(deadline_s: float) -> UnavailableError:
    return UnavailableError(f"not here within {deadline_s:g} s")


_STATFS = replies.encode_statfs(blocks=1 << 20, free=1 << 19, files=1 << 20)


def _entry(nodeid: int, attr: Attr) -> bytes:
    return replies.encode_entry(
        nodeid, attr, entry_timeout_ns=FOREVER_NS, attr_timeout_ns=FOREVER_NS
    )


def _directory_attr(nodeid: int) -> Attr:
    return _attr(nodeid, mode=stat.S_IFDIR | 0o555, nlink=2, size=0)


def _file_attr(nodeid: int, size: int) -> Attr:
    return _attr(nodeid, mode=stat.S_IFREG | 0o444, nlink=1, size=size)


def _attr(nodeid: int, *, mode: int, nlink: int, size: int) -> Attr:
    return Attr(nodeid, mode, nlink, 0, 0, 0, size, -(-size // 512), 0, 0, 0)
