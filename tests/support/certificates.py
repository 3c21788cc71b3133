"""A certificate authority for one test session, made by openssl: nobody else trusts it."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the CA's certificate, and certificate and key of a server on 127.0.0.1 and of a
    client.
    """

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    def server_context(self, *, wants_client: bool = False) -> ssl.SSLContext:
        """TLS for a server; with ``wants_client`` for those alone that the CA knows."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server, self.server_key)
        if wants_client:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def install(self, directories: Path, host: str, *, with_client: bool = False) -> None:
        """Puts the CA, and the client's pair, where docker looks for those of ``host``."""
        directory = directories / host
        directory.mkdir(parents=True)
        (directory / "ca.crt").write_bytes(self.ca.read_bytes())
        if with_client:
            (directory / "client.cert").write_bytes(self.client.read_bytes())
            (directory / "client.key").write_bytes(self.client_key.read_bytes())


def make_certificates(directory: Path) -> Certificates:
    """A new CA with a server and a client, in files below ``directory``."""
    ca, ca_key = directory / "ca.pem", directory / "ca.key"
    _openssl(
        *("req", "-x509", *_KEY, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=ca"),
        *("-addext", "keyUsage=critical,keyCertSign"),
    )
    pairs = []
    for name in ("server", "client"):
        key, request, signed = (directory / f"{name}.{end}" for end in ("key", "csr", "pem"))
        _openssl("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions = directory / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial"),
            *("-out", signed, "-days", "2", "-extfile", extensions),
        )
        pairs += [signed, key]
    return Certificates(ca, *pairs)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
