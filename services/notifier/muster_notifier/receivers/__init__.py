"""One module for each kind of receiver, with the format of its messages.

`factory` makes them from settings; `results` is what an attempt came to, `message` the text of a
notification; `endpoint` is how they are reached. `kubernetes_api` also finds the owners of pods.
"""
