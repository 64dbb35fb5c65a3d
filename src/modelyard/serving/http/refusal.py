"""What a server says no with: a status, what is wrong, what would be right."""

from __future__ import annotations


class RefusedError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: for the person who wrote the client.
        retry: seconds after which it may be tried again, where that helps.
        close: the connection can't be used any more, since a part of the request was not read.
    """

    def __init__(self, status: int, message: str, *, retry: int | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers: dict[str, str] = {}
        if retry is not None:
            self.headers["Retry-After"] = str(retry)
        if close:
            self.headers["Connection"] = "close"
