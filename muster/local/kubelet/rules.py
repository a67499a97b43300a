"""Pure: implements the kubelet's stateless rules: names, quantities and error texts.

Sources: kubernetes v1.36.2 and v1.37.2; the functions name the files.
"""

import re

VERSIONS = ("1.34", "1.37")
"""The kubelet versions that the stand-in can simulate; versions in between behave like the older
one.
"""
VERSION = "v1beta1"
PLUGIN_TYPE = "DevicePlugin"

_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAME_LENGTH_MAX = 63
_SUBDOMAIN_LENGTH_MAX = 253
_QUOTA_PREFIX = "requests."
_SUFFIXES = ("", "k", "M", "G", "T", "P", "E")


def is_per_socket(version: str) -> bool:
    """Return whether a kubelet also identifies each registration by its socket (k/k#135437)."""
    return version != VERSIONS[0]


def refusal(version: str, resource_name: str) -> str | None:
    """Return why the kubelet refuses this Register call; None if it continues with dialling.

    Source: pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, Register.
    """
    if version != VERSION:
        return (
            f'requested API version "{version}" is not supported by kubelet. '
            f'Supported version is ["{VERSION}"]'
        )
    if not is_extended_resource(resource_name):
        return f'the ResourceName "{resource_name}" is invalid'
    return None


def watcher_refusal(resource_name: str, versions: list[str]) -> str | None:
    """Return why the plugin watcher refuses a plugin; None if it continues with dialling.

    Source: pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, ValidatePlugin.
    """
    if VERSION not in versions:
        return (
            f"manager version, {VERSION}, is not among plugin supported versions "
            f"[{' '.join(versions)}]"
        )
    if not is_extended_resource(resource_name):
        return (
            f'invalid name of device plugin socket: the ResourceName "{resource_name}" is invalid'
        )
    return None


def is_extended_resource(name: str) -> bool:
    """Return whether a plugin may register this name.

    The name must also be valid with the quota prefix, which uses 9 of the domain's 253 characters.
    Source: pkg/apis/core/v1/helper/helpers.go, IsExtendedResourceName.
    """
    if "/" not in name or "kubernetes.io/" in name or name.startswith(_QUOTA_PREFIX):
        return False
    domain, _, rest = f"{_QUOTA_PREFIX}{name}".partition("/")
    return (
        len(domain) <= _SUBDOMAIN_LENGTH_MAX
        and _SUBDOMAIN.fullmatch(domain) is not None
        and len(rest) <= _NAME_LENGTH_MAX
        and _NAME.fullmatch(rest) is not None
    )


def quantity(count: int) -> str:
    """Return a count as the API writes it: 5000 is `5k`, 1500 stays `1500`.

    Source: apimachinery/pkg/api/resource/quantity.go, CanonicalizeBytes for DecimalSI.
    """
    power = 0
    while count and count % 1000 == 0 and power < len(_SUFFIXES) - 1:
        count //= 1000
        power += 1
    return f"{count}{_SUFFIXES[power]}"


def count(text: str) -> int:
    """Parse a text that `quantity` wrote. Raises ValueError for fractions and other texts."""
    suffix = text[-1:] if text[-1:] in _SUFFIXES[1:] else ""
    digits = text.removesuffix(suffix)
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{text!r} is not a whole quantity such as 2 or 5k")
    return int(digits) * int(1000 ** _SUFFIXES.index(suffix))


def rpc_error(code_name: str, details: str) -> str:
    """Format a gRPC status as Go does: `rpc error: code = ResourceExhausted desc = ...`.

    `code_name` is spelled as in Python, RESOURCE_EXHAUSTED.
    """
    code = "".join(word.capitalize() for word in code_name.split("_"))
    return f"rpc error: code = {'Canceled' if code == 'Cancelled' else code} desc = {details}"


def admission_error(reason: str) -> str:
    """Return the text of the pod's event about a failed allocation.

    Source: pkg/kubelet/cm/admission/errors.go, GetPodAdmitResult.
    """
    return f"Allocate failed due to {reason}, which is unexpected"
