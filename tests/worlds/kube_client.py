"""A client of a Kubernetes API, the stand-in or a real one, for tests that are not coroutines."""

import asyncio
from typing import Any

import orjson

from muster.kubernetes import api as kubernetes_api


class Client:
    """A client of the API that a kubeconfig names."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig

    def ask(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        **query: str,
    ) -> kubernetes_api.Answer:
        """Send a request; return the answer, even if it is an error."""

        async def asked() -> kubernetes_api.Answer:
            async with await kubernetes_api.find(kubeconfig=self.kubeconfig, context=None) as api:
                return await api.request(
                    verb, path, body=body, content=content, query=query, timeout_s=10
                )

        return asyncio.run(asked())

    def good(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        **query: str,
    ) -> Any:
        """Send a request that must succeed; return the object."""
        answer = self.ask(verb, path, body, content, **query)
        assert answer.is_ok, answer.problem
        return orjson.loads(answer.body)
