"""Where things are, and the chart rendered once for each set of values."""

import functools
import pathlib
import re

import helm_python
import yaml
from helm_python.chart import Chart

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "relay"
TESTS = ROOT / "helm" / "tests"
EXAMPLES = ROOT / "deploy" / "examples"

#: Each set of values that the chart is held against, by name.
VALUE_SETS = {
    path.stem: path for path in sorted([*(TESTS / "values").glob("*.yaml"), EXAMPLES / "production.yaml", EXAMPLES / "trial.yaml"])
}


def values_of(name):
    return yaml.safe_load(VALUE_SETS[name].read_text())


def chart():
    """The chart, loaded again each time: rendering it without a subchart removes the subchart from the loaded chart."""
    return Chart.load(CHART)


def render(values, **options):
    """Path of the template to its text, for templates with output."""
    options = {"name": "relay", "namespace": "messaging", **options}
    made = chart().render(values, **options)
    return {path: text for path, text in sorted(made.items()) if text.strip()}


@functools.cache
def rendered(name):
    return render(values_of(name))


def objects(texts):
    """All Kubernetes objects among rendered texts."""
    found = []
    for path, text in texts.items():
        if not path.endswith("NOTES.txt"):
            found += [document for document in yaml.safe_load_all(text) if document]
    return found


def refusal(values):
    """What Helm says when it refuses `values`."""
    try:
        render(values)
    except helm_python.HelmError as error:
        return re.sub(r"\s+", " ", str(error))
    raise AssertionError("it was rendered")
