"""Findings of checks, each with a verdict and what to do about it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from pydantic import Field

from shardmake.run.record import RunRecord


class Verdict(StrEnum):
    """The meaning of a finding for a run."""

    OK = "ok"
    WARNING = "warning"
    """A run works, but slowly or not in every case."""
    STOPS = "stops a run"
    NOT_CHECKED = "not checked"
    """The check could not run. It is never reported as `OK`."""


class Finding(RunRecord):
    """One row of the table."""

    check: str = Field(description="Name of the check.")
    found: str = Field(description="What the check found.")
    verdict: Verdict = Field(description="`ok`, `warning`, `stops a run` or `not checked`.")
    advice: str = Field("", description="What to do; empty if nothing.")
    nodes: tuple[str, ...] = Field((), description="Hosts on which it was found; empty for the login node.")


def ok(check: str, found: str) -> Finding:
    """Return a finding with nothing to do."""
    return Finding(check=check, found=found, verdict=Verdict.OK)


def warning(check: str, found: str, advice: str = "") -> Finding:
    """Return a finding that makes runs slower or fail in some cases."""
    return Finding(check=check, found=found, verdict=Verdict.WARNING, advice=advice)


def stops(check: str, found: str, advice: str = "") -> Finding:
    """Return a finding that would stop a run."""
    return Finding(check=check, found=found, verdict=Verdict.STOPS, advice=advice)


def not_checked(check: str, reason: str, advice: str = "") -> Finding:
    """Return a finding that says why the check could not run."""
    return Finding(check=check, found=reason, verdict=Verdict.NOT_CHECKED, advice=advice)


MakeFinding = Callable[[str, str, str], Finding]
"""`warning` or `stops`."""


def ok_if(good: bool, check: str, found: str, advice: str, bad: MakeFinding = warning) -> Finding:
    """Return an `ok` finding if ``good``, else a ``bad`` one with the advice."""
    return ok(check, found) if good else bad(check, found, advice)


Check = Callable[[], Finding | Iterable[Finding]]
"""A check with one finding or several."""


def run_checks(checks: Mapping[str, Check]) -> list[Finding]:
    """Run every check; one that raises an error is reported as not checked, and the others continue."""
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            result = check()
            found += [result] if isinstance(result, Finding) else result
        except Exception as error:  # one broken check must not hide the others
            found.append(not_checked(name, f"{type(error).__name__}: {error}"))
    return found


def merge_nodes(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with equal ones of several nodes in one row."""
    rows: dict[Finding, list[str]] = {}
    for finding in findings:
        rows.setdefault(finding.model_copy(update={"nodes": ()}), []).extend(finding.nodes)
    return [finding.model_copy(update={"nodes": tuple(dict.fromkeys(nodes))}) for finding, nodes in rows.items()]


def would_stop(findings: Iterable[Finding]) -> bool:
    """Return whether a finding would stop a run."""
    return any(finding.verdict is Verdict.STOPS for finding in findings)


_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.STOPS: "red", Verdict.NOT_CHECKED: "dim"}


def print_table(title: str, findings: Sequence[Finding]) -> None:
    """Print the findings as a table: check, found, verdict, what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("check", "found", "verdict", "what to do"):
        table.add_column(name, overflow="fold")
    for row in findings:
        found = f"{', '.join(row.nodes)}: {row.found}" if row.nodes else row.found
        table.add_row(row.check, Text(found), Text(row.verdict, _STYLES[row.verdict]), Text(row.advice))
    Console().print(table)


def summarize(findings: Sequence[Finding]) -> str:
    """Return one line with the number of findings of each verdict."""
    counts = {verdict: sum(row.verdict is verdict for row in findings) for verdict in Verdict}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
