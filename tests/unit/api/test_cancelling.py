import pytest

from snapshotter.api.cancelling import Cancellation
from snapshotter.errors import UnavailableError


def test_it_ends_what_is_under_way_and_nothing_after() -> None:
    ended: list[str] = []
    cancellation = Cancellation()
    with cancellation.ended_by(lambda: ended.append("first")):
        pass
    with cancellation.ended_by(lambda: ended.append("second")):
        cancellation.cancel()
    cancellation.cancel()
    assert ended == ["second"]
    with pytest.raises(UnavailableError, match="cancelled"):
        cancellation.check()
    with pytest.raises(UnavailableError), cancellation.ended_by(lambda: ended.append("third")):
        raise AssertionError
    assert ended == ["second"]
