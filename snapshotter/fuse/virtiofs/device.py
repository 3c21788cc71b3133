"""A vhost-user device: what each message of the front end does to memory and queues.

One connection, one device. Its control thread is the one that calls ``serve``; each queue has a
thread of its own. It knows nothing of FUSE: a Handler says what a request means.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from snapshotter.errors import InvalidInputError, UnsupportedError
from snapshotter.fuse.virtiofs import vhost_user
from snapshotter.fuse.virtiofs.memory import GuestMemory
from snapshotter.fuse.virtiofs.queue import Handler, Queue, Report
from snapshotter.fuse.virtiofs.vhost_user import Feature, Message, ProtocolFeature, Request
from snapshotter.fuse.virtiofs.vring import MAX_SIZE, is_supported_machine

MAX_QUEUES = 65
"""Generous: a front end that was told of fewer than it has goes on to use them all the same, and
its guest hangs (seen with QEMU 7.2). A queue costs nothing before it is used."""

FEATURES = Feature.VERSION_1 | Feature.PROTOCOL_FEATURES | Feature.INDIRECT_DESC
"""Without the event index: it saves the server no time, and needs a fence that Python lacks."""

PROTOCOL_FEATURES = ProtocolFeature.MQ | ProtocolFeature.REPLY_ACK


class Device:
    """Serves one front end until it hangs up."""

    def __init__(self, connection: socket.socket, handler: Handler, report: Report) -> None:
        """The connection stays the caller's. UnsupportedError where rings cannot be served."""
        if not is_supported_machine():
            raise UnsupportedError(
                "virtio-fs: virtqueues are served on x86-64 only; this processor's memory "
                "ordering is not provided for"
            )
        self._connection = connection
        self._handler = handler
        self._report = report
        self._features = Feature(0)
        self._protocol_features = ProtocolFeature(0)
        self._memory: GuestMemory | None = None
        self._queues: dict[int, Queue] = {}
        self._actions: dict[int, Callable[[Message], bytes | None]] = {
            Request.GET_FEATURES: self._get_features,
            Request.SET_FEATURES: self._set_features,
            Request.SET_OWNER: self._set_owner,
            Request.RESET_OWNER: self._set_owner,
            Request.SET_MEM_TABLE: self._set_mem_table,
            Request.SET_VRING_NUM: self._set_vring_num,
            Request.SET_VRING_ADDR: self._set_vring_addr,
            Request.SET_VRING_BASE: self._set_vring_base,
            Request.GET_VRING_BASE: self._get_vring_base,
            Request.SET_VRING_KICK: self._set_vring_kick,
            Request.SET_VRING_CALL: self._set_vring_call,
            Request.SET_VRING_ERR: self._set_vring_err,
            Request.GET_PROTOCOL_FEATURES: self._get_protocol_features,
            Request.SET_PROTOCOL_FEATURES: self._set_protocol_features,
            Request.GET_QUEUE_NUM: self._get_queue_num,
            Request.SET_VRING_ENABLE: self._set_vring_enable,
        }

    def serve(self) -> None:
        """Blocks until the front end hangs up; then nothing of the guest is held any more.

        Raises InvalidInputError if it breaks the protocol, which ends the connection.
        """
        try:
            while self._serve_one():
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass  # it is gone, as at the end of file
        finally:
            for queue in self._queues.values():
                queue.close()
            self._queues.clear()
            self._memory = None

    def _serve_one(self) -> bool:
        with vhost_user.receive(self._connection) as message:
            if message is None:
                return False
            act = self._actions.get(message.number)
            if act is None:
                raise InvalidInputError(f"vhost-user: request {message.number} was not offered")
            reply = act(message)
        if reply is None and message.wants_reply and self._acknowledges:
            reply = vhost_user.encode_u64(0)
        if reply is not None:
            self._connection.sendall(vhost_user.encode_reply(message.number, reply))
        return True

    @property
    def _acknowledges(self) -> bool:
        return bool(self._protocol_features & ProtocolFeature.REPLY_ACK)

    def _queue(self, index: int) -> Queue:
        if index >= MAX_QUEUES:
            raise InvalidInputError(f"vhost-user: queue {index}; there are {MAX_QUEUES}")
        queue = self._queues.get(index)
        if queue is None:
            queue = self._queues[index] = Queue(index, self._handler, self._report)
            # Rings start disabled exactly where the protocol's features are in use.
            queue.is_enabled = not self._features & Feature.PROTOCOL_FEATURES
        return queue

    def _start(self, queue: Queue) -> None:
        if self._memory is not None:
            has_indirect = bool(self._features & Feature.INDIRECT_DESC)
            queue.start(self._memory, has_indirect=has_indirect)

    def _get_features(self, _message: Message) -> bytes:
        return vhost_user.encode_u64(FEATURES)

    def _set_features(self, message: Message) -> None:
        features = message.u64()
        if features & ~FEATURES or not features & Feature.VERSION_1:
            raise InvalidInputError(
                f"vhost-user: features {features:#x} of {FEATURES:#x}; VERSION_1 is needed "
                "(QEMU with virtio-mmio: -global virtio-mmio.force-legacy=false)"
            )
        self._features = Feature(features)

    def _get_protocol_features(self, _message: Message) -> bytes:
        return vhost_user.encode_u64(PROTOCOL_FEATURES)

    def _set_protocol_features(self, message: Message) -> None:
        features = message.u64()
        if features & ~PROTOCOL_FEATURES:
            raise InvalidInputError(f"vhost-user: protocol features {features:#x} were not offered")
        self._protocol_features = ProtocolFeature(features)

    def _get_queue_num(self, _message: Message) -> bytes:
        return vhost_user.encode_u64(MAX_QUEUES)

    def _set_owner(self, _message: Message) -> None:
        pass

    def _set_mem_table(self, message: Message) -> None:
        memory = GuestMemory(message.regions(), message.descriptors)
        running = [queue for queue in self._queues.values() if queue.is_running]
        for queue in running:
            queue.pause()
        self._memory = memory
        for queue in running:
            self._start(queue)

    def _set_vring_num(self, message: Message) -> None:
        index, size = message.pair()
        if not 0 < size <= MAX_SIZE or size & (size - 1):
            raise InvalidInputError(f"vhost-user: ring of {size}; a power of two to {MAX_SIZE}")
        self._idle(index).size = size

    def _set_vring_addr(self, message: Message) -> None:
        index, addresses = message.ring_addresses()
        self._idle(index).addresses = addresses

    def _set_vring_base(self, message: Message) -> None:
        index, base = message.pair()
        self._idle(index).next_available = base & 0xFFFF

    def _get_vring_base(self, message: Message) -> bytes:
        index, _ = message.pair()
        queue = self._queue(index)
        queue.stop()
        queue.set_kick(None)
        return vhost_user.encode_pair(index, queue.next_available)

    def _set_vring_kick(self, message: Message) -> None:
        index, descriptor = message.ring_descriptor()
        queue = self._idle(index)
        if descriptor is None:
            raise InvalidInputError(f"vhost-user: queue {index} without kicks is not served")
        queue.set_kick(descriptor)
        self._start(queue)

    def _set_vring_call(self, message: Message) -> None:
        index, descriptor = message.ring_descriptor()
        self._queue(index).set_call(descriptor)

    def _set_vring_err(self, message: Message) -> None:
        index, descriptor = message.ring_descriptor()
        self._queue(index).set_error(descriptor)

    def _set_vring_enable(self, message: Message) -> None:
        index, is_enabled = message.pair()
        queue = self._queue(index)
        queue.is_enabled = bool(is_enabled)
        if is_enabled:
            self._start(queue)
        else:
            queue.stop()

    def _idle(self, index: int) -> Queue:
        queue = self._queue(index)
        if queue.is_running:
            raise InvalidInputError(f"vhost-user: queue {index} is running and cannot be changed")
        return queue
