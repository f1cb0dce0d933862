"""Runs a command in a terminal: waits for texts in its output and types keys.

Arguments: the steps as a JSON array of ["wait", text], ["raw", ""] (the command reads single keys) and ["type", keys],
then the command. Prints the output, and ends with the status of the command; an end by Ctrl-C counts as a clean one.
"""

import json
import os
import pty
import select
import signal
import sys
import termios
import time

PATIENCE = 60


def main():
    steps, command = json.loads(sys.argv[1]), sys.argv[2:]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    output, seen = b"", 0

    def read(seconds):
        nonlocal output
        ready, _, _ = select.select([terminal], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(terminal, 65536)
        except OSError:
            return False
        output += data
        return bool(data)

    for kind, text in steps:
        wanted = text.encode()
        if kind == "type":
            os.write(terminal, wanted)
            continue
        deadline = time.monotonic() + PATIENCE
        while termios.tcgetattr(terminal)[3] & termios.ICANON if kind == "raw" else wanted not in output[seen:]:
            if time.monotonic() > deadline or not read(0.2):
                sys.exit(f"waited for {kind} {text!r} in {output!r}")
        seen = output.index(wanted, seen) + len(wanted)
    deadline = time.monotonic() + PATIENCE
    while read(0.2):
        if time.monotonic() > deadline:
            sys.exit(f"the command goes on: {output!r}")
    _, status = os.waitpid(pid, 0)
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    code = os.waitstatus_to_exitcode(status)
    sys.exit(0 if code == -signal.SIGINT else code)


main()
