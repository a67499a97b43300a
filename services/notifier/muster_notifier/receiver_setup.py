"""Adapter for the `muster notify setup` commands: test a receiver, then add it to the notifier.

The receiver is written to a directory or, with the rights of the kubeconfig's user, to the
notifier's Secret of receivers; or it is printed as a manifest. Secrets are read from files or from
a prompt without echo, never from an option.
"""

import asyncio
import getpass
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import cyclopts
import msgspec
from cyclopts import Parameter

from muster import commands
from muster.cli import output, reach
from muster.kubernetes import installation
from muster.local import central_settings
from muster.local import running as local_running
from muster_notifier import running, sample_message
from muster_notifier.config import receiver_settings, schema, setup_plan
from muster_notifier.receivers import directory, results

_NAME: Final = "notify"
_SECRET_BYTES_MAX: Final = 16 * 1024
_RECEIVERS: Final = "muster-notifier-receivers"

app = cyclopts.App(
    name="setup",
    help="Add a receiver: send it a test message, then write it to the cluster, or print it.",
    version_flags=[],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options that all `muster notify setup` commands share.

    Parameters
    ----------
    name
        The receiver's name; by default the name of its kind.
    secret_file
        A file with the receiver's secret; without it, the command prompts for the secret.
    context
        The kubeconfig context of muster's cluster; if neither it nor --directory is given, the
        manifest is printed.
    directory
        Write to this directory, for `muster up --receivers DIRECTORY`, instead of a cluster.
    namespace
        The namespace of muster in that cluster.
    print_
        Print the manifest, and write nothing.
    no_test
        Send no test message.
    replace
        Replace an existing receiver of this name.

    """

    name: Annotated[str, Parameter(show_default=False)] = ""
    secret_file: Path | None = None
    context: str | None = None
    directory: Path | None = None
    namespace: str = reach.NAMESPACE
    print_: Annotated[bool, Parameter(name="--print", negative="", show_default=False)] = False
    no_test: output.Flag = False
    replace: output.Flag = False


_OPTIONS: Final = _Options()
_Common = Annotated[_Options, Parameter(name="*")]
_Reach = Annotated[receiver_settings.Reach, Parameter(help="Which addresses requests may reach.")]
_PUBLIC: Final = receiver_settings.Reach.PUBLIC


class _Unusable(Exception):
    """The options or answers are unusable; the message gives the reason."""


@app.command
def slack(*, channel: str = "", reach: _Reach = _PUBLIC, options: _Common = _OPTIONS) -> int:
    """Notify a Slack channel. The secret is a bot token, or the URL of an incoming webhook.

    Parameters
    ----------
    channel
        The channel for a bot token, such as `#gpu-ops`; an incoming webhook has a fixed channel.

    """

    def plan(name: str) -> setup_plan.Plan:
        secret = _secret(options, "Bot token (xoxb-...), or URL of an incoming webhook:")
        if not setup_plan.is_slack_webhook(secret):
            to = _text(channel, "--channel", "Channel, such as #gpu-ops:")
        elif channel:
            raise _Unusable("--channel: an incoming webhook has a fixed channel")
        else:
            to = ""
        return setup_plan.slack(name, secret, channel=to, reach=reach)

    return _set_up("slack", plan, options)


@app.command
def pagerduty(*, url: str = "", reach: _Reach = _PUBLIC, options: _Common = _OPTIONS) -> int:
    """Notify a PagerDuty service. The secret is the integration key of its Events API v2.

    Parameters
    ----------
    url
        The address of the Events API; for the EU: https://events.eu.pagerduty.com/v2/enqueue.

    """

    def plan(name: str) -> setup_plan.Plan:
        secret = _secret(options, "Integration key:")
        return setup_plan.pagerduty(name, secret, url=url, reach=reach)

    return _set_up("pagerduty", plan, options)


@app.command
def email(
    *,
    host: str = "",
    port: int = 587,
    sender: str = "",
    to: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    tls: receiver_settings.Tls = receiver_settings.Tls.STARTTLS,
    username: str = "",
    options: _Common = _OPTIONS,
) -> int:
    """Send mail through a relay. The secret is the password of `--username`, if that is given.

    Parameters
    ----------
    host
        The mail relay.
    port
        The relay's port.
    sender
        The sender's address.
    to
        A recipient's address; can be repeated.
    tls
        How the mail is encrypted.
    username
        The user name for the relay.

    """

    def plan(name: str) -> setup_plan.Plan:
        mail = setup_plan.Mail(
            host=_text(host, "--host", "Mail relay, such as smtp.example.com:"),
            port=port,
            sender=_text(sender, "--sender", "Sender's address:"),
            to=to or tuple(_text("", "--to", "Recipients' addresses:").replace(",", " ").split()),
            tls=tls,
            username=username,
        )
        if options.secret_file is not None and not username:
            raise _Unusable("--secret-file: a password requires --username")
        secret = _secret(options, f"Password of {username}:") if username else ""
        return setup_plan.email(name, secret, mail)

    return _set_up("email", plan, options)


@app.command
def teams(*, reach: _Reach = _PUBLIC, options: _Common = _OPTIONS) -> int:
    """Notify a Microsoft Teams channel. The secret is the URL of its workflow."""

    def plan(name: str) -> setup_plan.Plan:
        return setup_plan.teams(name, _secret(options, "URL of the workflow:"), reach=reach)

    return _set_up("teams", plan, options)


@app.command
def webhook(*, url: str = "", reach: _Reach = _PUBLIC, options: _Common = _OPTIONS) -> int:
    """Notify any HTTP server. The secret is its URL or, with `--url`, the optional signing key.

    Parameters
    ----------
    url
        The URL, if it contains no secret.

    """

    def plan(name: str) -> setup_plan.Plan:
        has_secret = not url or options.secret_file is not None
        secret = _secret(options, "URL:") if has_secret else ""
        return setup_plan.webhook(name, secret, url=url, reach=reach)

    return _set_up("webhook", plan, options)


def _set_up(kind: str, make: Callable[[str], setup_plan.Plan], options: _Options) -> int:
    if options.directory is not None and (options.context or options.print_):
        return output.fail(_NAME, "--directory: cannot be combined with --context or --print")
    try:
        plan = make(_named(options.name or kind))
        if refusal := _refusal(plan, options):
            return output.fail(_NAME, refusal)
        with tempfile.TemporaryDirectory() as place:
            configured = _validated(plan, Path(place))
            if not options.no_test and not _is_taken(plan.name, configured):
                problem = "nothing was written; --no-test writes the receiver without a test"
                return output.fail(_NAME, problem, code=1)
        return _put(plan, options)
    except (_Unusable, running.Unusable) as error:
        return output.fail(_NAME, str(error))
    except installation.Unreachable as error:
        return output.fail(_NAME, str(error), code=1)


def _refusal(plan: setup_plan.Plan, options: _Options) -> str | None:
    """Return why the receiver must not be written; None or an empty text otherwise.

    Raises _Unusable, Unusable and Unreachable.
    """
    if options.directory is not None:
        if plan.name in central_settings.RECEIVERS:
            return f"`muster up` already has a receiver {plan.name}: choose another --name"
        return plan.refusal(_present(options.directory), replaces=options.replace)
    if options.context is None or options.print_:
        return None
    return asyncio.run(_refusal_of_cluster(plan, options, options.context))


def _put(plan: setup_plan.Plan, options: _Options) -> int:
    """Write or print the receiver; return the exit code. Raises _Unusable and Unreachable."""
    if options.directory is not None:
        return _write_files(plan, options.directory)
    if options.context is None or options.print_:
        return _print(plan, options)
    return asyncio.run(_write(plan, options, options.context))


def _named(name: str) -> str:
    """Return the name if it is valid for a receiver. Raises _Unusable."""
    try:
        return msgspec.convert(name, schema.ReceiverName)
    except msgspec.ValidationError:
        expected = "at most 63 letters, digits, - and _, beginning with a letter or digit"
        raise _Unusable(f"--name: {name!r}: expected {expected}") from None


def _validated(plan: setup_plan.Plan, place: Path) -> schema.Settings:
    """Return settings with the receiver, as the notifier would read them. Raises _Unusable."""
    for file, text in plan.files().items():
        (place / file).write_text(text, "utf-8")
    settings = schema.Settings()
    content = directory.read(place, settings)
    if content.refused:
        raise _Unusable("; ".join(content.refused.values()).replace(f"{place}/", ""))
    return schema.with_receivers(settings, content.receivers)


def _is_taken(name: str, configured: schema.Settings) -> bool:
    """Send a test message, print the answers, and return whether the receiver accepted it."""
    receiver = next(each for each in configured.receivers if each.name == name)
    attempts = asyncio.run(sample_message.send(receiver, configured))
    for attempt in attempts:
        output.warn(_NAME, f"test message to {name} {attempt.answer}")
    return attempts[0].kind is results.Kind.ACCEPTED


def _print(plan: setup_plan.Plan, options: _Options) -> int:
    output.print_yaml(plan.manifest(secret=_RECEIVERS, namespace=options.namespace))
    apply = f"kubectl apply --server-side --field-manager={plan.manager} -f -"
    local = next((each.receivers for each in local_running.here()), "")
    here = f"; for `muster up` on this machine: --directory {local}" if local else ""
    output.warn(_NAME, f"nothing was written: pipe this to `{apply}`, or pass --context{here}")
    return 0


def _present(place: Path) -> dict[str, bytes]:
    """Return the contents of the files in a receivers directory, by name. Raises _Unusable."""
    try:
        return {file.name: file.read_bytes() for file in place.iterdir() if file.is_file()}
    except OSError as error:
        raise _Unusable(f"--directory: {place}: {error.strerror}") from None


def _write_files(plan: setup_plan.Plan, place: Path) -> int:
    """Write the receiver to a directory; return the exit code. Raises _Unusable."""
    try:
        # the settings last, because they name the secret
        for name, text in reversed(plan.files().items()):
            partial = place / f".{name}.partial"
            partial.unlink(missing_ok=True)
            partial.touch(mode=0o600)
            partial.write_text(text, "utf-8")
            partial.replace(place / name)
    except OSError as error:
        raise _Unusable(f"--directory: {place}: {error.strerror}") from None
    output.show(
        f"{plan.name}: written to {place}; a `muster up` with this directory uses it within "
        f"seconds; then: muster notify test {plan.name}"
    )
    return 0


async def _refusal_of_cluster(plan: setup_plan.Plan, options: _Options, context: str) -> str | None:
    """Return why the receiver must not be written to the cluster; an empty string otherwise.

    Raises Unreachable and Unusable.
    """
    if missing := commands.missing("labeler"):
        raise installation.Unreachable(missing)
    from muster.cli import cluster as clusters  # noqa: PLC0415  # the client, only where it is used

    async with clusters.opened(context=context, namespace=options.namespace) as cluster:
        output.warn(_NAME, await cluster.rights(context))
        secret = installation.receivers_secret(await cluster.pods(), options.namespace)
        refusal = plan.refusal(await cluster.secret(secret), replaces=options.replace)
    if plan.name in await running.configured_names(context, options.namespace):
        return f"the notifier's settings already have a receiver {plan.name}: pass another --name"
    return refusal


async def _write(plan: setup_plan.Plan, options: _Options, context: str) -> int:
    """Write the receiver to the cluster; return the exit code. Raises Unreachable."""
    from muster.cli import cluster as clusters  # noqa: PLC0415  # the client, only where it is used

    async with clusters.opened(context=context, namespace=options.namespace) as cluster:
        secret = installation.receivers_secret(await cluster.pods(), options.namespace)
        await cluster.apply_secret(
            secret,
            plan.manifest(secret=secret, namespace=options.namespace),
            manager=plan.manager,
            force=options.replace,
        )
    where = "" if options.namespace == reach.NAMESPACE else f" --namespace {options.namespace}"
    output.show(
        f"{plan.name}: written to the Secret {secret}; the notifier uses it within two minutes, "
        f"without a restart; then: muster --context {context}{where} notify test {plan.name}"
    )
    return 0


def _text(given: str, option: str, question: str) -> str:
    """Return the option's value, or else the answer on the terminal. Raises _Unusable."""
    answer = given
    if not answer and sys.stdin.isatty():
        output.ask(question)
        answer = sys.stdin.readline().strip()
    if not answer:
        raise _Unusable(f"{option} is required")
    return answer


def _secret(options: _Options, question: str) -> str:
    """Return the secret from its file, or else from a prompt without echo. Raises _Unusable."""
    file = options.secret_file
    if file is not None:
        try:
            with file.open("rb") as opened:
                text = opened.read(_SECRET_BYTES_MAX + 1).decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise _Unusable(f"--secret-file: {file}: {reason}") from None
    elif sys.stdin.isatty():
        text = getpass.getpass(f"{question} ")
    else:
        raise _Unusable(f"pass --secret-file FILE with this content: {question.removesuffix(':')}")
    secret = text.strip()
    if not secret:
        raise _Unusable("the secret is empty")
    if len(secret) > _SECRET_BYTES_MAX or not secret.isprintable():
        raise _Unusable("the secret must be one printable line of at most 16 KiB")
    return secret
