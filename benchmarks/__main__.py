"""``python -m benchmarks run``: samples the cases and writes docs/results/.

``python -m benchmarks containerd`` does so for the cases with containerd, and
``python -m benchmarks sandboxes`` for those of the Python surface.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.containerd_cases import ContainerdWorld, containerd_cases
from benchmarks.measure import Case, CaseResult, run_case
from benchmarks.sandbox_cases import sandbox_cases
from benchmarks.start_cases import start_cases
from benchmarks.view_cases import view_cases
from benchmarks.world import World

_RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
_FORMAL = (3, 30)
_QUICK = (1, 3)


def main(arguments: list[str]) -> int:
    """Runs what the command line asks for; 0 when every check held, whatever the times."""
    options = _parser().parse_args(arguments)
    warm_ups, samples = _QUICK if options.quick else _FORMAL
    facts = machine.describe()
    with contextlib.ExitStack() as stack:  # which may take minutes to end
        results = _sampled(_chosen(_CASES[options.suite](stack), options.only), warm_ups, samples)
        table = report.markdown_table(results)
        if options.json is not None:
            report.write_json(options.json, results, facts)
        elif not options.quick and not options.only:
            _write_results(options.suite, results, facts, table)
        print(table, end="", flush=True)
    return 0


def _sampled(cases: list[Case], warm_ups: int, samples: int) -> list[CaseResult]:
    results: list[CaseResult] = []
    for case in cases:
        results.append(run_case(case, warm_ups=warm_ups, samples=samples))
        row = report.markdown_table(results[-1:]).splitlines(keepends=True)[-1]
        print(row, end="", flush=True)
    return results


def _kernel_view_cases(stack: contextlib.ExitStack) -> list[Case]:
    world = stack.enter_context(World())
    return [*view_cases(world), *start_cases(world)]


def _containerd_cases(stack: contextlib.ExitStack) -> list[Case]:
    return containerd_cases(stack.enter_context(ContainerdWorld()))


def _sandbox_cases(stack: contextlib.ExitStack) -> list[Case]:
    return sandbox_cases(stack.enter_context(World()))


_CASES: dict[str, Callable[[contextlib.ExitStack], list[Case]]] = {
    "kernel-view": _kernel_view_cases,
    "containerd": _containerd_cases,
    "sandboxes": _sandbox_cases,
}
"""By the name of the results, the cases; what they need is entered into the stack."""


def _chosen(cases: list[Case], only: list[str]) -> list[Case]:
    unknown = set(only) - {case.name for case in cases}
    if unknown:
        names = ", ".join(case.name for case in cases)
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {names}")
    return [case for case in cases if not only or case.name in only]


def _write_results(name: str, results: list[CaseResult], facts: dict[str, Any], table: str) -> None:
    report.write_json(_RESULTS / f"{name}.json", results, facts)
    report.write_csv(_RESULTS / f"{name}.csv", results)
    report.write_plot(_RESULTS / f"{name}.svg", results)
    report.replace_figures(_RESULTS / f"{name}.md", table, facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    suites = {"run": "kernel-view", "containerd": "containerd", "sandboxes": "sandboxes"}
    for command, suite in suites.items():
        run = commands.add_parser(command, help=f"sample the cases of docs/results/{suite}.md")
        run.set_defaults(suite=suite)
        run.add_argument("--quick", action="store_true", help="3 samples after 1 warm-up; no files")
        run.add_argument("--json", type=Path, help="write the results there, not to docs/results")
        run.add_argument("--only", action="append", default=[], metavar="CASE", help="only this")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
