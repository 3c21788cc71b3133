from pathlib import Path

import pytest

from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError
from snapshotter.service import sandbox_spec as spec
from tests.support.fake_daemon import make_image


def plan(settings: spec.Settings, **prepared: object) -> spec.Plan:
    return spec.make_plan(settings, make_image(**prepared).prepared, host_name="box", terminal=None)


@pytest.mark.parametrize(
    ("text", "volume"),
    [
        ("/a:/b", spec.Volume("/a", "/b")),
        ("/a:/b:ro", spec.Volume("/a", "/b", True)),
        ("/a:/b:rw", spec.Volume("/a", "/b")),
        (".:/src/", spec.Volume("/here", "/src")),
        ("x/../y:/b//c/../d", spec.Volume("/here/y", "/b/d")),
        ("/a://b", spec.Volume("/a", "/b")),
    ],
)
def test_volumes(text: str, volume: spec.Volume) -> None:
    assert spec.parse_volume(text, "/here") == volume


@pytest.mark.parametrize(
    "text", ["/a", "/a:", ":/b", "/a:b", "/a:/b:x", "/a:/", "/a://", "/a:/proc", "/a:/x/../dev"]
)
def test_bad_volumes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="volume"):
        spec.parse_volume(text, "/here")


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    spec.check_sources([spec.Volume(str(tmp_path), "/x")])
    with pytest.raises(NotFoundError, match="gone"):
        spec.check_sources([spec.Volume(str(tmp_path / "gone"), "/x")])


def test_environment_words() -> None:
    parsed = spec.parse_environment(["A=1", "B=", "HOSTS", "UNSET", "A=2=3"], {"HOSTS": "h"})
    assert parsed == {"A": "2=3", "B": "", "HOSTS": "h"}
    with pytest.raises(InvalidInputError, match="NAME"):
        spec.parse_environment(["=1"], {})


@pytest.mark.parametrize(
    "settings",
    [
        spec.Settings(user=""),
        spec.Settings(user="a:"),
        spec.Settings(user="a b"),
        spec.Settings(user="a:b:c"),
        spec.Settings(workdir="x"),
        spec.Settings(hostname="-x"),
        spec.Settings(hostname="x" * 65),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: spec.Settings) -> None:
    with pytest.raises(InvalidInputError):
        spec.check_settings(settings)


@pytest.mark.parametrize(
    ("settings", "entrypoint", "cmd", "arguments"),
    [
        (spec.Settings(), ["/e"], ["c"], ["/e", "c"]),
        (spec.Settings(), None, ["c"], ["c"]),
        (spec.Settings(command=["x", "y"]), ["/e"], ["c"], ["/e", "x", "y"]),
        (spec.Settings(entrypoint="/n"), ["/e"], ["c"], ["/n"]),
        (spec.Settings(entrypoint="", command=["x"]), ["/e"], ["c"], ["x"]),
    ],
)
def test_arguments(
    settings: spec.Settings, entrypoint: list[str] | None, cmd: list[str], arguments: list[str]
) -> None:
    assert plan(settings, entrypoint=entrypoint, cmd=cmd).arguments == arguments


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="CMD"):
        plan(spec.Settings(), cmd=None)


def test_settings_go_over_the_image_and_the_image_over_defaults() -> None:
    config = '{"config": {"User": "web", "WorkingDir": "/srv", "Labels": null}, "os": "linux"}'
    found = plan(
        spec.Settings(environment={"B": "2"}), env={"PATH": "/p", "B": "1", "C": "3"}, config=config
    )
    assert found.environment == {"PATH": "/p", "HOSTNAME": "box", "B": "2", "C": "3"}
    assert (found.user, found.workdir) == ("web", "/srv")
    asked = plan(spec.Settings(user="1:2", workdir="/w", hostname="h"), config=config)
    assert (asked.user, asked.workdir, asked.environment["HOSTNAME"]) == ("1:2", "/w", "h")


@pytest.mark.parametrize("config", [None, "{}", '{"config": null}', '{"config": {"User": ""}}'])
def test_an_image_without_wishes_runs_as_root_in_the_root(config: str | None) -> None:
    found = plan(spec.Settings(), config=config)
    assert (found.user, found.workdir) == ("0", "/")
    assert found.environment["PATH"] == spec.DEFAULT_PATH


@pytest.mark.parametrize("config", ['{"config": 7}', '{"x":' + "[" * 9999, "{"])
def test_a_bad_image_config_is_corrupt(config: str) -> None:
    with pytest.raises(CorruptError, match="config of image"):
        plan(spec.Settings(), config=config)


def test_surroundings_place_outer_volumes_before_those_within_them() -> None:
    inner, outer = spec.Volume("/i", "/a/b"), spec.Volume("/o", "/a")
    settings = spec.Settings(volumes=[inner, outer])
    found = spec.make_surroundings(settings, host_name="box", read_only=True)
    assert found == spec.Surroundings(hostname="box", volumes=[outer, inner], read_only=True)
    named = spec.make_surroundings(spec.Settings(hostname="h"), host_name="box", read_only=False)
    assert named.hostname == "h"


def test_where_a_program_may_be() -> None:
    assert spec.find_program("./x", "/bin") == ["./x"]
    assert spec.find_program("x", "/bin::/b") == ["/bin/x", "./x", "/b/x"]
