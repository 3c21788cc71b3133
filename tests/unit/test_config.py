"""Settings from TOML."""

import pytest

from snapshotter.config import Config, load_config
from snapshotter.errors import InvalidInputError


def test_no_file_means_the_defaults(tmp_path):
    assert load_config(None) == load_config(tmp_path / "none.toml") == Config()


def test_a_file_changes_what_it_names(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('large_file_bytes = 1048576\ncache_server = "external"\n')
    config = load_config(file)
    assert config.large_file_bytes == 1 << 20
    assert config.cache_server == "external"
    assert config.companions_bytes == Config().companions_bytes


@pytest.mark.parametrize(
    "text",
    ["large_file_byte = 1", "large_file_bytes = 'x'", "large_file_bytes = 1000", "= 3",
     "insecure_registries = ['http://a.io']", "insecure_registries = 'a.io'",
     "lookup_deadline_s = 0", "keeper_patience_s = -1.0", "min_free_bytes = -1",
     'cache_server = "yes"', "settle_s = nan", "keeper_patience_s = inf", "companions_bytes = -1",
     "fetch_ahead_bytes = -1", "read_ahead_kb = -1",
     "limits = ['layer_bytes']", "limits = ['layer_bytes=1X']", "x = " + "[" * 5000 + "]" * 5000],
)  # fmt: skip
def test_a_bad_setting_is_refused_with_the_files_name(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=r"config\.toml"):
        load_config(file)
