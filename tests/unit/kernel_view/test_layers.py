import pytest

from snapshotter.errors import InvalidInputError
from snapshotter.kernel_view.layers import (
    ViewLayers,
    api_options,
    mount_data,
    mount_options,
    overlay_options,
)


def layers(**changes: object) -> ViewLayers:
    facts: dict[str, object] = {
        "metadata": "/proc/self/fd/9",
        "objects": "/r/objects",
        "arrivals": "/r/arrivals",
        "gate": "/r/gate",
        "image_number": 3,
    }
    return ViewLayers(**(facts | changes))  # type: ignore[arg-type]


def test_content_is_searched_in_the_order_that_the_gate_relies_on() -> None:
    options = overlay_options(layers())
    assert options[0] == ("lowerdir+", "/proc/self/fd/9")
    assert [value for key, value in options if key == "datadir+"] == [
        "/r/objects",
        "/r/gate/g3",
        "/r/arrivals",
        "/r/gate/v",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"redirect_dir": "follow"}),
        (
            {"upper": "/u/upper", "work": "/u/work"},
            {"redirect_dir": "on", "upperdir": "/u/upper", "workdir": "/u/work"},
        ),
        (
            {"upper": "/u/upper", "work": "/u/work", "volatile": True},
            {
                "redirect_dir": "on",
                "upperdir": "/u/upper",
                "workdir": "/u/work",
                "volatile": None,
            },
        ),
    ],
)
def test_options(changes: dict[str, object], expected: dict[str, str | None]) -> None:
    options = overlay_options(layers(**changes))
    rest = {key: value for key, value in options if not key.endswith("+")}
    always = {"metacopy": "on", "index": "off", "nfs_export": "off", "xino": "off"}
    assert rest == always | expected


@pytest.mark.parametrize("changes", [{"upper": "/u"}, {"work": "/w"}, {"volatile": True}])
def test_impossible_views_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        layers(**changes)


def test_mount_data_escapes_what_would_end_a_path() -> None:
    view = layers(metadata="/m:1,2\\3", objects="/o", arrivals="/a", gate="/g")
    data = mount_data(overlay_options(view))
    assert data.startswith("lowerdir=/m\\:1\\,2\\\\3::/o::/g/g3::/a::/g/v,metacopy=on,")


def test_mount_data_leaves_colons_of_an_upper_alone() -> None:
    view = layers(upper="/u:1/upper", work="/u:1/work", volatile=True)
    data = mount_data(overlay_options(view))
    assert data.endswith("upperdir=/u:1/upper,workdir=/u:1/work,volatile")


def test_api_options_escape_the_paths_that_the_kernel_unescapes() -> None:
    view = layers(objects="/o\\", upper="/u\\:,/upper", work="/w")
    options = api_options(overlay_options(view))
    assert ("datadir+", "/o\\") in options
    assert options[-2:] == [("upperdir", "/u\\\\:,/upper"), ("workdir", "/w")]


def test_mount_data_longer_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="shorter root"):
        mount_data(overlay_options(layers(objects="/" + "o" * 4096)))


def test_self_contained_upper_has_neither_headers_nor_redirects() -> None:
    options = dict(overlay_options(layers(upper="/u", work="/w", self_contained=True)))
    assert (options["metacopy"], options["redirect_dir"]) == ("off", "off")
    without_upper = dict(overlay_options(layers(self_contained=True)))
    assert (without_upper["metacopy"], without_upper["redirect_dir"]) == ("on", "follow")


def test_directories_above_the_image_are_searched_first() -> None:
    first, *_ = mount_options(overlay_options(layers(above=("/d/a:b", "/d/c"))))
    assert first == (
        "lowerdir=/d/a\\:b:/d/c:/proc/self/fd/9::/r/objects::/r/gate/g3::/r/arrivals::/r/gate/v"
    )
