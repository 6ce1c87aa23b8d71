from socket import socket
from typing import IO

from ._native import FileEndedError as FileEndedError
from ._native import LoanLimitError as LoanLimitError
from ._native import Receiver as Receiver
from ._native import Returned as Returned
from ._native import Sender as Sender
from ._native import StreamTornError as StreamTornError
from ._native import forward as forward

def sendfile(sock: socket, file: IO[bytes], offset: int = 0, count: int | None = None) -> int: ...
