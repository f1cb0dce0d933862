"""Errors of a runner."""


class RunnerError(Exception):
    """Refusal of a request, or its loss with the connection."""

    def __init__(self, code: str, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable


def disconnected() -> RunnerError:
    return RunnerError("disconnected", "the connection to the broker was lost", True)
