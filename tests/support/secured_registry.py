"""A real registry behind TLS and a password, as companies run them."""

from __future__ import annotations

import socket
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
