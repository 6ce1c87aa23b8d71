from asyncio import Future
from socket import socket
from types import TracebackType
from typing import Any, Self

from typing_extensions import Buffer

from ._native import Returned, _File

class Sender:
    position: int
    def __init__(
        self,
        sock: socket,
        *,
        method: str | None = None,
        loans_max: int = 64,
        loan_bytes_max: int = 16777216,
    ) -> None: ...
    async def send_all(self, data: Buffer) -> None: ...
    async def send_file(
        self,
        file: _File,
        offset: int = 0,
        count: int | None = None,
        *,
        head: Buffer = b"",
        tail: Buffer = b"",
        position: int = 0,
    ) -> int: ...
    async def lend(self, buffer: Buffer, *, allow_mutable: bool = False) -> Future[Returned]: ...
    async def drain(self) -> None: ...
    def report(self) -> dict[str, Any]: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

async def forward(
    a: socket,
    b: socket,
    *,
    idle_timeout: float | None = None,
    half_closed_timeout: float | None = None,
    method: str = "adaptive",
) -> dict[str, Any]: ...
