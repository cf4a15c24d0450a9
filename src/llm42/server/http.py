"""HTTP/1.1 with limits on the head of a request, which uvicorn's parser does not have.

Invariant: a client that has not been asked for its key yet can hold neither much memory nor, for long, a connection.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_SIZE = 64 << 10
HEAD_TIMEOUT_S = 60.0


class BoundedHTTP(HttpToolsProtocol):
    """Closes connections whose head is larger than `MAX_HEAD_SIZE`, or takes longer than `HEAD_TIMEOUT_S`."""

    _head_size = 0
    _is_in_head = True
    """Whether the next byte belongs to a head, or to the silence before one."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its parent has it
        """A client has connected."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come; the parser calls `on_message_begin` and `on_headers_complete` for what is in them."""
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_size += len(data)
            if self._head_size > MAX_HEAD_SIZE:
                self.send_400_response(f"The head of the request has more than {MAX_HEAD_SIZE} bytes.")

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._is_in_head:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        self._end_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._is_in_head, self._head_size = True, 0
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._deadline is not None:
            self._deadline.cancel()
