"""Door to stdout: a receiver that is the notifier's own log, one line a notification."""

from muster import logs
from muster_notifier import answers, message


async def send(sent: message.Message) -> answers.Answer:
    """Log the message."""
    logs.logger().info("notification", id=sent.key, text=sent.text)
    return answers.Answer(kind=answers.Kind.TAKEN, detail="logged")
