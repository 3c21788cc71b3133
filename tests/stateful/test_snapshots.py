"""Snapshots against a model of them, with restarts: what is there, what refuses, what is left."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from snapshotter.containerd.labels import REF
from snapshotter.containerd.metastore import Kind
from snapshotter.errors import BusyError, ExistsError, InvalidInputError, NotFoundError
from tests.support.snapshots import SnapshotsWorld, chain_id

NAMES = st.sampled_from([f"n{number}" for number in range(6)])
CHAINS = st.sampled_from([chain_id(name) for name in "abc"])


class SnapshotsMachine(RuleBasedStateMachine):
    """The model: name → (kind, parent, whether it is remote)."""

    names = Bundle("names")

    @initialize()
    def start(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="snapshots-"))
        self.world = SnapshotsWorld(self.base)
        self.model: dict[str, tuple[Kind, str, bool]] = {}

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()
            shutil.rmtree(self.base)

    @rule(target=names, name=NAMES)
    def name_something(self, name: str) -> str:
        return name

    @rule(key=NAMES, parent=st.one_of(st.just(""), names), view=st.booleans())
    def prepare(self, key: str, parent: str, view: bool) -> None:
        make = self.world.snapshots.view if view else self.world.snapshots.prepare
        expected = self._refusal(key, parent)
        if expected is not None:
            with pytest.raises(expected):
                make(key, parent, {})
            return
        make(key, parent, {})
        self.model[key] = (Kind.VIEW if view else Kind.ACTIVE, parent, False)

    @rule(target=names, chain=CHAINS, parent=st.one_of(st.just(""), names), known=st.booleans())
    def pull(self, chain: str, parent: str, known: bool) -> object:
        if self._refusal("extract", parent) is not None:
            return multiple()
        if known:
            self.world.layers.known.add(chain)
        if chain not in self.world.layers.known:
            self.world.snapshots.prepare("extract", parent, {REF: chain})
            self.world.snapshots.remove("extract")
            return multiple()
        with pytest.raises(ExistsError):
            self.world.snapshots.prepare("extract", parent, {REF: chain})
        wanted = f'labels."{REF}"=={chain},parent=="{parent}"'
        (found,) = self.world.snapshots.find([wanted])
        self.model[found.name] = (Kind.COMMITTED, parent, True)
        return found.name

    @rule(target=names, key=names, name=NAMES)
    def commit(self, key: str, name: str) -> object:
        kind = self.model.get(key, (None,))[0]
        if kind is not Kind.ACTIVE or (name in self.model and name != key):
            wrong = NotFoundError if kind is None else (ExistsError, InvalidInputError)
            with pytest.raises(wrong):
                self.world.snapshots.commit(name, key, {})
            return multiple()
        self.world.snapshots.commit(name, key, {})
        parent = self.model.pop(key)[1]
        self.model[name] = (Kind.COMMITTED, parent, False)
        return name

    @rule(name=consumes(names))
    def remove(self, name: str) -> None:
        if name not in self.model:
            with pytest.raises(NotFoundError):
                self.world.snapshots.remove(name)
        elif any(parent == name for _, parent, _ in self.model.values()):
            with pytest.raises(BusyError):
                self.world.snapshots.remove(name)
        else:
            self.world.snapshots.remove(name)
            del self.model[name]

    @rule()
    def restart(self) -> None:
        self.world.reopen()

    @rule()
    def reclaim(self) -> None:
        self.world.snapshots.reclaim()
        with_directory = {
            name
            for name, (kind, parent, remote) in self.model.items()
            if not remote and not (kind is Kind.VIEW and parent)
        }
        ids = {self.world.snapshots.stat(name).id for name in with_directory}
        assert self.world.state.directories.all() == ids
        mounted = {
            chain
            for name, (kind, parent, _) in self.model.items()
            if kind is not Kind.COMMITTED and (chain := self._chain(parent)) is not None
        }
        assert self.world.layers.held == mounted

    @invariant()
    def is_as_the_model_says(self) -> None:
        if not hasattr(self, "world"):
            return
        found = {
            each.name: (each.kind, each.parent, each.chain is not None)
            for each in self.world.snapshots.find()
        }
        assert found == self.model

    def _refusal(self, key: str, parent: str) -> type[Exception] | None:
        if key in self.model:
            return ExistsError
        if parent and parent not in self.model:
            return NotFoundError
        if parent and self.model[parent][0] is not Kind.COMMITTED:
            return InvalidInputError
        return None

    def _chain(self, name: str) -> str | None:
        """The chain of the topmost remote snapshot at or below ``name``."""
        while name:
            if self.model[name][2]:
                return self.world.snapshots.stat(name).chain
            name = self.model[name][1]
        return None


TestSnapshots = SnapshotsMachine.TestCase
TestSnapshots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
