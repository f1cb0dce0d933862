"""The files of deploy/: the compose file, and that both ways to the image end in the same one."""

import re
import subprocess
import sys

import yaml

from conftest import EXAMPLES, ROOT, refusal, render

DEPLOY = ROOT / "deploy"


def test_the_compose_file_is_one():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_compose_sets_only_variables_that_the_engine_reads():
    documented = "".join((ROOT / "docs" / page).read_text() for page in ("configuration.md", "telemetry.md"))
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    variables = {name for service in ("gateway", "worker", "migrate") for name in services[service]["environment"]}
    assert "DATABASE_URL" in variables
    for variable in variables:
        assert f"`{variable}`" in documented, variable


def test_compose_can_be_hosted_and_is_not_open_to_all():
    gateway = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gateway"]
    assert {"RELAY_HOSTED", "RELAY_BOOTSTRAP_SECRET", "RELAY_PLANS", "RELAY_FILES_S3_BUCKET"} <= set(gateway["environment"])
    assert gateway["ports"] == ["${RELAY_BIND:-127.0.0.1}:8787:8787"]


def test_a_container_has_time_to_drain():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("gateway", "worker"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > 30


def test_both_ways_to_the_image_end_alike():
    """From `USER` on, the file that builds from source says what the one for ready binaries says."""

    def settings(name):
        text = (DEPLOY / name).read_text().split("FROM scratch")[1]
        return [line for line in text.splitlines() if line and not line.startswith(("#", "COPY"))]

    assert settings("Dockerfile") == settings("Containerfile")
    assert "USER 65532:65532" in settings("Containerfile")


def test_the_folder_of_files_is_the_users():
    """Copying makes everything root's; a volume takes over the owner of the folder that it is mounted on."""
    for name in ("Dockerfile", "Containerfile"):
        last_stage = (DEPLOY / name).read_text().split("FROM scratch")[1]
        copies = [line for line in last_stage.splitlines() if line.startswith("COPY")]
        assert "--chown=65532:65532" in copies[-1] and copies[-1].endswith(" /var/lib/relay"), name


def test_the_user_is_the_same_everywhere():
    chart = (ROOT / "helm/relay/templates/_helpers.tpl").read_text()
    assert set(re.findall(r"runAsUser: (\d+)", chart)) == {"65532"}
    assert "65532:65532" in (DEPLOY / "rootfs.sh").read_text()


def test_examples_are_values_of_the_chart():
    for path in EXAMPLES.glob("*.yaml"):
        assert render(yaml.safe_load(path.read_text()))
    assert "give exactly one" in refusal({})


def test_nats_has_one_user_for_each_role_in_compose_and_in_the_trial_chart():
    roles = (DEPLOY / "nats/roles.conf").read_text()
    assert roles == (ROOT / "helm/relay/charts/trial-nats/files/roles.conf").read_text()
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(re.findall(r"password: \$(\w+)", roles)) == set(services["nats"]["environment"])
    for role in ("gateway", "worker"):
        assert f"user: relay-{role}\n" in roles
        assert services[role]["environment"]["NATS_URL"].startswith(f"nats://relay-{role}:")
