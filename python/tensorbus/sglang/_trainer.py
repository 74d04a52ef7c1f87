"""The trainer's side: the sender of tensorbus.engine, and SGLang's requests around it."""

from __future__ import annotations

import base64
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from .. import engine as tb_engine
from .._errors import Error, Refused
from ._call import Hearing, Request, encode

LOADER = "tensorbus.sglang.load"
Ask = Callable[[str, "dict[str, Any] | None"], "dict[str, Any]"]  # a route, and the body of a POST or None for a GET


class Trainer:
    """Sends versions to one engine. Every rank of the trainer makes one, and calls ``send_weights``.

    ``source`` is a module, a checkpoint's folder or a ``tensorbus.engine.Source``. ``engine`` is the address of
    SGLang's server, which rank 0 asks; or a function of a route and its body that returns the answer. ``shadow`` says
    where a version lies until all workers have it: "pinned" or "device" memory, or "off".
    """

    def __init__(
        self,
        url: str,
        rank: int,
        size: int,
        source: Any,
        engine: str | Ask,
        *,
        shadow: str = "pinned",
        group: str = "trainer",
        name: str = "engine",
        token: str | None = None,
        api_key: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        ask = _over_http(engine, api_key, 4 * timeout) if isinstance(engine, str) else engine
        made = tb_engine.as_source(source)
        self._sender = tb_engine.Sender(
            url, rank, size, made, _Requests(ask, shadow), group=group, engine=name, token=token, timeout=timeout
        )

    @property
    def version(self) -> int:
        """The last version that the engine has taken."""
        return self._sender.version

    def send_weights(self, weight_version: str | None = None) -> None:
        """Sends a version; on return all workers have it, and the engine's cache is flushed. All ranks call it.

        ``weight_version`` is what SGLang is to report with what it generates from now on.
        """
        self._sender.send(weight_version)

    def close(self) -> None:
        """Leaves the engine."""
        self._sender.close()


class _Requests:
    """What a ``Sender`` asks an engine, as requests to SGLang."""

    def __init__(self, ask: Ask, shadow: str) -> None:
        self._ask, self._shadow = ask, shadow
        self._info: dict[str, Any] = {}

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._info = info
        self._load(0)

    def start_weight_update(self) -> None:
        """The session begins with the update."""

    def update_weights(self, info: dict[str, int]) -> None:
        self._load(info["version"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if weight_version is not None:
            self._post("update_weight_version", new_version=weight_version, abort_all_requests=False)

    def _load(self, version: int) -> None:
        """Runs ``load`` in every worker, in a session of its own."""
        size = int(self._ask("server_info", None)["tp_size"])
        request = Request(version=version, id=secrets.token_hex(4), shadow=self._shadow, **self._info)
        payload = base64.b64encode(encode(request)).decode()
        self._begin()
        hearing = Hearing(request)
        try:
            self._post(
                "update_weights_from_tensor",
                serialized_named_tensors=[payload] * size,
                load_format=LOADER,
                flush_cache=version > 0,
                selector="target",
            )
            told = hearing.result()
        except BaseException:
            hearing.give_up()
            raise
        finally:
            self._post("end_weight_update")
        if told:
            raise Refused(f"the engine has not taken version {version}: {told}" if version else told)

    def _begin(self) -> None:
        try:
            self._post("begin_weight_update", selector="target")
        except Error as error:
            if "already open" not in str(error):
                raise
            self._post("end_weight_update")  # a trainer that died has left it open
            self._post("begin_weight_update", selector="target")

    def _post(self, route: str, **body: Any) -> None:
        answer = self._ask(route, body)
        if not answer.get("success", True):
            raise Refused(f"SGLang's /{route}: {answer.get('message')}")


def _over_http(url: str, api_key: str | None, timeout: float) -> Ask:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"

    def ask(route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url.rstrip('/')}/{route}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            try:
                return {"success": False, "message": json.loads(text)["message"]}
            except (ValueError, KeyError, TypeError):
                raise Refused(f"SGLang's /{route} answers {error.code}: {text[:500]}") from error
        except OSError as error:
            raise Refused(f"SGLang's /{route} at {url}: {error}") from error

    return ask
