"""``python -m benchmarks run``: samples the cases and writes docs/results/."""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.measure import Case, CaseResult, run_case
from benchmarks.start_cases import start_cases
from benchmarks.view_cases import view_cases
from benchmarks.world import World

_RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
_NAME = "kernel-view"
_FORMAL = (3, 30)
_QUICK = (1, 3)


def main(arguments: list[str]) -> int:
    """Runs what the command line asks for; 0 when every check held, whatever the times."""
    options = _parser().parse_args(arguments)
    warm_ups, samples = _QUICK if options.quick else _FORMAL
    results: list[CaseResult] = []
    facts = machine.describe()
    with World() as world:
        for case in _chosen(world, options.only):
            results.append(run_case(case, warm_ups=warm_ups, samples=samples))
            print(
                report.markdown_table(results[-1:]).splitlines(keepends=True)[-1],
                end="",
                flush=True,
            )
    table = report.markdown_table(results)
    if options.json is not None:
        report.write_json(options.json, results, facts)
    elif not options.quick and not options.only:
        _write_results(results, facts, table)
    print(table, end="")
    return 0


def _chosen(world: World, only: list[str]) -> list[Case]:
    cases = [*view_cases(world), *start_cases(world)]
    unknown = set(only) - {case.name for case in cases}
    if unknown:
        names = ", ".join(case.name for case in cases)
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {names}")
    return [case for case in cases if not only or case.name in only]


def _write_results(results: list[CaseResult], facts: dict[str, Any], table: str) -> None:
    report.write_json(_RESULTS / f"{_NAME}.json", results, facts)
    report.write_csv(_RESULTS / f"{_NAME}.csv", results)
    report.write_plot(_RESULTS / f"{_NAME}.svg", results)
    report.replace_figures(_RESULTS / f"{_NAME}.md", table, facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="sample the cases")
    run.add_argument("--quick", action="store_true", help="3 samples after 1 warm-up; no files")
    run.add_argument("--json", type=Path, help="write the results there instead of docs/results")
    run.add_argument("--only", action="append", default=[], metavar="CASE", help="only this case")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
