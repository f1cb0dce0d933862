"""The public members of the published Python client, read from its class, and those that a script has used."""

from agent_relay.client import AgentRelayClient

_used = set()


class _Watched:
    """The same object or class. Members that are used from outside are noted; its own calls of them are not."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        _used.add(name)
        return getattr(self._target, name)

    def __call__(self, *args, **kwargs):
        return watch(self._target(*args, **kwargs))


def watch(target):
    return _Watched(target)


def surface():
    """The number of public methods and properties, and those that were not used."""
    names = {name for name in dir(AgentRelayClient) if not name.startswith("_")}
    return len(names), sorted(names - _used)
