"""A real registry behind TLS and a password, as companies run them."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.certificates import Certificates
from tests.support.registry import BinaryRegistry

USER, PASSWORD = "tester", "swordfish"
_HTPASSWD = "tester:$2b$05$abcdefghijklmnopqrstuupWDwJQeCHYIBQy8WvkVB6ImhZ476YYy\n"
"""What ``htpasswd -B`` writes for these."""


class SecuredRegistry(BinaryRegistry):
    """Wants basic credentials; with certificates it speaks TLS."""

    def __init__(self, directory: Path, certificates: Certificates | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "htpasswd").write_text(_HTPASSWD)
        tls = ""
        if certificates is not None:
            pair = f"certificate: {certificates.server}\n    key: {certificates.server_key}"
            tls = f"  tls:\n    {pair}\n"
        auth = f"auth:\n  htpasswd:\n    realm: tests\n    path: {directory / 'htpasswd'}\n"
        super().__init__(directory, tls + auth)

    def _answers(self) -> bool:
        host, _, port = self.address.partition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0


@contextmanager
def pushed(registry: SecuredRegistry, layout: Path, *options: str) -> Iterator[str]:
    """The running registry's image of ``layout``, pushed by skopeo with the right password."""
    registry.start()
    try:
        text = f"docker://{registry.address}/team/demo:v1"
        copy = ("skopeo", "--insecure-policy", "copy", "--quiet", *options)
        credentials = ("--dest-creds", f"{USER}:{PASSWORD}")
        subprocess.run(
            (*copy, *credentials, f"oci:{layout}:v1", text),
            check=True,
            capture_output=True,
            timeout=60,
        )
        yield text
    finally:
        registry.stop()
