"""``kvcanary-agent dashboards``: alert rules for Prometheus and a dashboard for Grafana, over the agent's metrics."""
