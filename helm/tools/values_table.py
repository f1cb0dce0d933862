"""Writes the table of values in the chart's README from the comments in values.yaml.

    python3 helm/tools/values_table.py

A value's comment begins with `# -- ` on the line above it and may go on over `# ` lines. Every value has one.
"""

import json
import pathlib
import re

CHART = pathlib.Path(__file__).resolve().parent.parent / "relay"
BEGIN, END = "<!-- values: made by helm/tools/values_table.py -->", "<!-- end of values -->"
KEY = re.compile(r"^( *)([A-Za-z0-9_]+):(?: +(.*))?$")


def values(text):
    """Yields (dotted path, default as written, comment) of each commented value, in order."""
    path, comment, described = [], None, []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = stripped[5:]
        elif stripped.startswith("#") and comment is not None:
            comment += " " + stripped[1:].strip()
        elif match := KEY.match(line):
            depth = len(match[1]) // 2
            path = path[:depth] + [match[2]]
            inside = len(path) > len(described) > 0 and path[: len(described)] == described
            if comment is not None:
                described = path
                default = match[3] if match[3] is not None else block(lines[number + 1 :], len(match[1]))
                yield ".".join(path), default, comment
                comment = None
            elif match[3] is not None and not inside:
                raise SystemExit(f"values.yaml:{number + 1}: {'.'.join(path)} has no comment")


def block(lines, indent):
    """A nested default on one line."""
    pairs, keys = {}, []
    for line in lines:
        match = KEY.match(line)
        if not match or len(match[1]) <= indent:
            break
        keys = keys[: (len(match[1]) - indent) // 2 - 1] + [match[2]]
        if match[3] is not None:
            pairs[".".join(keys)] = match[3].strip('"')
    return json.dumps(pairs).replace('"', "") if pairs else "{}"


def table():
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, default, comment in values((CHART / "values.yaml").read_text()):
        cells = (f"`{path}`", f"`{default}`", comment)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def readme(old):
    """The README with a current table."""
    before, rest = old.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = CHART / "README.md"
    path.write_text(readme(path.read_text()))
