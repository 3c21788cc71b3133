import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.cli.arguments import split

RUN_VALUES = ("--env", "-e", "--view")


@pytest.mark.parametrize(
    ("words", "of_program", "of_command"),
    [
        (["a", "--json"], ["--json"], ["a"]),
        (["--root", "/r", "a"], ["--root", "/r"], ["a"]),
        (["a", "--root=/r"], ["--root=/r"], ["a"]),
        (["-e", "--json", "a"], [], ["-e", "--json", "a"]),
        (["-eX=1", "--json", "a"], ["--json"], ["-eX=1", "a"]),
        (["--view=fuse", "a", "--json"], ["--json"], ["--view=fuse", "a"]),
        (["a", "--", "--json"], [], ["a", "--", "--json"]),
        (["a", "ls", "--json"], [], ["a", "--", "ls", "--json"]),
        (["a", "-e", "K=V", "env", "-u", "K"], [], ["a", "-e", "K=V", "--", "env", "-u", "K"]),
        (["a", "-"], [], ["a", "--", "-"]),
        (["a", "--run"], ["--run"], ["a"]),
    ],
)
def test_words_of_run(words: list[str], of_program: list[str], of_command: list[str]) -> None:
    found = split(words, value_options=RUN_VALUES, positionals=1)
    assert (list(found.of_program), list(found.of_command)) == (of_program, of_command)


def test_without_foreign_words_every_positional_is_ours() -> None:
    found = split(["a", "b", "--json"], value_options=(), positionals=None)
    assert (list(found.of_program), list(found.of_command)) == (["--json"], ["a", "b"])


words = st.lists(st.sampled_from(["a", "-e", "--json", "--root", "--view=x", "--", "-x", "K=V"]))


@given(words, words)
def test_no_word_is_lost(ours: list[str], foreign: list[str]) -> None:
    found = split([*ours, "--", *foreign], value_options=RUN_VALUES, positionals=1)
    everything = [*found.of_program, *found.of_command]
    assert sorted(word for word in everything if word != "--") == sorted(
        word for word in [*ours, *foreign] if word != "--"
    )
