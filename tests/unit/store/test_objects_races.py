"""Several publishers of one object at the same moment."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.store.objects import Objects

BODY = b"content"
NAME = ContentName(hashlib.sha256(BODY).digest(), len(BODY))


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(Paths(tmp_path, tmp_path / "run"), on_arrival=lambda _path: None)


def test_file_replaced_by_another_publisher_between_rename_and_link(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = os.link
    calls = []

    def link_of_a_replaced_file(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:  # what the kernel says when the last link has just gone
            raise FileNotFoundError
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", link_of_a_replaced_file)
    objects.publish(NAME, BODY)
    assert len(calls) == 2
    assert (tmp_path / "objects" / NAME.path).read_bytes() == BODY


def test_file_that_is_in_neither_directory_is_an_error(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def link_after_removal(*_arguments: Any, **_options: Any) -> None:
        (tmp_path / "arrivals" / NAME.path).unlink(missing_ok=True)
        raise FileNotFoundError

    monkeypatch.setattr(os, "link", link_after_removal)
    with pytest.raises(FileNotFoundError):
        objects.publish(NAME, BODY)
