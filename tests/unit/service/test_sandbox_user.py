import pytest

from snapshotter.errors import NotFoundError
from snapshotter.service.sandbox_user import Identity, look_up

PASSWD = [
    "root:x:0:0:root:/root:/bin/sh",
    "# a remark",
    "web:x:33:34:web:/srv/www:/bin/false",
    "34:x:35:36::/odd:/bin/false",
    "bad:x:many:1::/:/",
    "nohome:x:50:50:::",
]
GROUP = ["root:x:0:", "web:x:34:", "staff:x:50:web,root", "video:x:44:other, web", "odd:x:z:web"]


@pytest.mark.parametrize(
    ("user", "identity"),
    [
        ("root", Identity(0, 0, (0, 50), "/root")),
        ("0", Identity(0, 0, (0, 50), "/root")),
        ("web", Identity(33, 34, (34, 50), "/srv/www")),
        ("33", Identity(33, 34, (34, 50), "/srv/www")),
        ("34", Identity(35, 36, (36,), "/odd")),
        ("web:staff", Identity(33, 50, (50,), "/srv/www")),
        ("web:7", Identity(33, 7, (7,), "/srv/www")),
        ("1000", Identity(1000, 0, (0,), "/")),
        ("1000:1001", Identity(1000, 1001, (1001,), "/")),
        ("nohome", Identity(50, 50, (50,), "/")),
    ],
)
def test_users(user: str, identity: Identity) -> None:
    assert look_up(user, passwd=PASSWD, group=GROUP) == identity


@pytest.mark.parametrize("user", ["nobody", "web:nogroup", "bad", "-1", "4294967295", "٣"])
def test_users_without_a_number_are_not_found(user: str) -> None:
    with pytest.raises(NotFoundError, match="image's"):
        look_up(user, passwd=PASSWD, group=GROUP)


def test_without_any_file_numbers_still_work() -> None:
    assert look_up("5:6", passwd=(), group=()) == Identity(5, 6, (6,), "/")
