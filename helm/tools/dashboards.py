"""Writes the Grafana dashboards of the chart with Grafana's own library.

    python3 helm/tools/dashboards.py

Every query uses metrics of `relay_domain::metric_names` only; a test says so.
"""

import json
import pathlib

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode
from grafana_foundation_sdk.models.common import LegendDisplayMode as Legend
from grafana_foundation_sdk.models.common import TooltipDisplayMode as Tooltip
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "relay" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
#: Restricts every query to the selected release.
RELEASE = 'namespace=~"$namespace"'
#: Outcomes of an attempt that the endpoint did not accept.
NOT_TAKEN = 'outcome=~"failed|dead|gone"'


def rate(metric, by="", where="", window="$__rate_interval"):
    labels = ",".join(filter(None, [RELEASE, where]))
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{labels}}}[{window}]))"


def quantile(q, metric, by="", where=""):
    labels = ",".join(filter(None, [RELEASE, where]))
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({grouped}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))"


def gauge(function, metric, by="", where=""):
    labels = ",".join(filter(None, [RELEASE, where]))
    grouped = f" by ({by})" if by else ""
    return f"{function}{grouped} ({metric}{{{labels}}})"


def query(expression, legend):
    return prometheus.Dataquery().expr(expression).legend_format(legend).datasource(SOURCE)


def graph(title, unit, about, *queries):
    panel = timeseries.Panel().title(title).description(about).datasource(SOURCE).unit(unit).min(0).fill_opacity(8)
    panel = panel.tooltip(common.VizTooltipOptions().mode(Tooltip.MULTI)).height(8).span(12)
    panel = panel.legend(common.VizLegendOptions().show_legend(True).display_mode(Legend.LIST).placement("bottom").calcs([]))
    for number, (legend, expression) in enumerate(queries):
        panel = panel.with_target(query(expression, legend).ref_id(chr(ord("A") + number)))
    return panel


def number(title, unit, about, expression):
    panel = stat.Panel().title(title).description(about).datasource(SOURCE).unit(unit).height(4).span(6)
    panel = panel.graph_mode(BigValueGraphMode.AREA)
    return panel.with_target(query(expression, "").ref_id("A"))


def board(uid, title, about, *panels):
    made = dashboard.Dashboard(title).uid(uid).description(about).tags(["relay"]).time("now-1h", "now").refresh("30s")
    made = made.timezone("browser").readonly()
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    namespaces = dashboard.QueryVariable("namespace").label("Namespace").datasource(SOURCE)
    namespaces = namespaces.query("label_values(relay_outbox_pending, namespace)").include_all(True).all_value(".*")
    made = made.with_variable(namespaces.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    for panel in panels:
        made = made.with_panel(panel)
    return made.build()


DELIVERY = board(
    "relay-delivery", "Relay: delivery", "Path of a message from its acceptance to acked deliveries.",
    number("Accepted", "cps", "Messages committed per second.", rate("relay_messages_accepted_total")),
    number("Acknowledged", "cps", "Deliveries settled by socket acks per second.", rate("relay_deliveries_acked_total")),
    number("Commit p99", "s", "99th percentile of the commit duration.", quantile(0.99, "relay_commit_seconds")),
    number("Outbox lag", "s", "Age of the oldest batch that is not marked published.", gauge("max", "relay_outbox_lag_seconds")),
    graph("Funnel", "cps", "Rates of each step. Sent is above written while mailboxes are resumed, and below it while agents are offline.",
          ("accepted messages", rate("relay_messages_accepted_total")),
          ("written deliveries", rate("relay_deliveries_written_total")),
          ("published", rate("relay_deliveries_published_total")),
          ("sent", rate("relay_deliveries_sent_total")),
          ("claimed", rate("relay_deliveries_claimed_total")),
          ("acknowledged", rate("relay_deliveries_acked_total"))),
    graph("Refused and dead-lettered", "cps", "Refused: the mailbox was full, and the sender was notified. Dead letters by reason.",
          ("refused, mailbox full", rate("relay_deliveries_refused_total")),
          ("dead: {{reason}}", rate("relay_deliveries_dead_lettered_total", by="reason"))),
    graph("From send to ack", "s", "Time from queueing a frame for a socket to its ack; one frame per agent is measured at a time.",
          ("p50", quantile(0.5, "relay_ack_latency_seconds")),
          ("p99", quantile(0.99, "relay_ack_latency_seconds"))),
    graph("Not delivered live", "cps", "Replays rise after reconnects. A rate of missing live copies that stays high means that copies are lost on NATS or not sent.",
          ("replayed after a resume", rate("relay_deliveries_replayed_total")),
          ("live copy missing", rate("relay_deliveries_repaired_total")),
          ("duplicates dropped", rate("relay_duplicates_dropped_total"))),
    graph("Requests", "reqps", "By status.", ("{{status}}", rate("relay_http_requests_total", by="status"))),
    graph("Request p99 by route", "s", "The ten slowest routes.",
          ("{{route}}", f"topk(10, {quantile(0.99, 'relay_http_seconds', by='route')})")),
)

NODES = board(
    "relay-nodes", "Relay: nodes", "Sockets of nodes and the agents that they serve.",
    number("Nodes", "short", "Node sockets that are open.", gauge("sum", "relay_connected_nodes")),
    number("Agents", "short", "Agents served by these sockets.", gauge("sum", "relay_connected_agents")),
    number("Gateways", "short", "Gateways that report.", gauge("count", "relay_connected_nodes")),
    number("Largest share", "percentunit", "Share of all nodes on the gateway with the most nodes.",
           f"{gauge('max', 'relay_connected_nodes')} / {gauge('sum', 'relay_connected_nodes')}"),
    graph("Nodes by gateway", "short", "", ("{{pod}} {{instance}}", gauge("sum", "relay_connected_nodes", by="pod, instance"))),
    graph("Agents by gateway", "short", "", ("{{pod}} {{instance}}", gauge("sum", "relay_connected_agents", by="pod, instance"))),
    graph("Frames sent by gateway", "cps", "", ("{{pod}} {{instance}}", rate("relay_deliveries_sent_total", by="pod, instance"))),
    graph("Acks above the sent seq", "cps", "Acks clamped to the highest sent seq: a client is faulty.", ("clamped", rate("relay_acks_clamped_total"))),
)

TENANTS = board(
    "relay-tenants", "Relay: tenants", "Requests and refusals of all workspaces. These metrics have no workspace label; GET /v1/workspace/metrics covers one workspace.",
    graph("Refused requests", "reqps", "By exceeded limit: of the workspace, the caller or the client address.",
          ("{{by}}", rate("relay_requests_limited_total", by="by"))),
    graph("Rate limit batches", "cps", "Batches of rate limit tokens that gateways took from Postgres.", ("taken", rate("relay_budget_takings_total"))),
    graph("Client errors", "reqps", "401 after a rotated token, 429 at a limit.", ("{{status}}", rate("relay_http_requests_total", by="status", where='status=~"4.."'))),
    graph("Full mailboxes", "cps", "Deliveries not written; their senders were notified.", ("refused", rate("relay_deliveries_refused_total"))),
    graph("Busiest routes", "reqps", "", ("{{method}} {{route}}", f"topk(10, {rate('relay_http_requests_total', by='method, route')})")),
    graph("Dead letters", "cps", "By reason.", ("{{reason}}", rate("relay_deliveries_dead_lettered_total", by="reason"))),
)

STORAGE = board(
    "relay-storage", "Relay: Postgres and NATS", "Postgres and NATS as the engine sees them; their own exporters have more.",
    graph("Commits", "s", "Duration of a commit on the accept path, including retries.",
          ("p50", quantile(0.5, "relay_commit_seconds")), ("p99", quantile(0.99, "relay_commit_seconds"))),
    graph("Requests in one commit", "short", "Large batches under load are good: one fsync commits them all.",
          ("p50", quantile(0.5, "relay_commit_batch_size")), ("p99", quantile(0.99, "relay_commit_batch_size"))),
    graph("Outbox", "short", "Batches that are not marked published, counted to 10 000.", ("pending", gauge("max", "relay_outbox_pending"))),
    graph("Outbox lag", "s", "Age of the oldest of them.", ("lag", gauge("max", "relay_outbox_lag_seconds"))),
    graph("Publishing", "cps", "Stalled: JetStream took longer than 250 ms. Skipped: the queue was full. Relayed: published by a worker.",
          ("stalled", rate("relay_publish_stalled_total")), ("skipped", rate("relay_publish_skipped_total")),
          ("relayed", rate("relay_outbox_relayed_total"))),
    graph("Connections to Postgres", "short", "Of all processes. Requests wait while all connections are in use.",
          ("{{state}}", gauge("sum", "relay_database_connections", by="state")),
          ("at most", gauge("sum", "relay_database_connections_max"))),
    graph("Connected to NATS", "short", "1 while the process is connected.",
          ("{{pod}} {{instance}}", gauge("min", "relay_nats_connected", by="pod, instance"))),
    graph("Frames stored by JetStream", "cps", "", ("published", rate("relay_deliveries_published_total"))),
)

LOOPS = board(
    "relay-loops", "Relay: worker loops", "Expiry, the outbox relay, retention and the others.",
    graph("Since the last success", "s", "Of the worker with the latest success. An alert fires after 10 minutes; for partitions after 3 hours.",
          ("{{loop}}", f"time() - {gauge('max', 'relay_loop_last_success_timestamp_seconds', by='loop')}")),
    graph("Failures", "cps", "", ("{{loop}}", rate("relay_loop_failures_total", by="loop"))),
    graph("Work", "cps", "Items processed.", ("{{loop}}", rate("relay_loop_work_total", by="loop"))),
    graph("Duration of a tick, p99", "s", "", ("{{loop}}", quantile(0.99, "relay_loop_seconds", by="loop"))),
)

PUSH = board(
    "relay-push", "Relay: http_push", "Deliveries and events that workers dispatch to tenants' endpoints.",
    number("Attempts", "cps", "Delivery attempts per second.", rate("relay_push_attempts_total")),
    number("Not accepted", "percentunit", "Share of the attempts that the endpoint did not accept.",
           f"{rate('relay_push_attempts_total', where=NOT_TAKEN)} / {rate('relay_push_attempts_total')}"),
    number("Call p99", "s", "99th percentile of the call duration.", quantile(0.99, "relay_push_seconds")),
    number("Event lag", "s", "Age of the oldest due event of a subscription.",
           gauge("max", "relay_loop_lag_seconds", where='loop="subscriptions"')),
    graph("Calls of deliveries", "cps", "Delivered: accepted, ack pending. Acked: accepted and acked. Failed: retried later. Dead: given up. "
          "Gone: the endpoint answered 410, and dispatching to the agent has ended.",
          ("{{outcome}}", rate("relay_push_attempts_total", by="outcome"))),
    graph("Duration of a call", "s", "From connecting to the end of the response.",
          ("p50", quantile(0.5, "relay_push_seconds")), ("p99", quantile(0.99, "relay_push_seconds"))),
    graph("Push lag", "s", "Age of the oldest due mailbox. An alert fires above a minute for five minutes.",
          ("lag", gauge("max", "relay_loop_lag_seconds", where='loop="push_sweep"'))),
    graph("Calls by worker", "cps", "Workers share the mailboxes.", ("{{pod}} {{instance}}", rate("relay_push_attempts_total", by="pod, instance"))),
    graph("Calls of event subscriptions", "cps", "Given up: after the last attempt, or after a 410.",
          ("{{outcome}}", rate("relay_subscription_calls_total", by="outcome"))),
    graph("Dead letters of endpoints", "cps", "Rejected: refused by the endpoint for good. Exhausted: all attempts failed.",
          ("{{reason}}", rate("relay_deliveries_dead_lettered_total", by="reason", where='reason=~"attempts_exhausted|rejected"'))),
    graph("Redriven", "cps", "Dead letters redriven by operators.", ("redriven", rate("relay_deliveries_redriven_total"))),
)

BOARDS = [DELIVERY, NODES, PUSH, TENANTS, STORAGE, LOOPS]


def texts():
    """File name to content."""
    return {f"{made.uid}.json": json.dumps(made, cls=JSONEncoder, indent=1, sort_keys=True) + "\n" for made in BOARDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
