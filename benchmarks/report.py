"""Results as JSON, CSV, a table in Markdown, and a plot."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

from benchmarks.measure import CaseResult

_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def write_json(path: Path, results: list[CaseResult], machine: dict[str, Any]) -> None:
    """Every sample and what it was taken on."""
    document = {"machine": machine, "cases": [_summary(result) for result in results]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_csv(path: Path, results: list[CaseResult]) -> None:
    """One line for each sample."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "arm", "round", "seconds"])
        for result in results:
            for arm, samples in result.samples.items():
                writer.writerows([result.name, arm, n, f"{s:.6f}"] for n, s in enumerate(samples))


def markdown_table(results: list[CaseResult]) -> str:
    """Medians, tails, ratios with their intervals, and targets."""
    lines = [
        "| case | arm | P50 ms | P95 ms | ratio to baseline (95 %) | target |",
        "|---|---|---:|---:|---|---|",
    ]
    for result in results:
        for arm in sorted(result.samples, key=lambda name: name != result.baseline):
            times = f"{result.p50(arm) * 1000:.2f} | {result.p95(arm) * 1000:.2f}"
            title = result.title if arm == result.baseline else ""
            lines.append(
                f"| {title} | {arm} | {times} | {_ratio(result, arm)} | {_target(result, arm)} |"
            )
    return "\n".join(lines) + "\n"


def replace_figures(path: Path, table: str, machine: dict[str, Any]) -> None:
    """Puts the table and the machine between the two marks of a Markdown page."""
    before, _, rest = path.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())
    path.write_text(f"{before}{_BEGIN}\n{table}\nTaken on: {facts}.\n{_END}{after}")


def write_plot(path: Path, results: list[CaseResult]) -> None:
    """The ratios of the subjects to their baselines, with intervals and targets."""
    rcParams["svg.hashsalt"] = "lazy-snapshotter"
    figure = Figure(figsize=(9, 0.5 * len(results) + 1.5), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(results):
        ratio = result.ratio(result.subject)
        spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        axes.errorbar(ratio.median, row, xerr=spread, fmt="o", color="tab:blue", capsize=3)
        if result.target_ratio is not None:
            axes.plot(result.target_ratio, row, marker="|", markersize=16, color="tab:red")
    axes.axvline(1, color="0.7", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(results)), [result.title for result in results])
    axes.invert_yaxis()
    axes.set_xlabel("time relative to the baseline (red bar: target)")
    figure.savefig(path, metadata={"Date": None})


def _summary(result: CaseResult) -> dict[str, Any]:
    arms = {
        arm: {
            "p50_s": result.p50(arm),
            "p95_s": result.p95(arm),
            "ratio": asdict(result.ratio(arm)),
            "samples_s": samples,
        }
        for arm, samples in result.samples.items()
    }
    return {
        "name": result.name,
        "title": result.title,
        "subject": result.subject,
        "baseline": result.baseline,
        "target_ratio": result.target_ratio,
        "target_s": result.target_s,
        "is_met": result.is_met,
        "arms": arms,
    }


def _ratio(result: CaseResult, arm: str) -> str:
    if arm == result.baseline:
        return "1"
    ratio = result.ratio(arm)
    return f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def _target(result: CaseResult, arm: str) -> str:
    if arm != result.subject or result.is_met is None:
        return ""
    wanted = (
        f"≤ {result.target_ratio:g}×"
        if result.target_ratio is not None
        else f"≤ {(result.target_s or 0) * 1000:g} ms"
    )
    return f"{wanted} {'met' if result.is_met else '**missed**'}"
