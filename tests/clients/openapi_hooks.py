"""What schemathesis does beside its own checks (tests/openapi_fuzzing.rs).

RELAY_FUZZ_REAL holds, for the segment before a path parameter, values that exist: random ones only ever meet 404.
"""

import json
import os
import time
import zlib

import jsonschema_rs
import requests
import schemathesis

# How often a request that storage had no room for is sent again, each 0.25 s.
TRIES = 80
# How long a claim may wait for deliveries that do not come.
MOST_WAIT_MS = 2000
REAL = json.loads(os.environ["RELAY_FUZZ_REAL"])


@schemathesis.hook
def before_call(context, case, kwargs):
    """Puts a real value where two of three random ones are; which ones follows from the value."""
    segments = case.operation.path.split("/")
    for before, segment in zip(segments, segments[1:]):
        name = segment[1:-1]
        if segment.startswith("{") and before in REAL and name in (case.path_parameters or {}):
            choice = zlib.crc32(repr(case.path_parameters[name]).encode())
            if choice % 3:
                case.path_parameters[name] = REAL[before][choice % len(REAL[before])]
    wait = case.body.get("wait_ms") if isinstance(case.body, dict) else None
    if isinstance(wait, int) and MOST_WAIT_MS < wait <= 30_000:
        case.body["wait_ms"] = MOST_WAIT_MS


@schemathesis.hook
def after_call(context, case, response):
    """A 503 that says that storage had no room for the request is followed by the same request, as with any client."""
    for _ in range(TRIES):
        if response.status_code != 503 or b'"database_overloaded"' not in response.content:
            return
        time.sleep(0.25)
        with requests.Session() as session:
            session.trust_env = False
            answer = session.send(response.request, timeout=35)
        again = type(response).from_requests(answer, verify=response.verify)
        for field in ("status_code", "headers", "content", "content_size", "message", "encoding", "_deserialized"):
            setattr(response, field, getattr(again, field))


def closed(schema, root, within=False, seen=()):
    """The schema without references, and without fields that it does not name."""
    if not isinstance(schema, dict):
        return schema
    link = schema.get("$ref")
    if link:
        assert link not in seen, f"{link} leads to itself"
        target = root
        for part in link[2:].split("/"):
            target = target[part]
        return closed(target, root, within, (*seen, link))
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: closed(field, root, False, seen) for name, field in schema["properties"].items()}
    if "items" in schema:
        result["items"] = closed(schema["items"], root, False, seen)
    for kinds in ("oneOf", "anyOf"):
        if kinds in schema:
            result[kinds] = [closed(kind, root, False, seen) for kind in schema[kinds]]
    if "allOf" in schema:
        result["allOf"] = [closed(part, root, True, seen) for part in schema["allOf"]]
    if not within and ("properties" in schema or "allOf" in schema):
        result["unevaluatedProperties"] = False
    return result


@schemathesis.check
def undocumented_fields(context, response, case):
    """Every field of a success is in the document."""
    root = case.operation.schema.raw_schema
    answers = root["paths"][case.operation.path][case.operation.method.lower()]["responses"]
    answer = answers.get(str(response.status_code), {})
    content = answer.get("content", {}).get("application/json")
    as_described = case.method.upper() == case.operation.method.upper()
    if not as_described or response.status_code >= 300 or not content or not case.operation.path.startswith("/v1/"):
        return
    validator = jsonschema_rs.Draft202012Validator(closed(content["schema"], root))
    for error in validator.iter_errors(response.json()):
        raise AssertionError(f"{error.message} at {list(error.instance_path)}")
