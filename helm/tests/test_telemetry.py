"""Alerts and dashboards: they name metrics that exist, fire when they should, and lead to a page that helps."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from conftest import CHART, ROOT, TESTS, VALUE_SETS, objects, rendered

sys.path.insert(0, str(ROOT / "helm" / "tools"))
import dashboards  # noqa: E402

RULES = CHART / "rules" / "relay.yaml"
RUNBOOKS = ROOT / "docs" / "operations" / "runbooks"
#: Labels of Prometheus and of the engine.
SCRAPED = {"namespace", "pod", "instance", "le"}
#: Counters that are not there before their first count, which is no increase: their alerts ask for the number itself as well.
BORN_COUNTED = {"relay_recoveries_total"}
METRIC = re.compile(r"\brelay_[a-z_]+\b")


def metrics_in(path):
    """Name to kind, from a list of named constants."""
    source = (ROOT / path).read_text()
    constant = r'pub(?:\(crate\))? const \w+: &str = "(\w+)";'
    named = re.findall(constant, source)
    kinds = {name: kind for kind, name in re.findall(r'\b(Counter|Gauge|Histogram)\b[^\n]*\n(?:///[^\n]*\n)*' + constant, source)}
    assert named and set(kinds) == set(named), "each name says Counter, Gauge or Histogram"
    return kinds


def engine_metrics():
    return metrics_in("crates/domain/src/metric_names.rs") | metrics_in("crates/tasks/src/metric_names.rs")


def node_metrics():
    return metrics_in("services/broker/src/metric_names.rs")


def alerts():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def boards():
    return {path.name: json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))}


def expressions():
    """(where, PromQL) of everything that asks Prometheus."""
    yield from ((f"alert {rule['alert']}", rule["expr"]) for rule in alerts())
    for name, board in boards().items():
        for panel in board["panels"]:
            yield from ((f"{name}: {panel['title']}", target["expr"]) for target in panel["targets"])
    for scaled in (o for name in VALUE_SETS for o in objects(rendered(name)) if o["kind"] == "ScaledObject"):
        yield "ScaledObject", scaled["spec"]["triggers"][0]["metadata"]["query"]


def promtool(*arguments):
    if shutil.which("promtool") is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is missing: install Debian's package prometheus")
        pytest.skip("promtool is missing: install Debian's package prometheus")
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True)


def test_every_metric_is_documented_with_its_kind():
    page = (ROOT / "docs/metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(relay_\w+)` \| (\w+) \|", page, re.MULTILINE))
    tenants = {name: kind for name, kind in rows.items() if name.startswith("relay_workspace_")}
    operators = {name: kind for name, kind in rows.items() if name not in tenants}
    assert operators == {name: kind.lower() for name, kind in (engine_metrics() | node_metrics()).items()}
    source = (ROOT / "services/gateway/src/routes/mailboxes/insight.rs").read_text()
    served = re.findall(r'\("(\w+)", "(counter|gauge)", ', source)
    assert tenants == {f"relay_workspace_{name}": kind for name, kind in served}


def test_every_metric_that_is_asked_for_exists():
    kinds = engine_metrics()
    asked = 0
    for where, expression in expressions():
        names = METRIC.findall(expression)
        assert names, where
        for name in names:
            asked += 1
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            if name in kinds:
                assert kinds[name] != "Histogram", f"{where}: {name} is a histogram"
            else:
                assert kinds.get(base) == "Histogram", f"{where}: the engine has no {name}"
    assert asked > 40


def test_counters_are_asked_for_their_rate_and_gauges_are_not():
    kinds = engine_metrics()
    for where, expression in expressions():
        for match in METRIC.finditer(expression):
            before = expression[: match.start()]
            rated = re.search(r"(rate|increase)\($", before) is not None
            counted = kinds.get(match[0], "Histogram") != "Gauge"
            assert rated == counted or match[0] in BORN_COUNTED, f"{where}: {match[0]}"


def test_every_label_is_one_that_the_metrics_have():
    source = (ROOT / "docs/metrics.md").read_text()
    own = set(re.findall(r"`(reason|loop|by|method|route|state|status|outcome)`", source)) | SCRAPED | {"service"}
    for where, expression in expressions():
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in labels.split(",")} <= own, where
        for label in re.findall(r"([a-z_]+)(?:=~|!~|!=|=)\"", expression):
            assert label in own, where


def test_every_expression_is_promql(tmp_path):
    rules = [
        {"record": f"x{number}", "expr": expression.replace("$__rate_interval", "5m").replace("$namespace", "a")}
        for number, (_, expression) in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_accepts_the_rules():
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_only_then():
    tested = promtool("test", "rules", str(TESTS / "rules_test.yaml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_tested_both_ways():
    cases = [case for test in yaml.safe_load((TESTS / "rules_test.yaml").read_text())["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alerts()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_every_alert_leads_to_a_page_that_helps():
    linked = set()
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["for"] and rule["annotations"]["summary"] and rule["annotations"]["description"]
        path = ROOT / rule["annotations"]["runbook_url"]
        linked.add(path)
        text = path.read_text()
        assert rule["alert"] in text, f"{path.name} does not name {rule['alert']}"
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings == ["Detect", "Confirm", "Fix", "Prevent"], path.name
    assert linked == set(RUNBOOKS.glob("*.md")) - {RUNBOOKS / "README.md"}, "a page without an alert"


def test_the_chart_ships_the_rules_for_its_own_release(tmp_path):
    rule = next(o for o in objects(rendered("workers-by-lag")) if o["kind"] == "PrometheusRule")
    shipped = [r for group in rule["spec"]["groups"] for r in group["rules"]]
    # Each asks for its own release only: another one in the same Prometheus neither hides a fault of this one nor repeats it.
    own = 'namespace="messaging"'
    for one in shipped:
        for asked in METRIC.finditer(one["expr"]):
            assert one["expr"][asked.end() :].startswith(f"{{{own}"), f"{one['alert']}: {asked[0]}"
    everywhere = [r["expr"].replace(f"{{{own}}}", "").replace(f"{own}, ", "") for r in shipped]
    assert everywhere == [r["expr"] for r in alerts()]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    checked = promtool("check", "rules", str(tmp_path / "rules.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {r["annotations"]["runbook_url"].rsplit("/", 1)[0] for r in shipped} == {"https://wiki.example/relay"}


def test_the_chart_ships_every_dashboard():
    shipped = {}
    for thing in objects(rendered("production")):
        if thing["metadata"]["labels"].get("grafana_dashboard") == "1":
            shipped |= {name: json.loads(text) for name, text in thing["data"].items()}
    assert shipped == boards()


def test_dashboards_are_as_their_source_says():
    made = dashboards.texts()
    files = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert made == files, "run python3 helm/tools/dashboards.py"


@pytest.mark.parametrize("name", boards())
def test_grafanas_own_model_reads_the_dashboard(name):
    """Grafana's library round-trips the dashboards, so they contain no unknown field."""
    plugins.register_default_plugins()
    board = boards()[name]
    read = Dashboard.from_json(board)
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == board
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(titles)) == len(titles)
    assert board["uid"] + ".json" == name
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places), "panels lie on each other"
