"""Which proxy the environment wants for a request: HTTP_PROXY, HTTPS_PROXY, NO_PROXY, pure.

As Go's programs (docker, podman, containerd) read them: names of either case, NO_PROXY a list of
hosts, domains (``.example.org`` without the domain itself), addresses and networks, each perhaps
with a port, or ``*``. What is on this host never goes through a proxy.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from snapshotter.errors import InvalidInputError

_SCHEMES = ("http://", "https://")


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this host."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def proxy_for(scheme: str, host: str, port: int, environ: Mapping[str, str]) -> str | None:
    """The proxy's URL, None for none. Raises InvalidInputError for a proxy that is not HTTP's."""
    proxy = _variable(environ, f"{scheme}_proxy")
    if not proxy or is_loopback(host):
        return None
    for rule in _variable(environ, "no_proxy").split(","):
        if _matches(rule.strip().lower(), host.lower(), port):
            return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(_SCHEMES):
        kind = proxy.partition("://")[0]
        raise InvalidInputError(f"{scheme}_proxy: {kind} proxies are not spoken to, http ones are")
    return proxy


def _variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name.upper()) or environ.get(name) or ""


def _matches(rule: str, host: str, port: int) -> bool:
    if not rule:
        return False
    if rule == "*":
        return True
    address = _address(host)
    if "/" in rule:
        network = _network(rule)
        return address is not None and network is not None and address in network
    name, rule_port = _split_port(rule)
    if rule_port and rule_port != str(port):
        return False
    if address is not None:
        return address == _address(name)
    name = name.removeprefix("*")
    return (
        host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")
    )


def _split_port(rule: str) -> tuple[str, str]:
    """Host and port of ``HOST[:PORT]``; an IPv6 address is bracketed where it has a port."""
    if rule.startswith("["):
        name, _, rest = rule[1:].partition("]")
        return name, rest.removeprefix(":")
    if rule.count(":") > 1:
        return rule, ""
    name, _, port = rule.partition(":")
    return name, port


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
