"""The examples of the Python surface, as they are, with a real image and the whole product."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.debian_image import LocalImage
from tests.support.product import CacheServer, NewProduct, Product

pytestmark = [pytest.mark.mount, pytest.mark.real, pytest.mark.timeout(240)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def product(new_product: NewProduct, cache_server: CacheServer) -> Iterator[Product]:
    made = new_product(server=cache_server.socket)
    made.root.mkdir()
    shutil.copy(made.config, made.root)  # where it is looked for
    yield made
    stop = [sys.executable, "-m", "snapshotter", "--root", made.root, "daemon", "stop"]
    subprocess.run(stop, check=True, capture_output=True, env=made.environment)
    assert made.processes() == []  # nothing outlived its sandbox either


def play(product: Product, example: str, *arguments: str | os.PathLike[str]) -> list[str]:
    """The lines an example prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, *arguments, "--root", product.root],
        capture_output=True,
        text=True,
        env=product.environment,
        cwd=product.base,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, ""), product.logs()
    return done.stdout.splitlines()


def test_the_loop_of_sandboxes(product: Product, debian: LocalImage) -> None:
    uppers = product.base / "work"
    lines = play(product, "sandbox_loop.py", debian.reference, uppers)
    tasks = [re.fullmatch(r"task +(\d+): +[\d.]+ ms, +([\d,]+) bytes fetched", x) for x in lines]
    fetched = [int(task[2].replace(",", "")) for task in tasks if task is not None]
    assert len(fetched) == 20
    assert fetched[0] > 1 << 20
    assert fetched[10:] == [0] * 10  # what the first ones had fetched serves all
    assert lines[20:] == ['task 3 left {"task": 3, "square": 9}']
    for number in range(20):
        assert f'"task": {number},' in (uppers / f"task-{number:02}/upper/result.json").read_text()


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_sandboxes_at_once(product: Product, debian: LocalImage, loop: str) -> None:
    options = ("--count", "4", "--at-once", "2", "--loop", loop)
    lines = play(product, "async_sandboxes.py", debian.reference, *options)
    for number in range(4):
        assert f"task {number}: line 2 of 2" in lines
        said = f"task {number}: exit status 0, 'second of task {number}' comes first now"
        assert said in lines
    assert not any("forever: exit status" in line for line in lines)
    assert lines[-1] == "0 sandboxes are left"


def test_the_program_of_the_readme(product: Product, debian: LocalImage) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    block = re.search(r"```python\n(from snapshotter import api\n.*?)```", readme, re.DOTALL)
    assert block is not None
    code = block[1].replace("docker://registry.example/agent:latest", debian.reference)
    program = code.replace("api.connect()", f"api.connect(root={str(product.root)!r})")
    (product.base / "task").mkdir()
    task = "import os; open('/task/result', 'w').write(os.environ['N']); print('done')"
    (product.base / "task/main.py").write_text(task)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=product.environment,
        cwd=product.base,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 done\n\n", "")
    assert (product.base / "result").read_text() == "7"


def test_mounting_and_reading(product: Product, debian: LocalImage) -> None:
    lines = play(product, "mount_and_read.py", debian.reference, "/etc/passwd")
    counted = re.fullmatch(r"([\d,]+) files of ([\d,]+) bytes; fetched for that: 0 bytes", lines[0])
    assert counted is not None
    assert lines[1].startswith("root:x:0:0:")
    fetched = re.fullmatch(r"fetched in all: ([\d,]+) bytes", lines[-1])
    assert fetched is not None
    assert 0 < int(fetched[1].replace(",", "")) < int(counted[2].replace(",", "")) / 50
