"""Renders the chart for `podman kube play` on one host and prints it.

    python3 helm/tools/kube_play.py IMAGE DATABASE_URL NATS_URL GATEWAY_PORT GATEWAY_METRICS_PORT WORKER_METRICS_PORT

The pods are the chart's: image, commands, settings, users, security, volumes. Taken out is what podman has no counterpart for: probes
(they would be commands inside the container, and the image has none), the pause before the end, ports (pods are on the host's network), and
references to Secrets, whose values are put in their place. Objects that are no pods are left out, but for the ConfigMap.
"""

import pathlib
import sys

import yaml
from helm_python.chart import Chart

CHART = pathlib.Path(__file__).resolve().parent.parent / "relay"
WITHOUT_COUNTERPART = ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "ports")


def rendered(image, database_url, nats_url):
    repository, tag = image.rsplit(":", 1)
    values = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "database": {"url": database_url},
        "nats": {"url": nats_url, "streamReplicas": 1},
        "gateway": {"replicas": 1},
        "worker": {"replicas": 1},
    }
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name="relay", namespace="default")
    for path, text in sorted(texts.items()):
        if not path.endswith("NOTES.txt"):
            yield from filter(None, yaml.safe_load_all(text))


def on_this_host(pod, secrets, listen):
    """The pod's spec with the host's network, its secrets in the open, and addresses of its own."""
    pod["hostNetwork"] = True
    for container in pod["containers"]:
        for key in WITHOUT_COUNTERPART:
            container.pop(key, None)
        sources = container.get("envFrom", [])
        environment = container.setdefault("env", [])
        for source in [source for source in sources if "secretRef" in source]:
            sources.remove(source)
            environment += [{"name": name, "value": value} for name, value in secrets[source["secretRef"]["name"]].items()]
        for variable in environment:
            if reference := variable.pop("valueFrom", {}).get("secretKeyRef"):
                variable["value"] = secrets[reference["name"]][reference["key"]]
            variable["value"] = listen.get((container["name"], variable["name"]), variable["value"])
    return pod


def main(image, database_url, nats_url, port, gateway_metrics, worker_metrics):
    listen = {
        ("gateway", "RELAY_LISTEN"): f"127.0.0.1:{port}",
        ("gateway", "RELAY_METRICS_LISTEN"): f"127.0.0.1:{gateway_metrics}",
        ("worker", "RELAY_METRICS_LISTEN"): f"127.0.0.1:{worker_metrics}",
    }
    made = list(rendered(image, database_url, nats_url))
    secrets = {thing["metadata"]["name"]: thing["stringData"] for thing in made if thing["kind"] == "Secret"}
    configs, pods = [], []
    for thing in made:
        name = thing["metadata"]["name"]
        if thing["kind"] == "ConfigMap":
            configs.append(thing)
        elif thing["kind"] == "Deployment":
            on_this_host(thing["spec"]["template"]["spec"], secrets, listen)
            pods.append(thing)
        elif thing["kind"] == "Job":
            # Podman knows no Jobs. Hooks come first.
            spec = on_this_host(thing["spec"]["template"]["spec"], secrets, listen)
            pods.insert(0, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    yaml.safe_dump_all(configs + pods, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
