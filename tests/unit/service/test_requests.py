from snapshotter.kernel_view.probe import Abilities, Finding
from snapshotter.service.requests import host_facts

KERNEL = Finding(name="kernel", ok=False, detail="6.1", remedy="newer", needed=False)
ROOT = Finding(name="root", ok=False, detail="uid 5", remedy="run the daemon as root")


def abilities(*findings: Finding) -> Abilities:
    return Abilities(mount_api=True, detached_layers=True, erofs_file=True, findings=findings)


def test_view_that_works_is_told_and_the_others_honestly() -> None:
    facts = host_facts(abilities(KERNEL), "")
    assert [(view.name, view.ok) for view in facts.views] == [
        ("kernel", True),
        ("fuse", True),
        ("virtiofs", True),
    ]
    assert "snapshotter virtiofs IMAGE" in facts.views[2].detail
    assert [(fact.name, fact.ok, fact.remedy) for fact in facts.facts] == [
        ("kernel", False, "newer")
    ]


def test_what_is_missing_is_told_with_its_remedy() -> None:
    kernel, fuse, _ = host_facts(abilities(KERNEL, ROOT), "/dev/fuse: No such device").views
    assert (kernel.ok, kernel.detail, kernel.remedy) == (
        False,
        "root: uid 5",
        "run the daemon as root",
    )
    assert (fuse.ok, fuse.detail, fuse.remedy) == (
        False,
        "/dev/fuse: No such device",
        "modprobe fuse",
    )
