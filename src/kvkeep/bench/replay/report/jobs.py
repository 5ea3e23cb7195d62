"""The section of the page about jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.report.charts import PERCENTILES
from kvkeep.bench.replay.report.markup import chart, choice, details, section, table
from kvkeep.bench.replay.words import count, duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.replay.report.arranged import Arranged

__all__ = ["jobs_section"]


def jobs_section(found: Arranged) -> str:
    """Return the chart and the table of how long jobs take."""
    head = [
        "policy", "capacity, tokens", "jobs", *(f"whole job {one}" for one in PERCENTILES),
        *(f"served {one}" for one in PERCENTILES),
    ]  # fmt: skip
    rows = (
        [
            line.name,
            count(outcome.capacity_tokens),
            count(outcome.latency["jobs"]),
            *_durations(outcome.latency.get("job_s")),
            *_durations(outcome.latency.get("job_served_s")),
        ]
        for line, outcome in found.each()
        if outcome.latency.get("jobs")
    )
    return section(
        "jobs",
        "How long a job takes",
        "<p>A job is a session with the sub-agents that it called, from its first request to its "
        "last answer. It is served while one of its requests waits or is computed; the rest are "
        "pauses of tools and people.</p>",
        choice("job-percentile", "Percentile", [(one, one) for one in PERCENTILES]),
        chart(
            "jobs",
            "Time for which jobs are served, against capacity",
            "Reuse shortens each answer of a job, and the waiting of all others.",
            details("The figures", table("Times of jobs", head, rows)),
        ),
    )


def _durations(times: Any) -> Iterator[str]:
    for one in PERCENTILES:
        value = (times or {}).get(one)
        yield "–" if value is None else duration(value)
