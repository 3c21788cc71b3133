"""How registries are reached: certificates, proxies, plain HTTP; a real registry of that kind."""

import asyncio
import base64
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from cache_server.sources.credentials import Keyring
from cache_server.sources.manifest import ResolvedImage
from cache_server.sources.network import Network, NetworkSettings, settings_with
from cache_server.sources.reference import RegistryReference, parse_reference
from cache_server.sources.registry import RegistrySource
from snapshotter.errors import AccessDeniedError, InvalidInputError, UnavailableError
from tests.support.certificates import Certificates, make_certificates
from tests.support.http_faults import Reply, scripted
from tests.support.images import Image, Layer, file, write_layout
from tests.support.secured_registry import PASSWORD, USER, SecuredRegistry, pushed
from tests.unit.cache_server.sources.test_registry import IMAGE, serve_image


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def resolve(
    text: str,
    settings: NetworkSettings = NetworkSettings(certificate_directories=()),
    *,
    authfile: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ResolvedImage:
    reference = parse_reference(text)
    assert isinstance(reference, RegistryReference)

    async def run() -> ResolvedImage:
        network = Network(settings, environ or {})
        try:
            keyring = Keyring(authfile, usual=())
            source = RegistrySource(reference, network, keyring=keyring, backoff_s=0.0)
            return await source.resolve("amd64")
        finally:
            await network.aclose()

    return asyncio.run(run())


def test_registry_with_certificates_is_asked_by_tls(
    tmp_path: Path, certificates: Certificates
) -> None:
    settings = NetworkSettings(certificate_directories=(str(tmp_path / "none"), str(tmp_path)))
    with scripted(serve_image, certificates.server_context()) as server:
        certificates.install(tmp_path, server.address)
        assert resolve(f"{server.address}/a:v1", settings).digest == IMAGE.digest


def test_client_shows_its_certificate_where_it_has_one_for_the_host(
    tmp_path: Path, certificates: Certificates
) -> None:
    with scripted(serve_image, certificates.server_context(wants_client=True)) as server:
        certificates.install(tmp_path / "with", server.address, with_client=True)
        certificates.install(tmp_path / "without", server.address)
        settings = NetworkSettings(certificate_directories=(str(tmp_path / "with"),))
        assert resolve(f"{server.address}/a:v1", settings).digest == IMAGE.digest
        settings = NetworkSettings(certificate_directories=(str(tmp_path / "without"),))
        # the server's alert may be overtaken by the reset of its connection
        with pytest.raises(UnavailableError, match=r"client\.cert|failed 4 times"):
            resolve(f"{server.address}/a:v1", settings)


def test_unknown_ca_is_told_at_once_with_what_to_do(
    tmp_path: Path, certificates: Certificates
) -> None:
    other = make_certificates(tmp_path)
    settings = NetworkSettings(certificate_directories=(str(tmp_path),))
    with scripted(serve_image, certificates.server_context()) as server:
        other.install(tmp_path, server.address)
        said = rf"CERTIFICATE_VERIFY_FAILED.*/etc/docker/certs\.d/{server.address}/ca\.crt"
        with pytest.raises(UnavailableError, match=said):
            resolve(f"{server.address}/a:v1", settings)


def test_certificates_that_change_count_at_once(tmp_path: Path, certificates: Certificates) -> None:
    async def run(address: str) -> None:
        network = Network(NetworkSettings(certificate_directories=(str(tmp_path),)), {})
        url = f"https://{address}/v2/a/manifests/v1"
        try:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await network.client.get(url)
            certificates.install(tmp_path, address)
            assert (await network.client.get(url)).status_code == 200
        finally:
            await network.aclose()

    with scripted(serve_image, certificates.server_context()) as server:
        asyncio.run(run(server.address))


def test_ssl_cert_file_is_trusted(
    monkeypatch: pytest.MonkeyPatch, certificates: Certificates
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))

    async def run(address: str) -> int:
        network = Network(NetworkSettings(certificate_directories=()), {})
        try:
            return (await network.client.get(f"https://{address}/v2/a/manifests/v1")).status_code
        finally:
            await network.aclose()

    with scripted(serve_image, certificates.server_context()) as server:
        assert asyncio.run(run(server.address)) == 200


def test_broken_certificate_is_told_by_name(tmp_path: Path) -> None:
    settings = NetworkSettings(certificate_directories=(str(tmp_path),))
    with scripted(serve_image) as server:
        (tmp_path / server.address).mkdir()
        (tmp_path / server.address / "ca.crt").write_text("nonsense")
        with pytest.raises(InvalidInputError, match=r"ca\.crt: cannot use it"):
            resolve(f"{server.address}/a:v1", settings)


def test_registry_without_tls_is_told_what_to_do(
    tmp_path: Path, certificates: Certificates
) -> None:
    settings = NetworkSettings(certificate_directories=(str(tmp_path),))
    with scripted(serve_image) as server:
        certificates.install(tmp_path, server.address)
        said = rf"--insecure-registry {server.address}"
        with pytest.raises(UnavailableError, match=said):
            resolve(f"{server.address}/a:v1", settings)


@pytest.mark.parametrize(
    ("insecure", "host", "scheme"),
    [
        ((), "q.io", "https"),
        ((), "q.io:5000", "https"),
        ((), "localhost:5000", "http"),
        ((), "[::1]:5000", "http"),
        (("q.io",), "q.io", "http"),
        (("q.io",), "q.io:5000", "https"),
        (("q.io:5000",), "q.io:5000", "http"),
        (("[fd00::1]:5000",), "[fd00::1]:5000", "http"),
    ],
)
def test_who_is_asked_in_plain_http(insecure: tuple[str, ...], host: str, scheme: str) -> None:
    assert Network(settings_with(insecure), {}).scheme_of(host) == scheme


def test_insecure_registry_is_asked_through_the_proxy_of_the_environment() -> None:
    def proxy(request: object) -> Reply:
        return serve_image(request)  # type: ignore[arg-type]

    settings = settings_with(["registry.invalid:5000"])
    with scripted(proxy) as server:
        environ = {"HTTP_PROXY": f"http://{server.address}"}
        image = resolve("registry.invalid:5000/a:v1", settings, environ=environ)
    assert image.digest == IMAGE.digest
    assert server.seen[0].path == "http://registry.invalid:5000/v2/a/manifests/v1"


def test_tls_goes_through_a_proxy_by_connect_and_failures_name_it() -> None:
    with (
        scripted(lambda _: Reply(500)) as server,
        pytest.raises(UnavailableError, match="failed 4 times, last: 501"),
    ):
        resolve("registry.invalid/a:v1", environ={"HTTPS_PROXY": server.address})


def test_loopback_is_not_proxied() -> None:
    environ = {"HTTP_PROXY": "http://192.0.2.1:1", "HTTPS_PROXY": "http://192.0.2.1:1"}
    with scripted(serve_image) as server:
        assert resolve(f"{server.address}/a:v1", environ=environ).digest == IMAGE.digest


def test_plain_http_elsewhere_is_refused_unsent() -> None:
    async def run() -> None:
        network = Network(settings_with(["q.io:5000"]), {})
        try:
            await network.client.get("http://q.io:5001/v2/")
        finally:
            await network.aclose()

    with pytest.raises(AccessDeniedError, match="--insecure-registry"):
        asyncio.run(run())


@pytest.mark.parametrize("text", ["http://q.io", "q.io/x", "", "q.io:port", "a b"])
def test_insecure_registries_are_hosts(text: str) -> None:
    with pytest.raises(InvalidInputError, match="HOST:PORT"):
        settings_with([text])


@pytest.mark.real
@pytest.mark.parametrize("has_tls", [False, True])
def test_real_registry_with_password_and_tls(
    tmp_path: Path, certificates: Certificates, has_tls: bool
) -> None:
    image = Image([Layer([file("a", os.urandom(1000))])])
    layout = write_layout(tmp_path / "oci", {"v1": image})
    registry = SecuredRegistry(tmp_path / "registry", certificates if has_tls else None)
    certs = tmp_path / "certs.d"
    if has_tls:
        certificates.install(certs, registry.address)
        options = ["--dest-cert-dir", str(certs / registry.address)]
    else:
        options = ["--dest-tls-verify=false"]
    settings = NetworkSettings(certificate_directories=(str(certs),))
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    authfile = tmp_path / "auth.json"
    authfile.write_text(json.dumps({"auths": {f"{registry.address}/team": {"auth": auth}}}))
    with pushed(registry, layout, *options) as text:
        assert resolve(text, settings, authfile=str(authfile)).digest == image.digest
        with pytest.raises(AccessDeniedError, match="no credentials"):
            resolve(text, settings)
        authfile.write_text(authfile.read_text().replace(auth, auth.swapcase()))
        with pytest.raises((AccessDeniedError, InvalidInputError), match=r"auth\.json"):
            resolve(text, settings, authfile=str(authfile))
        if has_tls:
            shutil.rmtree(certs)
            with pytest.raises(UnavailableError, match=r"TLS.*certs\.d"):
                resolve(text, settings, authfile=str(authfile))
