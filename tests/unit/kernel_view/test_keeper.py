"""The keeper in a thread; a pipe stands for the device: closing its other end is the unmount."""

import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotter.errors import BusyError, InvalidInputError, UnavailableError
from snapshotter.fuse.dev_fuse import Negotiated
from snapshotter.kernel_view import keeper, keeper_client

SETTLED = Negotiated(minor=45, flags=1 << 39 | 1, max_readahead=131072, max_write=4096)


class Rig:
    def __init__(self, directory: Path, *, patience_s: float) -> None:
        self.path = directory / "keeper.sock"
        self._listener = keeper.listen(str(self.path))
        self._thread = threading.Thread(
            target=keeper.Keeper(self._listener, patience_s=patience_s).run
        )
        self._thread.start()

    def mount(self) -> int:
        """Registers a device; what is returned unmounts it when closed."""
        device, mount = os.pipe()
        keeper_client.register(self.path, device)
        os.close(device)
        return mount

    def status(self) -> tuple[bool, bool]:
        status = keeper_client.status(self.path)
        assert status.pid == os.getpid()
        return status.has_gate, status.has_store

    def close(self) -> None:
        if self._thread.is_alive():
            keeper_client.stop(self.path)
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Rig]]:
    monkeypatch.setattr(keeper, "negotiate", lambda _device: SETTLED)
    monkeypatch.setattr(keeper, "_log", lambda *_arguments, **_fields: None)
    made: list[Rig] = []

    def build(patience_s: float) -> Rig:
        made.append(Rig(tmp_path, patience_s=patience_s))
        return made[-1]

    yield build
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make: Callable[[float], Rig]) -> Rig:
    return make(60.0)


def is_open(mount: int) -> bool:
    """Whether anybody still holds the device of this mount."""
    try:
        os.write(mount, b"x")
    except BrokenPipeError:
        return False
    return True


def wait_closed(mount: int) -> None:
    poll = select.poll()
    poll.register(mount, 0)
    assert poll.poll(10_000)


def test_the_socket_is_for_its_user_alone(rig: Rig) -> None:
    assert stat.S_IMODE(rig.path.stat().st_mode) == 0o600


def test_stores_follow_one_another_on_one_gate(rig: Rig) -> None:
    with pytest.raises(UnavailableError, match="no gate"):
        keeper_client.attach(rig.path)
    mount = rig.mount()
    assert rig.status() == (True, False)
    first = keeper_client.attach(rig.path)
    assert rig.status() == (True, True)
    assert first.negotiated == SETTLED
    assert len(first.gate_id) == 32
    assert not os.get_inheritable(first.device)
    with pytest.raises(BusyError, match="a store is attached already"):
        keeper_client.attach(rig.path)
    first.close()
    second = keeper_client.attach(rig.path)
    assert second.gate_id == first.gate_id
    os.write(mount, b"asked")
    assert os.read(second.device, 10) == b"asked"
    second.close()
    os.close(mount)


def test_a_living_gate_is_not_replaced_and_a_dead_one_is(rig: Rig) -> None:
    first = rig.mount()
    store = keeper_client.attach(rig.path)
    device, other = os.pipe()
    with pytest.raises(BusyError, match="living gate"):
        keeper_client.register(rig.path, device)
    os.close(device)
    assert not is_open(other)
    os.close(other)
    os.close(first)
    second = rig.mount()
    assert rig.status() == (True, False)
    store.connection.settimeout(10)
    assert store.connection.recv(1) == b""  # the store is told to attach anew
    store.close()
    again = keeper_client.attach(rig.path)
    assert again.gate_id != store.gate_id
    again.close()
    os.close(second)


def test_an_unmounted_gate_is_let_go(rig: Rig) -> None:
    os.close(rig.mount())
    assert rig.status() == (False, False)
    with pytest.raises(UnavailableError):
        keeper_client.attach(rig.path)


def test_without_a_store_the_gate_is_closed_in_the_end(make: Callable[[float], Rig]) -> None:
    rig = make(0.05)
    mount = rig.mount()
    wait_closed(mount)
    assert rig.status() == (False, False)
    os.close(mount)


def test_patience_counts_from_the_end_of_the_last_store(make: Callable[[float], Rig]) -> None:
    rig = make(0.2)
    mount = rig.mount()
    store = keeper_client.attach(rig.path)
    with pytest.raises(TimeoutError):
        _wait_briefly(store.connection)
    assert rig.status() == (True, True)
    store.close()
    wait_closed(mount)
    os.close(mount)


def _wait_briefly(connection: socket.socket) -> None:
    connection.settimeout(0.4)
    connection.recv(1)


def test_stop_closes_the_gate(rig: Rig) -> None:
    mount = rig.mount()
    keeper_client.stop(rig.path)
    wait_closed(mount)
    os.close(mount)


def test_a_failing_negotiation_is_refused_and_the_descriptor_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_device: int) -> Negotiated:
        raise PermissionError("not mounted")

    monkeypatch.setattr(keeper, "negotiate", fail)
    device, mount = os.pipe()
    with pytest.raises(InvalidInputError, match="not mounted"):
        keeper_client.register(rig.path, device)
    os.close(device)
    assert not is_open(mount)
    os.close(mount)
    assert rig.status() == (False, False)


@pytest.mark.parametrize(
    "packet", [b"{", b"[]", b'{"op": "dance"}', b'{"op": "register"}', b"\xff", b"[" * 4096]
)
def test_other_packets_are_refused_and_the_keeper_goes_on(rig: Rig, packet: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(rig.path))
        connection.send(packet)
        assert b'"ok": false' in connection.recv(4096)
    assert rig.status() == (False, False)


def test_a_second_keeper_on_one_socket_is_refused(rig: Rig) -> None:
    with pytest.raises(BusyError, match="running already"):
        keeper.listen(str(rig.path))


def test_without_a_keeper_the_client_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="the daemon starts it"):
        keeper_client.status(tmp_path / "none.sock")
