"""Pure: A notification as a mail: its subject names state and group, its thread is the group's."""

from email import message as messages
from email import policy
from typing import Final

from muster_notifier import message
from muster_notifier import notification as notifications

_SUBJECT_MAX: Final = 200
_POLICY: Final = policy.SMTP.clone(max_line_length=998)


def mail(
    notification: notifications.Notification,
    words: message.Message,
    *,
    sender: str,
    to: tuple[str, ...],
) -> bytes:
    """Return the mail as it is sent; the same news has the same Message-ID."""
    domain = sender.rpartition("@")[2].rstrip(">") or "muster"
    thread = f"<group-{notifications.token(notification.group)}@{domain}>"
    made = messages.EmailMessage(policy=_POLICY)
    made["From"] = sender
    made["To"] = ", ".join(to)
    made["Subject"] = message.line(words.title, _SUBJECT_MAX)
    made["Date"] = notification.at
    made["Message-ID"] = f"<{notification.id}@{domain}>"
    made["In-Reply-To"] = thread
    made["References"] = thread
    made["Auto-Submitted"] = "auto-generated"
    made.set_content(words.text + "\n", charset="utf-8", cte="base64")
    return made.as_bytes()
