#!/usr/bin/env python3
"""Stands in for relay-gateway, relay-worker and relayctl, to test the harness without the engine."""
import http.server
import os
import signal
import sys
import urllib.parse
import socket

name = os.path.basename(sys.argv[0])
database = urllib.parse.urlparse(os.environ["DATABASE_URL"])

if name == "relayctl":
    sys.exit(0 if sys.argv[1:] == ["migrate"] else 2)


def database_answers():
    """Whether something speaks Postgres there: it answers an SSLRequest with S or N."""
    try:
        with socket.create_connection((database.hostname, database.port), 1) as probe:
            probe.sendall(b"\x00\x00\x00\x08\x04\xd2\x16\x2f")
            return probe.recv(1) in (b"S", b"N")
    except OSError:
        return False


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/ready":
            status, body = (200 if database_answers() else 503), "{}"
        elif self.path == "/env":
            status, body = 200, os.environ.get("FAKE_ANSWER", "")
        else:
            status, body = 200, "fake_metric{a=\"b\"} 2\nfake_metric 3\n"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        self.send_response(201)
        self.end_headers()
        self.wfile.write(b'{"ok":true,"data":{"api_key":"rk_live_fake"}}')

    def log_message(self, *_):
        print("asked for", self.path, flush=True)


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if os.environ.get("FAKE_DIES") == name:
    print("cannot find my socks", flush=True)
    sys.exit(3)
host, port = os.environ.get("RELAY_LISTEN", os.environ["RELAY_METRICS_LISTEN"]).rsplit(":", 1)
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
