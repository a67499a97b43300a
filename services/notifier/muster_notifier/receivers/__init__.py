"""Sends notifications to each kind of receiver, in the format of that kind.

`factory` builds them from settings, `results` defines the result of an attempt, `message` writes
the text of a notification, and `endpoint` sends requests. `kubernetes_api` also looks up the owners
of pods.
"""
