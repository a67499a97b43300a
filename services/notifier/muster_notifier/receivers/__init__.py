"""Receivers by kind, with the format of their messages.

`factory` makes them from settings; `results` is what an attempt came to, `message` the text of a
notification; `endpoint` is how they are reached. `kubernetes_api` also finds the owners of pods.
"""
