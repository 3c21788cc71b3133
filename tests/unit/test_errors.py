"""One code, one exit code for each kind of error."""

import pytest

from snapshotter import errors

KINDS = list(errors.BY_CODE.values())


def test_codes_and_exit_codes_tell_the_kinds_apart():
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    assert len({kind.exit_code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_becomes_its_error_again(kind):
    error = errors.from_code(kind.code, "reading the thing failed")
    assert type(error) is kind
    assert str(error) == "reading the thing failed"


def test_an_unknown_code_is_still_an_error():
    assert type(errors.from_code("nobody_knows", "text")) is errors.SnapshotterError


def test_errors_of_commands_say_how_they_ended():
    assert errors.SandboxError("no such program", 127).status == 127
    failed = errors.CommandFailedError("x failed", exit_status=3, stdout=b"o", stderr=b"e")
    assert (failed.exit_status, failed.stdout, failed.stderr) == (3, b"o", b"e")
    late = errors.CommandTimeoutError("x took too long", stdout=b"o")
    assert (late.stdout, late.stderr, late.code) == (b"o", b"", "request_failed")
