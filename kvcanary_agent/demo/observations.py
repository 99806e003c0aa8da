"""What the server's process has recorded with OpenTelemetry, read from the JSON of GET /metrics and GET /logs."""

from typing import Any

Attributes = dict[str, Any]

VIOLATION_EVENT = "kvcanary.violation"


def points(metrics: dict[str, Any], name: str) -> list[tuple[Attributes, dict[str, Any]]]:
    """The data points of one metric, each with its attributes; none if the metric is unknown."""
    return [
        (point["attributes"], point)
        for resource in metrics.get("resource_metrics", ())
        for scope in resource["scope_metrics"]
        for metric in scope["metrics"]
        if metric["name"] == name
        for point in metric["data"]["data_points"]
    ]


def total(metrics: dict[str, Any], name: str) -> int:
    """The sum over all attributes of a metric that counts."""
    return sum(point["value"] for _, point in points(metrics, name))


def violations(log_records: list[dict[str, Any]]) -> list[Attributes]:
    """The violations among the log records, oldest first: their attributes, and their sentence under ``"body"``."""
    return [
        {**record["attributes"], "body": record["body"]}
        for record in log_records
        if record["event_name"] == VIOLATION_EVENT
    ]
