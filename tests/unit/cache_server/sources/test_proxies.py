import pytest

from cache_server.sources.proxies import is_loopback, proxy_for
from snapshotter.errors import InvalidInputError

BOTH = {"HTTPS_PROXY": "http://p:3128", "http_proxy": "q:8080"}


@pytest.mark.parametrize(
    ("scheme", "host", "proxy"),
    [
        ("https", "quay.io", "http://p:3128"),
        ("http", "quay.io", "http://q:8080"),
        ("https", "localhost", None),
        ("https", "127.8.8.8", None),
        ("https", "::1", None),
        ("http", "x.localhost", None),
    ],
)
def test_scheme_decides_and_loopback_is_never_proxied(
    scheme: str, host: str, proxy: str | None
) -> None:
    assert proxy_for(scheme, host, 443, BOTH) == proxy
    assert proxy_for(scheme, host, 443, {}) is None


@pytest.mark.parametrize(
    ("rules", "host", "is_direct"),
    [
        ("*", "quay.io", True),
        ("quay.io", "quay.io", True),
        ("QUAY.io", "quay.IO", True),
        ("quay.io", "cdn.quay.io", True),
        ("quay.io", "notquay.io", False),
        (".quay.io", "quay.io", False),
        (".quay.io", "cdn.quay.io", True),
        ("*.quay.io", "cdn.quay.io", True),
        (" a.io , quay.io", "quay.io", True),
        ("quay.io:443", "quay.io", True),
        ("quay.io:8443", "quay.io", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3:443", "10.1.2.3", True),
        ("fd00::/8", "fd00::1", True),
        ("[fd00::1]:443", "fd00::1", True),
        ("fd00::1", "fd00::1", True),
        ("10.0.0.0/8", "quay.io", False),
        ("nonsense/x,,", "quay.io", False),
    ],
)
def test_no_proxy(rules: str, host: str, is_direct: bool) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        proxy = proxy_for("https", host, 443, {**BOTH, name: rules})
        assert (proxy is None) == is_direct


def test_proxies_of_another_kind_are_told() -> None:
    with pytest.raises(InvalidInputError, match="socks5 proxies"):
        proxy_for("https", "quay.io", 443, {"https_proxy": "socks5://p"})


@pytest.mark.parametrize(
    ("host", "loops"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("127.0.0.1.io", False),
        ("10.0.0.1", False),
    ],
)
def test_is_loopback(host: str, loops: bool) -> None:
    assert is_loopback(host) == loops
