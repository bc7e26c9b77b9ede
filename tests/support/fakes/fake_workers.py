"""What workers that follow a script have in common: real gRPC servers with names and answers of their own."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.base.hashing import mm_hash
from triptych.base.machine.worker_load import WorkerLoad
from triptych.base.rpc.channels import STORE_SERVICE, listen, make_server
from triptych.base.rpc.internal_token import InternalToken
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.types import TASKS, Task, WorkerInfo
from triptych.base.worker_process import HealthServicer
from triptych.registry.matching import ROLE, ROLES, WHOLE_REQUESTS

TOKEN = "internal-token-of-the-fakes"
MODEL = "demo"
MODEL_KEY = "a" * 64
NAMESPACE = "b" * 64
ROWS, WIDTH = 4, 8
#: The token of 0 seconds, and the text of tokens that are no characters.
FIRST_TIME, END_TOKEN = 5000, 2
TOKEN_NAMES = {4000: "<|de|>"}


def picture(name: str, size: int = 64) -> bytes:
    """Bytes that stand for an image file."""
    return (name.encode() + b"\x00" * size)[: max(size, len(name))]


def data_url(media: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(media).decode()


def user(text: str, *pictures: bytes) -> list[dict[str, Any]]:
    """The messages of a question about pictures."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(media)}} for media in pictures
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def key_of(media: bytes, salt: str = "") -> str:
    return mm_hash(media, namespace=NAMESPACE, modality="image", salt=salt)


def token_text(index: int) -> str:
    return f"t{index} "


def whole_text(count: int) -> str:
    return "".join(token_text(index) for index in range(count))


def choice_text(choice: int, index: int) -> str:
    """Token texts of the choices differ, so that a mix-up shows."""
    return token_text(index) if choice == 0 else f"c{choice}-{token_text(index)}"


class StallingHealth(HealthServicer):
    """Health checks that get no answer while `answers` is cleared, as those of a stopped process."""

    def __init__(self, loads: Mapping[str, Callable[[], WorkerLoad]] | None = None) -> None:
        super().__init__(loads or {})
        self.answers = asyncio.Event()
        self.answers.set()
        #: Checks that wait for their answer, and those that have had it.
        self.asked = 0
        self.checked = 0

    async def Check(self, request: Any, context: Any) -> Any:
        counted = request.service != STORE_SERVICE
        self.asked += counted
        await self.answers.wait()
        self.asked -= counted
        self.checked += counted
        return await super().Check(request, context)


class FakeWorker:
    """A gRPC server on a port of its own that can be killed and started again there."""

    pool = ""
    modality = "image"
    #: Whether the model's items are attended to from beside the prompt.
    encoder_decoder = False
    #: What its model is for, one of TASKS.
    task: Task = "generate"
    #: Most tokens of a PD worker, announced and kept to; 0: it names none.
    max_model_len = 0
    #: Columns of an embedding's row, announced by either pool; 0: it names none.
    row_width = 0
    #: Whether a PD worker keeps what items gave; None: it is an older one that does not say.
    keeps_items: bool | None = None
    #: Whether a PD worker loads a request's items once all of them are stored.
    whole_requests = False
    #: Of a PD worker; "": it is an older one that does not say.
    role = ""

    def __init__(self) -> None:
        self.port = 0
        self.incarnation = 0
        self.model_key = MODEL_KEY
        self.namespace = NAMESPACE
        #: Keys of its LoRA adapters, by name.
        self.adapters: dict[str, str] = {}
        self.server: Any = None
        self.health = StallingHealth()
        #: The internal token that it asks for and signs its registration with.
        self.token = TOKEN
        #: What reports its load; None: it is of a release without reports.
        self.load: Callable[[], WorkerLoad] | None = None
        #: None: it speaks no TLS.
        self.certificates: Certificates | None = None
        #: Called when it has been started, as a worker registers whenever it is.
        self.register: Callable[[WorkerInfo], Awaitable[None]] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def info(self) -> WorkerInfo:
        namespaces = (self.namespace,) if self.pool == "encoder" else ()
        capacity = {"plan_credit": 4, "tower_credit": 2} if self.pool == "encoder" else {"max_num_seqs": 64}
        if self.pool == "pd":
            capacity |= {"encoder_decoder": 1} if self.encoder_decoder else {"pools": 1}
            capacity["task"] = TASKS.index(self.task)
        if self.pool == "pd" and self.max_model_len:
            capacity["max_model_len"] = self.max_model_len
        if self.keeps_items is not None:
            capacity["keeps_items"] = int(self.keeps_items)
        if self.whole_requests:
            capacity[WHOLE_REQUESTS] = 1
        if self.role:
            capacity[ROLE] = ROLES.index(self.role)
        if self.row_width:
            capacity["row_width"] = self.row_width
        incarnation = f"i{self.incarnation}"
        info = WorkerInfo(
            self.address, self.pool, incarnation, self.model_key, MODEL, namespaces, capacity, self.modality
        )
        info = replace(info, adapters=self.adapters)
        return InternalToken(self.token).signed(info) if self.token else info

    async def start(self) -> None:
        self.incarnation += 1
        self.server = make_server(self.token)
        self.health = StallingHealth({f"i{self.incarnation}": self.load} if self.load else None)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        for service in ("", f"i{self.incarnation}"):
            await self.health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self.add_to(self.server)
        self.port = listen(self.server, f"127.0.0.1:{self.port}", self.certificates, mutual=True)
        await self.server.start()
        if self.register is not None:
            await self.register(self.info)

    def add_to(self, server: Any) -> None:
        raise NotImplementedError

    async def reaches_store(self, reaches: bool) -> None:
        """From the next check on the worker says so."""
        status = health_pb2.HealthCheckResponse
        await self.health.set(STORE_SERVICE, status.SERVING if reaches else status.NOT_SERVING)

    async def kill(self) -> None:
        """Connections end at once."""
        if self.server is not None:
            await self.server.stop(None)
            self.server = None
