"""Pure: passwords or keys of an installation in a cluster: which objects are missing, what to do.

With passwords, each user of NATS has a Secret. With keys, the Secret `NAME-keys` has all of them;
from it come accounts.conf for NATS, the gate's files and the services' credentials. An authority,
the Secret `NAME-nats-authority`, signs NATS' certificate.

Nothing that is there is ever replaced, with one exception: what lists rights is signed again after
an upgrade, with the same keys. What was made by hand (`muster auth init`) stays as it is.
"""

import base64
import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from muster.nats.auth import accounts, nkeys, permissions

VERSION: Final = "muster.dev/permissions"
"""The annotation of what lists rights; its value is `rights()`. What was made by hand has none."""
ROUNDS_MAX: Final = 6
"""How many plans may be needed until all is there: each makes what earlier ones provided for."""
_PASSWORD: Final = re.compile(r"(?!\d+$)[A-Za-z0-9_.~-]+")
_PEM: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s([A-Za-z0-9+/=\s]+)-----END \1-----")
_READER_NAME: Final = "cluster"


class Refused(Exception):
    """What is there cannot be used as it is, and is not replaced; the text says what to do."""


class Kind(enum.StrEnum):
    """Where something is kept."""

    SECRET = "Secret"  # noqa: S105
    CONFIG_MAP = "ConfigMap"


class Origin(enum.Enum):
    """What the content of an object is made from."""

    PASSWORD = enum.auto()
    SEEDS = enum.auto()
    AUTHORITY = enum.auto()
    KEYS = enum.auto()
    """From the seeds."""
    CERTIFICATE = enum.auto()
    """From the authority."""
    TRUST = enum.auto()
    """From the certificate."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """An object, and the file that each of its keys has."""

    kind: Kind
    name: str
    files: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Stored:
    """What a cluster has of a part; `version` is what its annotation says."""

    data: Mapping[str, str]
    version: str | None = None


class Step(NamedTuple):
    """A part to create; or to sign again, if it is there."""

    part: Part
    origin: Origin


Existing = Mapping[Part, Stored]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The names of what an installation has."""

    name: str

    @property
    def passwords(self) -> tuple[Part, ...]:
        """The passwords of NATS' users."""
        users = [*(grant.user for grant in permissions.central()), permissions.gate().user]
        return tuple(_secret(f"{self.name}-nats-{user}", "password") for user in users)

    @property
    def seeds(self) -> Part:
        """All keys; no pod refers to them."""
        return _secret(f"{self.name}-keys", *(f"{name}.seed" for name in accounts.KINDS))

    @property
    def accounts_conf(self) -> Part:
        """The rights of all roles; what NATS includes."""
        return Part(Kind.CONFIG_MAP, f"{self.name}-accounts", (("accounts.conf", "accounts.conf"),))

    @property
    def gate(self) -> Part:
        """The gate's own credentials and the keys that it signs with."""
        return _secret(f"{self.name}-gate", "gate.json", "gate.creds")

    @property
    def signed(self) -> tuple[Part, ...]:
        """What lists rights; accounts.conf first, because NATS has to know them before others."""
        return (self.accounts_conf, self.gate)

    @property
    def needed(self) -> tuple[Part, ...]:
        """What pods cannot start without."""
        services = [role for role in accounts.CENTRAL if role is not accounts.Role.ADMIN]
        return (*self.signed, *map(self.credentials, services))

    @property
    def for_people(self) -> tuple[Part, ...]:
        """The credentials of people and their tools; no pod refers to them."""
        return tuple(map(self.credentials, (accounts.Role.READER, accounts.Role.ADMIN)))

    def credentials(self, role: accounts.Role) -> Part:
        """Return the credentials of a role."""
        name = f"{self.name}-{role}-creds"
        return Part(Kind.SECRET, name, (("nats.creds", f"{role}.creds"),))

    @property
    def authority(self) -> Part:
        """The authority that signs NATS' certificate; no pod refers to it."""
        return _secret(f"{self.name}-nats-authority", "ca.crt", "ca.key")

    @property
    def certificate(self) -> Part:
        """NATS' certificate, only for NATS."""
        return _secret(f"{self.name}-nats-tls", "tls.crt", "tls.key", "ca.crt")

    @property
    def trust(self) -> Part:
        """The authority's certificate, which all clients verify NATS by."""
        return Part(Kind.CONFIG_MAP, f"{self.name}-nats-ca", (("ca.crt", "ca.crt"),))

    def parts(self, *, production: bool) -> tuple[Part, ...]:
        """Return everything that there may be, in the order in which it is to be created."""
        if not production:
            return self.passwords
        keys = (self.seeds, self.authority, *self.needed, *self.for_people)
        return (*keys, self.certificate, self.trust)


def plan(name: str, existing: Existing, *, production: bool) -> tuple[Step, ...]:
    """Return what can be done next; nothing if all is there. Raises Refused.

    After these steps, or after another process was faster, there may be more to do: then plan
    again, at most `ROUNDS_MAX` times.
    """
    wanted = Wanted(name)
    problems = [
        f"{part}: {problem}"
        for part in wanted.parts(production=production)
        if part in existing and (problem := _problem(part, existing[part]))
    ]
    if problems:
        raise Refused(
            f"{'; '.join(problems)}; correct it, or delete the whole object: then it is made again"
        )
    if not production:
        return _create(wanted.passwords, existing, Origin.PASSWORD)
    return (*_plan_keys(wanted, existing), *_plan_certificate(wanted, existing))


def rights() -> str:
    """Return a digest of the rights that this version of muster gives to the roles."""
    key = nkeys.Key(nkeys.Kind.ACCOUNT, bytes(nkeys.SECRET_BYTES))
    operator = nkeys.Key(nkeys.Kind.OPERATOR, bytes(nkeys.SECRET_BYTES))
    ring = {name: [operator if name == "operator" else key] for name in accounts.KINDS}
    made = accounts.derive(ring, random=bytes, at=0)
    text = made["accounts.conf"] + made["gate.creds"]
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ring(seeds: Stored) -> accounts.Keyring:
    """Return the keys that the Secret with all seeds has. Raises ValueError."""
    return {name: accounts.read_seeds(name, seeds.data[f"{name}.seed"]) for name in accounts.KINDS}


def derive(seeds: Stored, *, random: accounts.Random, at: float) -> dict[str, str]:
    """Return what is made from the keys, by file name."""
    keys = ring(seeds)
    user = permissions.reader(_READER_NAME).user
    role = accounts.Role.READER
    reader = accounts.credentials(keys, role, name=user, random=random, at=at)
    return accounts.derive(keys, random=random, at=at) | {f"{role}.creds": reader}


def hosts(name: str, namespace: str) -> tuple[str, ...]:
    """Return the names and addresses that NATS' certificate is for."""
    service = f"{name}-nats"
    return (
        *(service, f"*.{service}", f"{service}.{namespace}"),
        *(f"*.{service}.{namespace}.svc.cluster.local", "localhost", "127.0.0.1", "::1"),
    )


def damage(key: str, text: str) -> str:
    """Return why the value of a key cannot be used; empty if it can be."""
    try:
        match key.rpartition(".")[2]:
            case "password" if not _PASSWORD.fullmatch(text):
                return (
                    "a number, or has a character that cannot be part of an address, such as a "
                    "line feed"
                )
            case "seed":
                accounts.read_seeds(key.removesuffix(".seed"), text)
            case "creds":
                nkeys.read_creds(text)
            case "json":
                _check_signing(text)
            case "crt" | "key":
                _check_pem(text)
            case _ if "\ufffd" in text:
                return "not text"
            case _:
                pass
    except ValueError as error:
        return str(error)
    return ""


def _secret(name: str, *keys: str) -> Part:
    return Part(Kind.SECRET, name, tuple((key, key) for key in keys))


def _create(parts: Sequence[Part], existing: Existing, origin: Origin) -> tuple[Step, ...]:
    return tuple(Step(part, origin) for part in parts if part not in existing)


def _plan_keys(wanted: Wanted, existing: Existing) -> tuple[Step, ...]:
    parts = (*wanted.needed, *wanted.for_people)
    if wanted.seeds in existing:
        current = {None, rights()}
        held = [part for part in wanted.signed if part in existing]
        old = [part for part in held if existing[part].version not in current]
        return (
            *(Step(part, Origin.KEYS) for part in old),
            *_create(parts, existing, Origin.KEYS),
        )
    missing = [part for part in wanted.needed if part not in existing]
    if not missing:
        return ()
    there = [str(part) for part in parts if part in existing]
    if there:
        raise Refused(
            f"there are no keys to make {', '.join(map(str, missing))} from, but there is "
            f"{', '.join(there)}: run the commands that `muster auth accounts` prints, or delete "
            "what is there"
        )
    return (Step(wanted.seeds, Origin.SEEDS),)


def _plan_certificate(wanted: Wanted, existing: Existing) -> tuple[Step, ...]:
    authority = existing.get(wanted.authority)
    match existing.get(wanted.certificate), existing.get(wanted.trust):
        case Stored(), Stored():
            return ()
        case Stored(), None:
            return (Step(wanted.trust, Origin.TRUST),)
        case None, None if authority is None:
            return (Step(wanted.authority, Origin.AUTHORITY),)
        case None, trust if authority and (trust is None or _trusts(trust, authority)):
            return (Step(wanted.certificate, Origin.CERTIFICATE),)
    raise Refused(
        f"there is no {wanted.certificate}, and clients trust an authority whose key is not in "
        f"{wanted.authority}: create the certificate from that authority, or delete "
        f"{wanted.trust}"
    )


def _trusts(trust: Stored, authority: Stored) -> bool:
    return trust.data["ca.crt"].split() == authority.data["ca.crt"].split()


def _problem(part: Part, stored: Stored) -> str:
    """Return why what is there is not what it is to be; empty if nothing is wrong."""
    for key, _ in part.files:
        text = stored.data.get(key, "")
        if not text.strip():
            return f"{key} is {'empty' if key in stored.data else 'missing'}"
        if problem := damage(key, text):
            return f"{key} is damaged: {problem}"
    return ""


def _check_signing(text: str) -> None:
    """Raise ValueError if a text is not gate.json, quoting none of it."""
    try:
        signing = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError:
        raise ValueError("not the JSON that muster wrote") from None
    for name in ("answer_seed", "node_seed"):
        nkeys.Key.from_seed(signing.get(name, ""), nkeys.Kind.ACCOUNT)


def _check_pem(text: str) -> None:
    """Raise ValueError if a text has no certificate or key, quoting none of it."""
    blocks = _PEM.findall(text)
    if not blocks:
        raise ValueError("no PEM")
    for _, content in blocks:
        try:
            base64.b64decode("".join(content.split()), validate=True)
        except ValueError:
            raise ValueError("no PEM: its content is not base64") from None
