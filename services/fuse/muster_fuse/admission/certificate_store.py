"""Adapter for the Kubernetes API: stores the certificate and makes API servers trust it.

Every replica runs this code. The Secret's resource version makes them agree: the first to write
wins, and the others read the Secret again. The Secret and the MutatingWebhookConfiguration already
exist, without data, so that the webhook needs no permission to create them.
"""

import asyncio
import base64
import random
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
import prometheus_client

from muster import blocking
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import objects
from muster.service import logs, metrics
from muster_fuse.admission import certificates, config, renewal

_JSON_PATCH: Final = "application/json-patch+json"
_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_NAMES: Final = ("ca.crt", "tls.crt", "tls.key", "next.crt", "next.key")
"""The keys of the Secret: all trusted authorities, the current certificate, and the next one."""
_ATTEMPTS: Final = 5
"""The maximum number of consecutive write conflicts with other replicas."""
_NONE_YET: Final = "no certificate yet"
_RETRY_S: Final = 5.0
_JITTER: Final = (0.8, 1.0)

EXPIRES: Final = prometheus_client.Gauge(
    "muster_fuse_webhook_certificate_expires_timestamp_seconds",
    "When the certificate in use expires.",
)
STEPS: Final = metrics.counter(
    "muster_fuse_webhook_certificate_steps_total",
    "Changes to the certificate, by step.",
    "step",
    (step for step in renewal.Step if step is not renewal.Step.KEEP),
)


class _Secret(objects.HasMetadata, frozen=True):
    data: dict[str, str] | None = None

    def held(self) -> dict[str, bytes]:
        """Return the Secret's data, decoded; a value that is not base64 becomes empty."""
        held: dict[str, bytes] = {}
        for name, text in (self.data or {}).items():
            try:
                held[name] = base64.b64decode(text, validate=True)
            except ValueError:
                held[name] = b""
        return held


class _ClientConfig(objects.Object, frozen=True):
    ca_bundle: str = ""


class _Webhook(objects.Object, frozen=True):
    client_config: _ClientConfig = _ClientConfig()


class _Configuration(objects.HasMetadata, frozen=True):
    webhooks: tuple[_Webhook, ...] | None = None


_Read = TypeVar("_Read", _Secret, _Configuration)


class _Unavailable(Exception):
    """A request to the API failed; the text is the reason."""


class CertificateStore:
    """Maintains a certificate that the API servers trust; `tls` uses it for new connections."""

    def __init__(
        self,
        api: kubernetes_api.Api,
        settings: config.Settings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tls = _context()
        # while a context's certificate is replaced, it briefly does not match the key
        self.tls.sni_callback = self._choose
        self._certified: ssl.SSLContext | None = None
        self._api = api
        self._clock = clock
        self._settings = settings.certificates
        self._timeout_s = settings.kubernetes.timeout_s
        name, namespace = settings.kubernetes.name, settings.kubernetes.namespace
        self._names = (f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local")
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self._configuration = f"{_CONFIGURATIONS}/{name}"
        self._loaded: tuple[bytes, renewal.Validity] | None = None
        self._is_trusted = False
        self._problem = _NONE_YET
        self._threads = blocking.Serial()

    def problem(self) -> str | None:
        """Return why the API servers cannot call this replica; None if they can."""
        if self._loaded is None or not self._is_trusted:
            return self._problem
        if not self._loaded[1].includes(self._clock()):
            reason = f": {self._problem}" if self._problem else ""
            return f"the certificate is not valid now{reason}"
        return None

    async def run(self) -> None:
        """Keep the certificate valid and trusted until cancelled."""
        while True:
            await self.refresh()
            check_s = self._settings.check_s
            pause_s = min(_RETRY_S, check_s) if self._problem else check_s
            await asyncio.sleep(pause_s * random.uniform(*_JITTER))  # noqa: S311  # jitter, not a secret

    async def refresh(self) -> None:
        """Update the Secret, the certificate in use and the webhook configuration, where needed."""
        try:
            held = await self._held()
            await self._load(held)
            await self._trust(held["ca.crt"])
        except (_Unavailable, OSError, TimeoutError) as error:
            text = str(error) or "the certificate could not be loaded in time"
            if not self._problem or (not self._is_trusted and self._problem != text):
                logs.logger().warning("certificate_update_failed", error=text)
            self._problem = text
        else:
            if self._problem == _NONE_YET:
                logs.logger().info("certificate_trusted")
            elif self._problem:
                logs.logger().info("certificate_update_recovered")
            self._problem = ""

    async def _held(self) -> dict[str, bytes]:
        """Change the certificates in the Secret if a step is due; return the Secret's data."""
        for _ in range(_ATTEMPTS):
            answer = await self._api.request("GET", self._secret, timeout_s=self._timeout_s)
            secret = _decoded(answer, _Secret)
            held = secret.held()
            step = self._step(held)
            if step is renewal.Step.KEEP:
                return held
            made = self._made(held, step)
            body = {
                "metadata": {"resourceVersion": secret.metadata.resource_version},
                "data": {
                    name: base64.b64encode(made[name]).decode() if name in made else None
                    for name in _NAMES
                },
            }
            answer = await self._api.request(
                "PATCH",
                self._secret,
                body=body,
                content=kubernetes_api.MERGE,
                timeout_s=self._timeout_s,
            )
            if answer.is_ok:
                STEPS.labels(step.value).inc()
                logs.logger().info("certificate_changed", step=step.value)
                return made
            if answer.status != HTTPStatus.CONFLICT:
                raise _Unavailable(answer.problem)
        raise _Unavailable(
            f"{self._secret}: other replicas wrote first, {_ATTEMPTS} times in a row"
        )

    def _step(self, held: Mapping[str, bytes]) -> renewal.Step:
        return renewal.decide(
            self._validity(held, "tls"),
            self._validity(held, "next"),
            at=self._clock(),
            settle_s=self._settings.settle_s,
        )

    def _validity(self, held: Mapping[str, bytes], pair: str) -> renewal.Validity | None:
        certificate, key = held.get(f"{pair}.crt", b""), held.get(f"{pair}.key", b"")
        return certificates.validity(certificate, key, self._names)

    def _made(self, held: Mapping[str, bytes], step: renewal.Step) -> dict[str, bytes]:
        """Return the Secret's new data for a step."""
        at, authorities = self._clock(), [held.get("ca.crt", b"")]
        pairs = {name: held.get(name, b"") for name in ("tls.crt", "tls.key")}
        if step is renewal.Step.PROMOTE:
            pairs = {"tls.crt": held["next.crt"], "tls.key": held["next.key"]}
        else:
            made = certificates.issue(self._names, at=at, lifetime_s=self._settings.lifetime_s)
            pair = "tls" if step is renewal.Step.ISSUE else "next"
            pairs |= {f"{pair}.crt": made.certificate, f"{pair}.key": made.key}
            authorities.append(made.authority)
        return {"ca.crt": certificates.trusted(authorities, at=at)} | pairs

    async def _load(self, held: Mapping[str, bytes]) -> None:
        """Use the certificate for new connections; existing ones are not affected."""
        pem = held["tls.crt"] + held["tls.key"]
        validity = self._validity(held, "tls")
        assert validity is not None, "the Secret has a valid certificate when no step is due"
        if self._loaded is None or self._loaded[0] != pem:
            self._certified = await self._threads.run(
                lambda: _certified(pem), timeout_s=self._timeout_s
            )
            self._loaded = pem, validity
            EXPIRES.set(validity.ends_at)

    def _choose(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> int | None:
        """Select the current certificate for a connection; return a TLS alert if there is none."""
        if self._certified is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._certified
        return None

    async def _trust(self, authorities: bytes) -> None:
        """Write the authorities into the webhook configuration, unless they are already there."""
        bundle = base64.b64encode(authorities).decode()
        answer = await self._api.request("GET", self._configuration, timeout_s=self._timeout_s)
        there = _decoded(answer, _Configuration)
        stale = [
            index
            for index, webhook in enumerate(there.webhooks or ())
            if webhook.client_config.ca_bundle != bundle
        ]
        if stale:
            version = there.metadata.resource_version
            patch: list[dict[str, object]] = [
                {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            ]
            patch += [
                {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
                for index in stale
            ]
            answer = await self._api.request(
                "PATCH",
                self._configuration,
                body=patch,
                content=_JSON_PATCH,
                timeout_s=self._timeout_s,
            )
            if not answer.is_ok:
                raise _Unavailable(answer.problem)
        self._is_trusted = True


def _decoded(answer: kubernetes_api.Answer, shape: type[_Read]) -> _Read:
    if not answer.is_ok:
        raise _Unavailable(answer.problem)
    try:
        return msgspec.json.decode(answer.body, type=shape)
    except kubernetes_api.UNREADABLE as error:
        raise _Unavailable(f"{answer.what}: unreadable: {error}") from None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _certified(pem: bytes) -> ssl.SSLContext:
    """Return a TLS context with a certificate and its key."""
    context = _context()
    # Python's ssl module reads certificates only from files; other users cannot read this one
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
