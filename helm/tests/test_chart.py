"""The chart, rendered and linted by Helm itself and held against the schemas of Kubernetes."""

import os
import re
import sys

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint, package

from conftest import CHART, ROOT, TESTS, VALUE_SETS, chart, objects, refusal, render, rendered, values_of

sys.path.insert(0, str(ROOT / "helm" / "tools"))
import values_table  # noqa: E402

#: Kinds of operators' own, which Kubernetes has no schemas for.
FOREIGN = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
MINIMAL = {"database": {"url": "postgres://db/relay"}, "nats": {"url": "nats://nats:4222"}}
every_set = pytest.mark.parametrize("name", VALUE_SETS)


def find(name, kind, suffix=""):
    return [o for o in objects(rendered(name)) if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]


def one(name, kind, suffix=""):
    (only,) = find(name, kind, suffix)
    return only


def merged(*layers):
    whole = {}
    for layer in layers:
        for key, value in layer.items():
            whole[key] = merged(whole.get(key, {}), value) if isinstance(value, dict) else value
    return whole


def notes(values):
    return next(text for path, text in render(values).items() if path == "relay/templates/NOTES.txt")


def test_there_are_five_sets_of_values_or_more():
    assert len(VALUE_SETS) >= 5


@every_set
def test_helm_lint_is_content(name):
    report = lint(CHART, values_of(name), strict=True, with_subcharts=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@every_set
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_every_object_is_as_kubernetes_wants_it(name, version):
    made = objects(rendered(name))
    assert len(made) > 5
    for thing in made:
        if thing["kind"] not in FOREIGN:
            kubernetes_validate.validate(thing, version, strict=True)


@every_set
def test_nothing_is_made_twice(name):
    names = [(o["kind"], o["metadata"]["name"]) for o in objects(rendered(name))]
    assert len(names) == len(set(names))


@every_set
def test_rendered_as_before(name):
    """Run with RELAY_UPDATE_SNAPSHOTS=1 after a wanted change, and read the difference."""
    parts = []
    for path, text in rendered(name).items():
        if path == "relay/templates/monitoring.yaml":
            text = without_bulk(text)
        parts.append(f"# Source: {path}\n" + "\n".join(line.rstrip() for line in text.strip().splitlines()))
    text = "\n---\n".join(parts) + "\n"
    file = TESTS / "snapshots" / f"{name}.txt"
    if os.environ.get("RELAY_UPDATE_SNAPSHOTS"):
        file.write_text(text)
    assert file.exists() and file.read_text() == text, f"{file.name} differs; see this test's description"


def without_bulk(text):
    """Dashboards and rules have tests of their own."""
    kept = []
    for thing in yaml.safe_load_all(text):
        if thing and thing["kind"] == "ConfigMap":
            thing["data"] = {key: f"dashboard of {key}" for key in thing["data"]}
        elif thing and thing["kind"] == "PrometheusRule":
            thing["spec"] = {"groups": [group["name"] for group in thing["spec"]["groups"]]}
        if thing:
            kept.append(thing)
    return yaml.safe_dump_all(kept, sort_keys=False)


def test_nats_of_a_trial_restarts_with_another_configuration():
    pods = [one(name, "StatefulSet", "-trial-nats")["spec"]["template"] for name in ("trial", "trial-cluster")]
    assert len({pod["metadata"]["annotations"]["checksum/config"] for pod in pods}) == 2


def test_the_chart_can_be_packaged(tmp_path):
    archive = package(CHART, destination=tmp_path)
    assert os.path.getsize(archive) > 10_000


def test_without_servers_it_is_refused():
    assert "give exactly one of database.url" in refusal({})
    assert "give exactly one of nats.url" in refusal({"database": MINIMAL["database"]})
    both = merged(MINIMAL, {"trialPostgres": {"enabled": True}})
    assert "give exactly one of database.url" in refusal(both)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gateway": {"terminationGracePeriodSeconds": 20}}, "preStopSeconds + 30"),
        ({"files": {"s3": {"bucket": "b"}, "existingClaim": "c"}}, "not in both"),
        ({"database": {"existingSecretDirectKey": "D"}}, "needs database.existingSecret"),
        ({"files": {"s3": {"bucket": "b", "accessKeyId": "a"}}}, "secretAccessKey go together"),
        ({"secrets": {"existingSecret": "mine"}, "push": {"proxyAuth": "let-me-out"}}, "RELAY_PUSH_PROXY_AUTH"),
        (
            {"secrets": {"existingSecret": "mine"}, "files": {"s3": {"bucket": "b", "accessKeyId": "a", "secretAccessKey": "k"}}},
            "RELAY_FILES_S3_ACCESS_KEY_ID",
        ),
        ({"config": {"operator": {"issuer": "https://id.example"}}}, "go together"),
        ({"config": {"hosted": True}}, "needs operators"),
        ({"gateway": {"autoscaling": {"enabled": True, "targetCpuPercent": 0}}}, "targetCpuPercent or"),
        ({"gateway": {"replicas": "two"}}, "/gateway/replicas"),
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 3}}, "replica"),
        ({"database": {"url": "mysql://db/relay"}}, "/database/url"),
        ({"secrets": {"signingSecret": "short"}}, "/secrets/signingSecret"),
        ({"config": {"retention": {"deliveryDays": 7}}}, "/config/retention/deliveryDays"),
        ({"push": {"endpointRate": 0}}, "/push/endpointRate"),
        ({"push": {"proxyUrl": "proxy:3128"}}, "/push/proxyUrl"),
        ({"nats": {"streamReplicas": 2}}, "/nats/streamReplicas"),
    ],
)
def test_what_cannot_work_is_refused(change, complaint):
    assert complaint in refusal(merged(MINIMAL, change))


def test_behind_a_pooler_every_program_has_the_way_past_it():
    values = {**MINIMAL, "database": {"existingSecret": "db", "existingSecretDirectKey": "DIRECT", "directPort": 5433}}
    made = objects(render(merged(values, {"networkPolicy": {"enabled": True}})))
    pods = [o["spec"]["template"]["spec"] for o in made if o["kind"] in ("Deployment", "Job")]
    assert len(pods) == 3
    for container in (c for pod in pods for c in pod["containers"] + pod.get("initContainers", [])):
        env = {variable["name"]: variable for variable in container["env"]}
        assert env["DATABASE_DIRECT_URL"]["valueFrom"]["secretKeyRef"] == {"name": "db", "key": "DIRECT"}
        assert env["RELAY_DATABASE_POOLER"]["value"] == "transaction"
    policies = [o for o in made if o["kind"] == "NetworkPolicy"]
    assert sum(5433 in [p["port"] for e in o["spec"].get("egress", []) for p in e.get("ports", [])] for o in policies) == 3


@every_set
def test_pods_have_no_rights(name):
    pods = [o["spec"]["template"]["spec"] for o in objects(rendered(name)) if o["kind"] in ("Deployment", "Job", "StatefulSet")]
    assert len(pods) >= 2
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["requests"]["memory"] and container["resources"]["limits"]["memory"]
            if container["image"].startswith("relay"):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True


@every_set
def test_no_secret_is_in_the_open(name):
    """Passwords and keys are in Secrets only."""
    secret = [v for o in objects(rendered(name)) if o["kind"] == "Secret" for v in (o["stringData"] or {}).values()]
    for thing in objects(rendered(name)):
        if thing["kind"] != "Secret":
            text = yaml.safe_dump(thing, width=10_000)
            # As a whole word: the password of a trial is the beginning of names.
            found = [value for value in secret if re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text)]
            assert not found, thing["metadata"]["name"]


@every_set
def test_the_drain_fits_into_the_pods_end(name):
    """30 s after SIGTERM a process ends itself (crates/runtime/src/shutdown.rs)."""
    source = (ROOT / "crates/runtime/src/shutdown.rs").read_text()
    assert "HARD_STOP_AFTER: Duration = Duration::from_secs(30)" in source
    pod = one(name, "Deployment", "-gateway")["spec"]["template"]["spec"]
    pause = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause + 30
    worker = one(name, "Deployment", "-worker")["spec"]["template"]["spec"]
    assert worker["terminationGracePeriodSeconds"] >= 30


@every_set
def test_alive_is_not_ready(name):
    for deployment in ("-gateway", "-worker"):
        container = one(name, "Deployment", deployment)["spec"]["template"]["spec"]["containers"][0]
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert "startupProbe" in container


@every_set
def test_every_reference_leads_somewhere(name):
    made = objects(rendered(name))
    given = values_of(name)
    outside = {given.get(part, {}).get("existingSecret") for part in ("database", "nats", "secrets")}
    there = {kind: {o["metadata"]["name"] for o in made if o["kind"] == kind} for kind in ("Secret", "ConfigMap", "ServiceAccount")}
    outside |= {given.get(part, {}).get("caSecret") for part in ("database", "nats")}
    there["Secret"] |= outside
    accounts = there["ServiceAccount"] | ({"default"} if not given.get("serviceAccount", {}).get("create", True) else set())
    for thing in made:
        if thing["kind"] != "Deployment":
            continue
        pod = thing["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] in accounts
        for container in pod["containers"] + pod.get("initContainers", []):
            for source in container.get("envFrom", []):
                kind, reference = ("Secret", "secretRef") if "secretRef" in source else ("ConfigMap", "configMapRef")
                assert source[reference]["name"] in there[kind]
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                assert reference is None or reference["name"] in there["Secret"]


@every_set
def test_policies_and_services_select_the_pods(name):
    made = objects(rendered(name))
    pods = [o["spec"]["template"]["metadata"]["labels"] for o in made if o["kind"] in ("Deployment", "StatefulSet", "Job")]
    selectors = [o["spec"]["selector"] for o in made if o["kind"] == "Service"]
    selectors += [o["spec"]["podSelector"]["matchLabels"] for o in made if o["kind"] == "NetworkPolicy"]
    selectors += [o["spec"]["selector"]["matchLabels"] for o in made if o["kind"] in ("PodDisruptionBudget", "Deployment")]
    assert selectors
    for selector in selectors:
        assert len([pod for pod in pods if selector.items() <= pod.items()]) == 1, selector


@every_set
def test_every_variable_is_one_that_the_engine_reads(name):
    documented = "".join((ROOT / "docs" / page).read_text() for page in ("configuration.md", "telemetry.md"))
    config = next(o for o in objects(rendered(name)) if o["kind"] == "ConfigMap" and "RELAY_HOSTED" in o["data"])
    extra = values_of(name).get("config", {}).get("extra", {})
    for variable in config["data"]:
        assert variable in extra or f"`{variable}`" in documented, variable


#: What the chart sets for each program itself.
OWN = {"RELAY_LISTEN", "RELAY_METRICS_LISTEN", "RELAY_FILES_DIR"}
#: Values that set every setting that has no default in the chart.
EVERYTHING = {
    "nats": {"caSecret": "nats-ca"},
    "config": {
        "publicUrl": "https://relay.example",
        "trustedProxies": ["10.0.0.0/8"],
        "defaultPlan": "pro",
        "operator": {"issuer": "https://id.example", "audience": "relay", "jwksUrl": "https://id.example/keys"},
    },
    "secrets": {"signingSecret": "s" * 32, "bootstrapSecret": "b" * 32, "secretKeys": "k1:AAAA"},
    "files": {
        "s3": {"bucket": "b", "endpoint": "https://s3.example", "region": "r", "accessKeyId": "a", "secretAccessKey": "k"},
        "typesAllowed": ["image/*"],
        "typesDenied": ["text/html"],
    },
    "egress": {"allow": ["hooks.corp"], "nameServers": ["10.0.0.53"]},
    "push": {"proxyUrl": "http://proxy:3128", "proxyAuth": "secret"},
}


def settings():
    """Every variable of gateways and workers, from their sources."""
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("services/gateway/src/**/*.rs"), *ROOT.glob("services/worker/src/**/*.rs")]
    code = "\n".join(path.read_text().split("#[cfg(test)]")[0] for path in sources if "xtask" not in path.parts)
    return set(re.findall(r'\benv = "(\w+)"', code))


def test_every_setting_of_the_engine_can_be_given_by_a_value():
    made = objects(render(merged(MINIMAL, EVERYTHING)))
    pooled = {**MINIMAL, "database": {"existingSecret": "db", "existingSecretDirectKey": "DIRECT"}}
    given = {name for o in made if o["kind"] in ("ConfigMap", "Secret") for name in o.get("data", o.get("stringData", {}))}
    deployments = (o for o in made + objects(render(pooled)) if o["kind"] == "Deployment")
    pods = [o["spec"]["template"]["spec"] for o in deployments]
    given |= {variable["name"] for pod in pods for container in pod["containers"] for variable in container["env"]}
    wanted = settings()
    assert len(wanted) > 30
    assert wanted - given - OWN == set()
    # An existing Secret may hold all that is secret here.
    secret = {name for o in made if o["kind"] == "Secret" and o["metadata"]["name"].endswith("-keys") for name in o["stringData"]}
    pods = objects(render(merged(MINIMAL, {"secrets": {"existingSecret": "mine"}})))
    for deployment in (o for o in pods if o["kind"] == "Deployment"):
        env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        assert secret <= {variable["name"] for variable in env if "valueFrom" in variable}


def test_each_role_has_its_own_user_of_nats():
    def key_of(values, role):
        (pod,) = (o["spec"]["template"]["spec"] for o in objects(render(values)) if o["metadata"]["name"].endswith(f"-{role}") and o["kind"] == "Deployment")
        return next(v["valueFrom"]["secretKeyRef"]["key"] for v in pod["containers"][0]["env"] if v["name"] == "NATS_URL")

    def urls(values):
        (secret,) = (o for o in objects(render(values)) if o["kind"] == "Secret" and "NATS_URL" in o.get("stringData", {}))
        return {role: secret["stringData"][key_of(values, role)] for role in ("gateway", "worker")}

    assert urls(MINIMAL) == {"gateway": "nats://nats:4222", "worker": "nats://nats:4222"}
    given = merged(MINIMAL, {"nats": {"workerUrl": "nats://w@nats:4222"}})
    assert urls(given) == {"gateway": "nats://nats:4222", "worker": "nats://w@nats:4222"}
    trial = {"database": MINIMAL["database"], "trialNats": {"enabled": True}}
    assert all(f"//relay-{role}:relay-trial@" in url for role, url in urls(trial).items())
    existing = {"database": MINIMAL["database"], "nats": {"existingSecret": "mine"}}
    assert [key_of(existing, role) for role in ("gateway", "worker")] == ["NATS_URL", "NATS_URL"]
    existing = merged(existing, {"nats": {"existingSecretWorkerKey": "WORKER"}})
    assert [key_of(existing, role) for role in ("gateway", "worker")] == ["NATS_URL", "WORKER"]


def test_a_changed_setting_replaces_the_pods():
    def checksums(values):
        deployments = [o for o in objects(render(values)) if o["kind"] == "Deployment"]
        return [d["spec"]["template"]["metadata"]["annotations"] for d in deployments]

    assert checksums(MINIMAL) == checksums(dict(MINIMAL))
    for change in ({"config": {"hosted": False, "rateLimits": False}}, {"nats": {"url": "nats://other:4222"}}):
        assert checksums(MINIMAL) != checksums(merged(MINIMAL, change))


def test_migrations_run_before_everything_else():
    job = one("minimal", "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][0] == "migrate"
    # With a Postgres that comes with the release there is none to migrate before it.
    assert find("trial", "Job") == []
    assert one("trial", "Deployment", "-gateway")["spec"]["template"]["spec"]["initContainers"][0]["args"][0] == "migrate"
    assert find("bare", "Job") == []


def test_the_migration_is_placed_where_it_may_run_and_does_not_wait_for_ever():
    """Helm waits for the Job; on tainted nodes one that bears no taints stays pending."""
    migrate = {
        "nodeSelector": {"pool": "messaging"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
    }
    made = objects(render(merged(MINIMAL, {"migrate": {**migrate, "activeDeadlineSeconds": 900}})))
    (job,) = [o for o in made if o["kind"] == "Job"]
    assert {key: job["spec"]["template"]["spec"].get(key) for key in migrate} == migrate
    assert job["spec"]["activeDeadlineSeconds"] == 900
    assert one("minimal", "Job")["spec"]["activeDeadlineSeconds"] > 0


def open_ports(values, component):
    """The ports beside DNS, Postgres and NATS that the policy of a component lets out to."""
    ports = [entry["port"] for rule in policy_of(values, component)["egress"] for entry in rule["ports"]]
    assert len(ports) == len(set(ports)) + 1, "DNS is there twice, nothing else is"
    return set(ports) - {53, 5432, 4222}


def test_the_migration_is_let_out_to_postgres_before_it_runs():
    """A namespace may deny everything by default, and the release's own policies come after the hooks."""
    made = objects(render(merged(MINIMAL, {"database": {"port": 6432}, "networkPolicy": {"database": [{"podSelector": {}}]}})))
    (policy,) = [o for o in made if o["kind"] == "NetworkPolicy" and o["metadata"]["name"].endswith("-migrate")]
    (job,) = [o for o in made if o["kind"] == "Job"]
    weight = "helm.sh/hook-weight"
    assert int(policy["metadata"]["annotations"][weight]) < int(job["metadata"]["annotations"][weight])
    assert policy["metadata"]["annotations"]["helm.sh/hook"] == job["metadata"]["annotations"]["helm.sh/hook"]
    dns, postgres = policy["spec"]["egress"]
    assert {entry["port"] for entry in dns["ports"]} == {53}
    assert postgres == {"ports": [{"port": 6432}], "to": [{"podSelector": {}}]}


def policy_of(values, component):
    made = objects(render(merged(MINIMAL, values)))
    (policy,) = [o for o in made if o["kind"] == "NetworkPolicy" and o["metadata"]["name"].endswith(component)]
    return policy["spec"]


def test_tenants_urls_lead_into_no_cluster():
    def blocks(values):
        (rule,) = [r for r in policy_of(values, "worker")["egress"] if {"port": 443} in r["ports"]]
        return {block["ipBlock"]["cidr"]: block["ipBlock"].get("except") for block in rule["to"]}

    default = blocks({})
    assert "10.0.0.0/8" in default["0.0.0.0/0"] and "169.254.0.0/16" in default["0.0.0.0/0"]
    assert "fc00::/7" in default["::/0"]
    # A proxy on the same port opens it to nothing more.
    assert blocks({"push": {"proxyUrl": "https://proxy/"}}) == default
    own = {"networkPolicy": {"clusterRanges": {"ipv4": ["10.96.0.0/12"], "ipv6": []}}}
    assert blocks(own) == {"0.0.0.0/0": ["10.96.0.0/12"], "::/0": None}


def test_metrics_are_scraped_from_the_given_places_only():
    def sources(values, component):
        return [r.get("from") for r in policy_of(values, component)["ingress"] or [] if {"port": "metrics"} in r["ports"]]

    namespace = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    pods = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    for component in ("gateway", "worker"):
        assert sources({}, component) == [namespace]
        assert sources({"networkPolicy": {"monitoring": pods}}, component) == [pods]
        assert sources({"networkPolicy": {"monitoring": []}}, component) == []


def test_the_ingress_logs_no_query():
    made = objects(render(merged(MINIMAL, {"ingress": {"enabled": True}})))
    (ingress,) = [o for o in made if o["kind"] == "Ingress"]
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/enable-access-log"] == "false"


OPERATOR = {"audience": "relay"}


@pytest.mark.parametrize(
    ("values", "of_gateways", "of_workers"),
    [
        ({}, {443}, {443}),
        ({"push": {"proxyUrl": "http://proxy:3128/fwd"}}, {443}, {443, 3128}),
        ({"push": {"proxyUrl": "http://proxy/3128"}}, {443}, {443, 80}),
        ({"push": {"proxyUrl": "https://user:4711@proxy/"}}, {443}, {443}),
        ({"config": {"otlpEndpoint": "http://10.0.0.7"}}, {443, 80}, {443, 80}),
        ({"config": {"otlpEndpoint": "http://10.0.0.7:4317/"}}, {443, 4317}, {443, 4317}),
        ({"config": {"otlpEndpoint": "http://[fd00::7]:4317"}}, {443, 4317}, {443, 4317}),
        ({"config": {"otlpEndpoint": "http://[fd00::7]"}}, {443, 80}, {443, 80}),
        ({"files": {"s3": {"bucket": "b", "endpoint": "http://minio:9000"}}}, {443, 9000}, {443, 9000}),
        ({"config": {"operator": {**OPERATOR, "issuer": "https://id.example:8443/realms/7"}}}, {443, 8443}, {443}),
        (
            {"config": {"operator": {**OPERATOR, "issuer": "https://id.example", "jwksUrl": "https://keys.example:9443/keys"}}},
            {443, 9443},
            {443},
        ),
        ({"networkPolicy": {"httpsPorts": []}, "files": {"s3": {"bucket": "b", "endpoint": "http://minio:9000"}}}, {9000}, {9000}),
    ],
)
def test_policies_open_the_ports_that_urls_lead_to(values, of_gateways, of_workers):
    assert open_ports(values, "gateway") == of_gateways
    assert open_ports(values, "worker") == of_workers


def test_weak_durability_is_said_aloud():
    assert "WARNING: JetStream keeps 1 copy" in notes(values_of("trial"))
    assert "WARNING: trialPostgres" in notes(values_of("trial"))
    assert "JetStream keeps" not in notes(values_of("trial-cluster"))
    assert "WARNING" not in notes(values_of("production"))


def test_sockets_outlive_the_proxys_patience():
    """Gateways close a socket after 75 s of silence; nothing before them may be less patient."""
    annotations = one("production", "Ingress")["metadata"]["annotations"]
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > 75
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-send-timeout"]) > 75
    own = merged(values_of("production"), {"ingress": {"annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "90"}}})
    ingress = next(o for o in objects(render(own)) if o["kind"] == "Ingress")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "90"


def test_metrics_are_on_no_port_of_clients():
    for name in VALUE_SETS:
        assert [p["name"] for p in one(name, "Service", "-gateway")["spec"]["ports"]] == ["http"]


def test_the_autoscaler_looks_at_nodes_and_cpu():
    scaler = one("production", "HorizontalPodAutoscaler")["spec"]
    assert [metric["type"] for metric in scaler["metrics"]] == ["Resource", "Pods"]
    assert scaler["metrics"][1]["pods"]["metric"]["name"] == "relay_connected_nodes"
    assert "replicas" not in one("production", "Deployment", "-gateway")["spec"]


def test_every_value_has_a_comment_and_the_readme_knows_it():
    readme = (CHART / "README.md").read_text()
    assert values_table.readme(readme) == readme, "run python3 helm/tools/values_table.py"
    described = {path for path, _, _ in values_table.values((CHART / "values.yaml").read_text())}
    schema = chart().schema

    def leaves(value, path=()):
        for key, inner in value.items():
            own = (*path, key)
            if ".".join(own) in described:
                continue
            if isinstance(inner, dict) and inner:
                leaves(inner, own)
            else:
                raise AssertionError(f"{'.'.join(own)} has no comment")

    leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    for path in described:
        node = schema
        for key in path.split("."):
            node = node["properties"][key]
