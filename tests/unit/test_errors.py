"""One code, one exit code for each kind of error."""

import pytest

from snapshotter import errors


def subclasses():
    return errors.SnapshotterError.__subclasses__()


def test_codes_and_exit_codes_tell_the_kinds_apart():
    kinds = [errors.SnapshotterError, *subclasses()]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert len({kind.exit_code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", subclasses())
def test_a_code_becomes_its_error_again(kind):
    error = errors.from_code(kind.code, "reading the thing failed")
    assert type(error) is kind
    assert str(error) == "reading the thing failed"


def test_an_unknown_code_is_still_an_error():
    assert type(errors.from_code("nobody_knows", "text")) is errors.SnapshotterError
