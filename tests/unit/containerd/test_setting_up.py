"""The fragment for containerd's configuration, and what doctor says about containerd."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest

from snapshotter.containerd import setting_up
from snapshotter.containerd.setting_up import diagnose, fragment, parse_version
from snapshotter.errors import InvalidInputError, UnsupportedError

SOCKET = Path("/run/snapshotter/containerd.sock")
STATE = Path('/data/a "b"/containerd')


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u1", (1, 6)),
        ("containerd github.com/containerd/containerd/v2 v2.1.9 deadbeef", (2, 1)),
        ("containerd containerd.io 1.7.24 88bf19b2105c8b17560993bee28a01ddc2f97182", (1, 7)),
        ("2.0", (2, 0)),
    ],
)
def test_version_is_found(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_text_without_a_version_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="latest"):
        parse_version("latest")


@pytest.mark.parametrize("version", [(1, 6), (1, 7), (2, 0), (2, 1)])
def test_fragment_names_us_and_has_cri_send_annotations(version: tuple[int, int]) -> None:
    text = fragment(version, name="lazy", service_socket=SOCKET, state=STATE)
    settings = tomllib.loads(text)
    proxy = settings["proxy_plugins"]["lazy"]
    assert (proxy["type"], proxy["address"]) == ("snapshot", str(SOCKET))
    plugins = settings["plugins"]
    if version < (2, 0):
        cri = plugins["io.containerd.grpc.v1.cri"]["containerd"]
    else:
        cri = plugins["io.containerd.cri.v1.images"]
        unpackers = plugins["io.containerd.transfer.v1.local"]["unpack_config"]
        assert [each["snapshotter"] for each in unpackers] == ["lazy", "overlayfs"]
    assert cri == {"snapshotter": "lazy", "disable_snapshot_annotations": False}
    if version >= (1, 7):
        exports = {"root": str(STATE), "enable_remote_snapshot_annotations": "true"}
        assert proxy["exports"] == exports


def test_version_that_has_no_lazy_pulls_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"1\.6 or later"):
        fragment((1, 5), name="lazy", service_socket=SOCKET, state=STATE)


def test_without_containerd_there_is_nothing_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(fact.name, fact.ok) for fact in diagnose(SOCKET)] == [("containerd", True)]


def test_everything_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setting_up, "installed_version", lambda: (1, 6))
    facts = {fact.name: fact for fact in diagnose(tmp_path / "no.sock", tmp_path / "no.toml")}
    assert not facts["service"].ok
    assert "containerd serve" in facts["service"].remedy
    assert not facts["configuration"].ok
    assert "snapshotter containerd config" in facts["configuration"].remedy


def test_node_that_is_set_up_is_found_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting_up, "installed_version", lambda: (1, 6))
    path, config = tmp_path / "s", tmp_path / "config.toml"
    config.write_text(fragment((1, 6), name="lazy", service_socket=path, state=STATE))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert all(fact.ok for fact in diagnose(path, config))
    config.write_text("[proxy_plugins.other]\naddress = '/elsewhere'\n")
    assert not all(fact.ok for fact in diagnose(path, config))
