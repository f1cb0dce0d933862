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
#: Narrows every query to the release that was chosen.
RELEASE = 'namespace=~"$namespace"'
#: Outcomes of a call that the endpoint did not take.
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
    "relay-delivery", "Relay: delivery", "From an accepted message to its acknowledged deliveries.",
    number("Accepted", "cps", "Messages committed a second.", rate("relay_messages_accepted_total")),
    number("Acknowledged", "cps", "Deliveries settled by socket acks a second.", rate("relay_deliveries_acked_total")),
    number("Commit p99", "s", "99 of 100 commits take no longer.", quantile(0.99, "relay_commit_seconds")),
    number("Outbox lag", "s", "Age of the oldest batch that is not marked published.", gauge("max", "relay_outbox_lag_seconds")),
    graph("Funnel", "cps", "Each step of the way. Sent lies above written while mailboxes are resumed, below it while agents are away.",
          ("accepted messages", rate("relay_messages_accepted_total")),
          ("written deliveries", rate("relay_deliveries_written_total")),
          ("published", rate("relay_deliveries_published_total")),
          ("sent", rate("relay_deliveries_sent_total")),
          ("claimed", rate("relay_deliveries_claimed_total")),
          ("acknowledged", rate("relay_deliveries_acked_total"))),
    graph("Lost on the way", "cps", "Refused: the mailbox was full, and the sender was told. Dead letters, by reason.",
          ("refused, mailbox full", rate("relay_deliveries_refused_total")),
          ("dead: {{reason}}", rate("relay_deliveries_dead_lettered_total", by="reason"))),
    graph("From send to ack", "s", "From a frame's way into the socket's queue to its ack; one frame an agent is timed at once.",
          ("p50", quantile(0.5, "relay_ack_latency_seconds")),
          ("p99", quantile(0.99, "relay_ack_latency_seconds"))),
    graph("Not by the live way", "cps", "Replays are high after reconnects. Frames whose live copy is missing, high for long, mean that NATS loses copies.",
          ("replayed to who came", rate("relay_deliveries_replayed_total")),
          ("live copy missing", rate("relay_deliveries_repaired_total")),
          ("duplicates dropped", rate("relay_duplicates_dropped_total"))),
    graph("Requests", "reqps", "By status.", ("{{status}}", rate("relay_http_requests_total", by="status"))),
    graph("Request p99 by route", "s", "The ten slowest routes.",
          ("{{route}}", f"topk(10, {quantile(0.99, 'relay_http_seconds', by='route')})")),
)

NODES = board(
    "relay-nodes", "Relay: nodes", "Sockets of nodes and the agents that they serve.",
    number("Nodes", "short", "Node sockets that are open.", gauge("sum", "relay_connected_nodes")),
    number("Agents", "short", "Agents that they serve.", gauge("sum", "relay_connected_agents")),
    number("Gateways", "short", "Gateways that report.", gauge("count", "relay_connected_nodes")),
    number("Largest share", "percentunit", "The fullest gateway's part of all nodes.",
           f"{gauge('max', 'relay_connected_nodes')} / {gauge('sum', 'relay_connected_nodes')}"),
    graph("Nodes by gateway", "short", "", ("{{pod}} {{instance}}", gauge("sum", "relay_connected_nodes", by="pod, instance"))),
    graph("Agents by gateway", "short", "", ("{{pod}} {{instance}}", gauge("sum", "relay_connected_agents", by="pod, instance"))),
    graph("Frames sent by gateway", "cps", "", ("{{pod}} {{instance}}", rate("relay_deliveries_sent_total", by="pod, instance"))),
    graph("Acks beyond what was sent", "cps", "Cut down to what was sent. A client with a fault.", ("clamped", rate("relay_acks_clamped_total"))),
)

TENANTS = board(
    "relay-tenants", "Relay: tenants", "What workspaces ask together, and what they are refused. Metrics carry no workspace: GET /v1/workspace/metrics tells of one.",
    graph("Refused requests", "reqps", "By what was used up: the workspace's budget, the caller's part, the address's.",
          ("{{by}}", rate("relay_requests_limited_total", by="by"))),
    graph("Budgets taken", "cps", "Batches of request budgets that gateways took from Postgres.", ("taken", rate("relay_budget_takings_total"))),
    graph("Client errors", "reqps", "401 after a rotated token, 429 at a limit.", ("{{status}}", rate("relay_http_requests_total", by="status", where='status=~"4.."'))),
    graph("Full mailboxes", "cps", "Deliveries that were not written; the senders were told.", ("refused", rate("relay_deliveries_refused_total"))),
    graph("Busiest routes", "reqps", "", ("{{method}} {{route}}", f"topk(10, {rate('relay_http_requests_total', by='method, route')})")),
    graph("Dead letters", "cps", "By reason.", ("{{reason}}", rate("relay_deliveries_dead_lettered_total", by="reason"))),
)

STORAGE = board(
    "relay-storage", "Relay: Postgres and NATS", "The servers as the engine meets them. Their own exporters tell the rest.",
    graph("Commits", "s", "Duration of a commit of the accept path, retries included.",
          ("p50", quantile(0.5, "relay_commit_seconds")), ("p99", quantile(0.99, "relay_commit_seconds"))),
    graph("Requests in one commit", "short", "Large batches under load are good: one fsync carries them all.",
          ("p50", quantile(0.5, "relay_commit_batch_size")), ("p99", quantile(0.99, "relay_commit_batch_size"))),
    graph("Outbox", "short", "Batches that are not marked published, counted to 10 000.", ("pending", gauge("max", "relay_outbox_pending"))),
    graph("Outbox lag", "s", "Age of the oldest of them.", ("lag", gauge("max", "relay_outbox_lag_seconds"))),
    graph("Publishing", "cps", "Stalled: JetStream took longer than 250 ms. Skipped: there was no room. Relayed: the worker did it.",
          ("stalled", rate("relay_publish_stalled_total")), ("skipped", rate("relay_publish_skipped_total")),
          ("relayed", rate("relay_outbox_relayed_total"))),
    graph("Connections to Postgres", "short", "Of all processes. Where as many are used as there may be, requests wait.",
          ("{{state}}", gauge("sum", "relay_database_connections", by="state")),
          ("at most", gauge("sum", "relay_database_connections_max"))),
    graph("Connected to NATS", "short", "1 while the process is connected.",
          ("{{pod}} {{instance}}", gauge("min", "relay_nats_connected", by="pod, instance"))),
    graph("Frames stored by JetStream", "cps", "", ("published", rate("relay_deliveries_published_total"))),
)

LOOPS = board(
    "relay-loops", "Relay: worker loops", "Expiry, the outbox relay, retention and the others.",
    graph("Since the last success", "s", "Of the worker that did it last. More than 10 minutes is an alert; for partitions, 3 hours.",
          ("{{loop}}", f"time() - {gauge('max', 'relay_loop_last_success_timestamp_seconds', by='loop')}")),
    graph("Failures", "cps", "", ("{{loop}}", rate("relay_loop_failures_total", by="loop"))),
    graph("Work", "cps", "Things dealt with.", ("{{loop}}", rate("relay_loop_work_total", by="loop"))),
    graph("Duration of a tick, p99", "s", "", ("{{loop}}", quantile(0.99, "relay_loop_seconds", by="loop"))),
)

PUSH = board(
    "relay-push", "Relay: http_push", "Deliveries and events that workers post to tenants' endpoints.",
    number("Tries", "cps", "Calls of deliveries a second.", rate("relay_push_attempts_total")),
    number("Not taken", "percentunit", "The part of the calls that the endpoint did not take.",
           f"{rate('relay_push_attempts_total', where=NOT_TAKEN)} / {rate('relay_push_attempts_total')}"),
    number("Call p99", "s", "99 of 100 calls take no longer.", quantile(0.99, "relay_push_seconds")),
    number("Event lag", "s", "How long the oldest event that is due waits to be posted to its subscription.",
           gauge("max", "relay_loop_lag_seconds", where='loop="subscriptions"')),
    graph("Calls of deliveries", "cps", "Delivered: taken, the ack is to come. Acked: taken, and that was the ack. Failed: tried again later. Dead: given up. "
          "Gone: the endpoint said 410, and the agent is not pushed to any more.",
          ("{{outcome}}", rate("relay_push_attempts_total", by="outcome"))),
    graph("Duration of a call", "s", "From connecting to the end of the answer.",
          ("p50", quantile(0.5, "relay_push_seconds")), ("p99", quantile(0.99, "relay_push_seconds"))),
    graph("Push lag", "s", "How long the oldest mailbox that is due waits. More than a minute for five is an alert.",
          ("lag", gauge("max", "relay_loop_lag_seconds", where='loop="push_sweep"'))),
    graph("Calls by worker", "cps", "They share the mailboxes.", ("{{pod}} {{instance}}", rate("relay_push_attempts_total", by="pod, instance"))),
    graph("Calls of event subscriptions", "cps", "Given up: after the last try, or the address is gone.",
          ("{{outcome}}", rate("relay_subscription_calls_total", by="outcome"))),
    graph("Dead letters of endpoints", "cps", "Rejected: the endpoint wants none of it. Exhausted: it was tried to the end.",
          ("{{reason}}", rate("relay_deliveries_dead_lettered_total", by="reason", where='reason=~"attempts_exhausted|rejected"'))),
    graph("Redriven", "cps", "Dead letters sent again by operators.", ("redriven", rate("relay_deliveries_redriven_total"))),
)

BOARDS = [DELIVERY, NODES, PUSH, TENANTS, STORAGE, LOOPS]


def texts():
    """File name to content."""
    return {f"{made.uid}.json": json.dumps(made, cls=JSONEncoder, indent=1, sort_keys=True) + "\n" for made in BOARDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
